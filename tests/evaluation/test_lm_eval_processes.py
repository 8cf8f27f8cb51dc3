"""`sparseattn lm-eval` under torchrun: the scores, samples and counts of one process, however many there are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'sparseattn[lm-eval]'")
pytest.importorskip("transformers")

from sparseattn.core.activity import Activity, LayerActivity
from sparseattn.evaluation.harness.processes import dealt, in_order, spread_responses
from sparseattn.evaluation.harness.tally import KEY
from tests import ROOT
from tests.evaluation.lm_eval_tiny import saved_model, saved_tasks

# One at a time: the sequences of a batch are sealed together, so that other documents beside one change its choices.
GIVEN = "lm-eval --tasks made_choice,made_answer --batch_size 1 --device cpu --log_samples --selector quest:page=4"
GIVEN += " --budget 8 --sink 2 --window 8 --seal 16"


def ran(count: int, tmp_path: Path, out: str, *more: object, fails: bool = False) -> str:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    words = [sys.executable, *launcher, "-m", "tests.evaluation.lm_eval_process", *GIVEN.split()]
    words += ["--include_path", str(tmp_path / "tasks"), "--model_args", f"pretrained={tmp_path / 'model'}"]
    words += ["--output_path", str(tmp_path / out), *map(str, more)]
    around = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    around["HF_DATASETS_CACHE"] = str(tmp_path / "datasets")
    done = subprocess.run(words, env=around, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr if fails else done.stdout


def written(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The results, and all samples without what a run has of its own."""
    (file,) = folder.rglob("results_*.json")
    lines = [line for path in sorted(folder.rglob("samples_*.jsonl")) for line in path.read_text().splitlines()]
    return json.loads(file.read_text()), [json.loads(line) for line in lines]


def same(found: Any, expected: Any) -> bool:
    """But for rounding of log-likelihoods, which samples have as texts."""
    if isinstance(expected, (list, dict)):
        several = expected.items() if isinstance(expected, dict) else enumerate(expected)
        return len(found) == len(expected) and all(same(found[name], one) for name, one in several)
    with contextlib.suppress(TypeError, ValueError):
        return bool(float(found) == pytest.approx(float(expected), abs=1e-3))
    return bool(found == expected)


@pytest.fixture
def material(tmp_path: Path) -> Path:
    saved_model(tmp_path / "model")
    saved_tasks(tmp_path / "tasks")
    return tmp_path


@pytest.mark.slow
def test_processes_write_what_one_writes(material: Path) -> None:
    """They divide the documents, or they share the model. Kept responses serve any number of processes."""
    ran(1, material, "one")
    one, samples = written(material / "one")
    ways = {
        "divided": (2, ()),
        "shared": (2, ("--tensor-parallel",)),
        "kept": (2, ("--use_cache", material / "kept")),
        "kept again": (3, ("--use_cache", material / "kept")),
        "kept by one": (1, ("--use_cache", material / "kept")),
    }
    for out, (count, more) in ways.items():
        said = ran(count, material, out, *more)
        assert len(re.findall(r"decoded by quest", said)) == 1, "the first process alone prints"
        found, theirs = written(material / out)
        assert found["results"] == one["results"], out
        assert same(theirs, samples), out
        tasks, expected = (each["config"]["sparseattn"]["tasks"] for each in (found, one))
        if "again" in out or "by one" in out:
            assert all(task["of_kept_responses"] for task in tasks.values())
            for task in (*tasks.values(), *expected.values()):
                task.pop("of_kept_responses", None)
        for name, task in tasks.items():  # what is prefilled together, and so how often, differs with the documents
            for counts in (task, expected[name], *task["by_layer"].values(), *expected[name]["by_layer"].values()):
                counts.pop("dense_steps", None)
        if "again" in out or "by one" in out:  # nothing ran, so that nobody looked for tails
            tasks = {name: {**task, "tail_tokens": expected[name]["tail_tokens"]} for name, task in tasks.items()}
        assert tasks == expected, out
    assert [path.name[-8:] for path in material.glob("kept-*")] == ["rank0.db"]


@pytest.mark.slow
def test_what_does_not_go_by_several_is_said(material: Path) -> None:
    assert "start the command with torchrun" in ran(1, material, "out", "--tensor-parallel", fails=True)
    server = ("--model", "local-completions", "--model_args", "base_url=http://127.0.0.1:1/v1/completions")
    assert "a server answers one process" in ran(2, material, "out", *server, fails=True)
    assert not (material / "out").exists()


def test_what_was_dealt_is_put_in_order() -> None:
    assert dealt([[0, 2, 4], [1, 3]]) == [0, 1, 2, 3, 4]
    samples = [[{"filter": f, "doc": n} for f in "ab" for n in range(rank, 5, 3)] for rank in range(3)]
    found = in_order([{"task": each} for each in samples])["task"]
    assert [(one["filter"], one["doc"]) for one in found] == [(f, n) for f in "ab" for n in range(5)]
    numbers = [{"task": {("acc", "none"): list(range(rank, 4, 2))}} for rank in range(2)]
    assert in_order(numbers) == {"task": {("acc", "none"): [0, 1, 2, 3]}}


def test_kept_responses_of_several_are_joined_and_their_counts_added(tmp_path: Path) -> None:
    from sqlitedict import SqliteDict

    counts = Activity({1: LayerActivity(3, 1, 30, 90)}).to_dict()
    for rank in range(3):
        with SqliteDict(str(tmp_path / f"kept_rank{rank}.db")) as kept:
            kept[f"answer {rank}"], kept[KEY + "task"] = str(rank), counts
            kept.commit()
    spread_responses(str(tmp_path / "kept"), None, sharing=False)
    assert [path.name for path in tmp_path.iterdir()] == ["kept_rank0.db"]
    with SqliteDict(str(tmp_path / "kept_rank0.db")) as kept:
        assert {key: kept[key] for key in kept if key.startswith("answer")} == {f"answer {n}": str(n) for n in range(3)}
        assert Activity.from_dict(kept[KEY + "task"]).total == LayerActivity(9, 3, 90, 270)
