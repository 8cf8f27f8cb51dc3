"""`eval --engine vllm`: methods compared in one engine that is switched between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import llama

from sparseattn.models.load import load_tokenizer
from sparseattn.models.packaged import PACKAGED
from sparseattn.roles.fingerprint import of_folder
from sparseattn.roles.plan import Plan
from sparseattn.roles.role import Role
from sparseattn.serving.vllm.server import SPACE

LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads text, and that starts sooner than SmolLM2."""
    if not PACKAGED["smollm2"].cached:
        pytest.skip("smollm2, whose tokenizer this takes, is not cached: `sparseattn models --fetch smollm2`")
    tokenizer = load_tokenizer("smollm2")
    folder = tmp_path_factory.mktemp("llama")
    tokenizer.save_pretrained(folder)
    return llama(folder, layers=LAYERS, words=len(tokenizer))


def run(model: Path, out: Path, *more: str) -> tuple[list[dict[str, object]], str]:
    """The records of a run, and what it said beside them."""
    command = [sys.executable, "-m", "sparseattn", "eval", "--engine", "vllm", "--model", str(model), "--json"]
    asked = ["--dtype", "float32", "--task", "passkey", "--lengths", "300", "--samples", "2", "--depths", "0.5"]
    small = os.environ | {SPACE: "1"}  # GiB of cache, which vLLM zeroes, in place of a quarter of the memory
    words = [*command, *asked, "--no-figures", "--out", str(out), *more]
    done = subprocess.run(words, env=small, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stderr


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    """Two methods in one engine: the folder of the run and its records."""
    out = tmp_path_factory.mktemp("first")
    found, _ = run(model, out, "--selector", "quest", "--selector", "window", "--concurrency", "2")
    return out, found


def test_methods_are_switched_in_one_engine(first: tuple[Path, list[dict[str, object]]]) -> None:
    _, found = first
    by = {(one["method"], one["budget"]): [] for one in found}
    for one in found:
        by[one["method"], one["budget"]].append(one)
    assert list(by) == [("full", None), ("quest", "64"), ("quest", "256"), ("quest", "1024"), ("window", None)]
    assert all(len(ones) == 2 for ones in by.values())
    answers = {key: [one["response"] for one in ones] for key, ones in by.items()}
    assert answers["quest", "1024"] == answers["full", None]  # in float32, every row is read
    assert answers["window", None] != answers["full", None]
    shares = {key: [one["rows_share"] for one in ones] for key, ones in by.items()}
    assert shares["full", None] == shares["quest", "1024"] == [1, 1]
    assert all(0.2 < small < 0.7 for small in shares["quest", "64"])
    assert max(shares["window", None]) < min(shares["quest", "64"])


def test_layers_of_a_plan_differ_in_one_engine_that_goes_on(
    model: Path, first: tuple[Path, list[dict[str, object]]], tmp_path: Path
) -> None:
    """A run that goes on from another, with a new budget and with plans, beside methods that are the same for all
    layers."""
    out, before = first
    lines = (out / "eval.jsonl").read_text()
    of_weights = {"name": str(model), "fingerprint": of_folder(model)[0]}
    whole: dict[int, Role | str] = dict.fromkeys(range(2), "dense")
    whole |= dict.fromkeys(range(2, 4), Role("quest", 4096)) | dict.fromkeys(range(4, 6), Role("mean:bits=8", 4096))
    some = {**whole, **dict.fromkeys(range(2, 4), Role("quest", 16)), **dict.fromkeys(range(4, 6), "window")}
    for name, layers in (("whole", whole), ("some", some)):
        Plan(layers, name, model=of_weights).save(tmp_path / f"{name}.json")
    given = ["--plan", str(tmp_path / "whole.json"), "--plan", str(tmp_path / "some.json"), "--dense-layers", "0"]
    found, _ = run(model, out, "--selector", "quest", "--budget", "64,32", *given, "--concurrency", "2")
    answers: dict[tuple[object, object], list[object]] = {}
    shares: dict[tuple[object, object], list[float]] = {}
    for one in found:
        answers.setdefault((one["method"], one["budget"]), []).append(one["response"])
        shares.setdefault((one["method"], one["budget"]), []).append(float(str(one["rows_share"])))
    quests = [("quest", "64"), ("quest", "32")]
    full, plan, other = ("full", None), ("plan whole", None), ("plan some", None)
    assert sorted(map(str, answers)) == sorted(map(str, [full, *quests, plan, other]))
    assert answers[plan] == answers[full]  # in float32, every row is read
    assert answers[other] != answers[full]
    assert shares[plan] == [1, 1]
    assert all(0.2 < share < 0.7 for share in shares[other]), "of the layers that are sparse"
    # What is there is not asked again.
    for method in (full, quests[0]):
        kept = [[one for one in ones if (one["method"], one["budget"]) == method] for ones in (found, before)]
        assert kept[0] == kept[1]
        assert len(kept[0]) == 2
    after = (out / "eval.jsonl").read_text()
    assert after.startswith(lines)
    assert len(after.splitlines()) == len(before) + 2 * 3, "of the second run the new budget and the plans are new"
