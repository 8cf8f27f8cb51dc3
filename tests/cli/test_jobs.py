"""Commands under torchrun: any number of processes leaves the records of one, also after a process was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseattn.cli import bench, recall
from sparseattn.cli.bench_options import BenchOptions
from sparseattn.cli.recall_options import RecallOptions
from sparseattn.traces.synthetic import synthetic
from sparseattn.utils.ranks import JobRanks
from tests.utils.test_ranks import together

TIMES = {"date", "created", "seconds", "build_seconds", "select_ms"}
SECONDS = ("prefill_seconds", "index_seconds", "decode_seconds")


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "drawn.safetensors"
    synthetic(700, heads=2, group=2, size=16, clusters=8, rope=True).save(path)
    return path


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without what a clock says."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: one for name, one in each.items() if name not in {*TIMES, *SECONDS}} for each in found]


def bench_options(trace: Path, out: Path) -> BenchOptions:
    methods = ["exact", "quest:page=8", "lowbit", "window", "random"]
    return BenchOptions([str(trace)], selector=methods, budget="16,64", last=6, out=out, figures=False, json=True)


def recall_options(trace: Path, out: Path) -> RecallOptions:
    methods = ["exact", "quest:page=8", "lowbit"]
    return RecallOptions([str(trace)], selector=methods, k=10, queries=12, out=out, figures=False, json=True)


@pytest.fixture(scope="module", params=[(bench, bench_options), (recall, recall_options)], ids=["bench", "recall"])
def of_one(
    request: pytest.FixtureRequest, trace: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Callable[[Path, Path], Any], Path]:
    """A command, its options, and the folder that one process of it leaves."""
    command, options = request.param
    out = tmp_path_factory.mktemp("one")
    command.run(options(trace, out))
    return command, options, out


@pytest.mark.parametrize("count", [2, 4])
def test_processes_leave_what_one_leaves(
    of_one: tuple[Any, Callable[[Path, Path], Any], Path],
    count: int,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In threads, each a process of the job; the first half of them is stopped, and others go on."""
    command, options, one = of_one
    name = f"{command.__name__.rpartition('.')[2]}.jsonl"
    out, job = tmp_path / "several", Local()
    monkeypatch.setattr(command, "of_job", job.get)

    def run(ranks: JobRanks) -> None:
        job.set(ranks)
        command.run(options(trace, out))

    class Killed(Exception):
        pass

    def killed(ranks: JobRanks) -> None:
        advance = ranks.advance
        ranks.advance = lambda steps=1: _raise(Killed()) if advance(steps) > 1 else 0  # type: ignore[method-assign]
        with pytest.raises(Killed):
            run(ranks)

    together(count, killed)
    items = [*out.glob("*.items/*")]
    assert items, "what was measured is there"
    assert not (out / name).exists()
    together(count + 1, run)
    assert (out / name).read_text().splitlines()
    assert records(out / name) == records(one / name)
    assert [path.name for path in out.iterdir()] == [name]


class Local:
    """Each thread's own processes of the job."""

    def __init__(self) -> None:
        import threading

        self.held = threading.local()

    def set(self, ranks: JobRanks) -> None:
        self.held.ranks = ranks

    def get(self) -> JobRanks | None:
        return getattr(self.held, "ranks", None)


def _raise(error: Exception) -> Any:
    raise error


# -- processes ---------------------------------------------------------------------------------------------------------


def started(count: int, *arguments: object) -> subprocess.Popen[str]:
    """`sparseattn` with these arguments in so many processes; one is without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    environment: Mapping[str, str] = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    words = [sys.executable, *launcher, "-m", "sparseattn", *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(count: int, *arguments: object) -> str:
    """What it printed."""
    process = started(count, *arguments)
    printed, errors = process.communicate(timeout=550)
    assert process.returncode == 0, errors[-3000:]
    return printed


def workers(process: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun has started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def kill_one(process: subprocess.Popen[str], begun: Callable[[], bool], wait: float) -> None:
    """Kill one of its workers at some time after something is there."""
    until = time.monotonic() + 300
    while not begun():
        assert process.poll() is None, "it ended before anything was there"
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(wait)
    os.kill(random.choice(workers(process)), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0


EVAL = ["--model", "reference", "--task", "passkey,kv", "--lengths", "300,420", "--samples", "2", "--depths", "0.5"]
EVAL += ["--selector", "quest", "--selector", "lowbit", "--budget", "32,64", "--no-figures", "--json"]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 4), (3, 1)])
def test_an_evaluation_goes_on_where_a_killed_one_stopped(counts: tuple[int, int], tmp_path: Path) -> None:
    whole = finished(1, "eval", *EVAL, "--out", tmp_path / "one")
    out = tmp_path / "several"

    def begun() -> bool:
        return any(part.stat().st_size for part in out.glob("eval.rank*.jsonl"))

    kill_one(started(counts[0], "eval", *EVAL, "--out", out), begun, random.random())
    left = sum(len(records(part)) for part in out.glob("eval.rank*.jsonl"))
    assert 0 < left < len(whole.splitlines())
    printed = finished(counts[1], "eval", *EVAL, "--out", out)
    assert len(printed.splitlines()) == len(whole.splitlines()), "the first process alone prints"
    keyed = [sorted(map(json.dumps, records(each / "eval.jsonl"))) for each in (tmp_path / "one", out)]
    assert keyed[0] == keyed[1]
    assert [path.name for path in out.iterdir()] == ["eval.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 4), (4, 3)])
def test_a_benchmark_goes_on_where_a_killed_one_stopped(counts: tuple[int, int], trace: Path, tmp_path: Path) -> None:
    given = [trace, "--budget", "16,64", "--last", "32", "--no-figures", "--json"]
    for method in ("exact", "quest", "lowbit", "window", "random", "sparq", "loki", "pq", "snapkv", "retrieval"):
        given += ["--selector", method]
    finished(1, "bench", *given, "--out", tmp_path / "one")
    out = tmp_path / "several"
    process = started(counts[0], "bench", *given, "--out", out)
    kill_one(process, lambda: any(out.glob("bench.items/*.safetensors")), random.random() / 4)
    assert not (out / "bench.jsonl").exists()
    finished(counts[1], "bench", *given, "--out", out)
    assert records(out / "bench.jsonl") == records(tmp_path / "one" / "bench.jsonl")


@pytest.mark.slow
def test_a_plan_of_several_processes_is_that_of_one(tmp_path: Path) -> None:
    given = ["--model", "reference", "--text", "alice", "--length", 320, "--last", 8, "--windows", 2, "--held-out", 3]
    given += ["--draws", 2, "--budget", "32,64", "--selector", "quest", "--selector", "lowbit", "--error", "10%"]
    for count in (1, 3):
        finished(count, "recommend", *given, "--out", tmp_path / str(count))
    one, several = (json.loads((tmp_path / str(n) / "plan.json").read_text()) for n in (1, 3))
    assert one["layers"] == several["layers"]
    assert one["made"]["verified"] == several["made"]["verified"]
    lines = [sorted(map(json.dumps, records(tmp_path / str(n) / "recommend.jsonl"))) for n in (1, 3)]
    assert lines[0] == lines[1]
    assert not [*(tmp_path / "3").glob("*.rank*")]


@pytest.mark.slow
def test_what_is_prepared_by_several_is_what_one_prepares(trace: Path, tmp_path: Path) -> None:
    from sparseattn.selectors.parameters.channel_calibration import Calibration
    from sparseattn.traces.trace import Trace

    texts = tmp_path / "texts"
    texts.mkdir()
    for n in range(4):
        (texts / f"{n}.txt").write_text("the garden lay behind the house. " * (4 + 3 * n))
    for count in (1, 2):
        finished(count, "capture", "--model", "reference", "--text", texts, "--out", tmp_path / str(count))
        method = ["--method", "loki", "--out", tmp_path / f"{count}.safetensors"]
        finished(count, "calibrate", tmp_path / str(count), *method)
    for n in range(4):
        one, two = (Trace.open(tmp_path / str(count) / f"{n}.safetensors") for count in (1, 2))
        assert one.hashes == two.hashes
    one, two = (Calibration.load(tmp_path / f"{count}.safetensors") for count in (1, 2))
    assert one.layers.keys() == two.layers.keys()
    for layer, statistics in one.layers.items():
        for name, part in statistics.items():
            assert (part == two.layers[layer][name]).all()
    assert not [*tmp_path.glob("*.items")]


@pytest.mark.slow
def test_what_cannot_be_divided_is_refused(trace: Path, tmp_path: Path) -> None:
    process = started(2, "info", trace)
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "info takes one process, and torchrun has started 2" in errors


@pytest.mark.slow
def test_processes_that_share_a_model_leave_the_records_of_one(tmp_path: Path) -> None:
    """Each has its heads of every layer, and all answer every prompt; a run by two goes on by one and by none."""
    finished(1, "eval", *EVAL, "--out", tmp_path / "one")
    for count, task in ((2, "passkey"), (1, "passkey,kv")):
        more = ["--tensor-parallel"] * (count > 1)
        printed = finished(count, "eval", *EVAL, *more, "--task", task, "--out", tmp_path / "shared")
        assert len(printed.splitlines()) == len(records(tmp_path / "shared" / "eval.jsonl"))
    one, two = (records(tmp_path / name / "eval.jsonl") for name in ("one", "shared"))
    assert len(one) == len(two)
    assert [each["answers"] for each in one] == [each["answers"] for each in two]
    for mine, theirs in zip(one, two, strict=True):
        for name, value in mine.items():
            assert theirs[name] == (pytest.approx(value, abs=1e-4) if isinstance(value, float) else value), name
    process = started(1, "eval", *EVAL, "--tensor-parallel", "--out", tmp_path / "alone")
    assert "start the command with torchrun" in process.communicate(timeout=300)[1]
