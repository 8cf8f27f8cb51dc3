"""`bench --selector all`: every method is measured or said not to be, at equal rows and bytes; `--by-step`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from sparseattn.cli.app import app
from sparseattn.core.selection import Selection
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.result import Evaluation
from sparseattn.roles.role import Role
from sparseattn.roles.roles import Roles
from sparseattn.selectors.baselines.exact import Exact
from sparseattn.selectors.checks import check_group
from sparseattn.selectors.identity import identity
from sparseattn.selectors.pages.quest import Quest
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace

SMALL = ("--sink", "2", "--window", "8", "--last", "4", "--no-figures")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the queries of the last tokens alone, so that what learns from a prompt's queries has none."""
    path = tmp_path_factory.mktemp("traces") / "small.safetensors"
    synthetic(300, heads=2, group=2, size=32, clusters=8, queries=6).save(path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every token's query, foreseen ones too, of a model whose depth it tells: only RoPE is lacking."""
    path = tmp_path_factory.mktemp("traces") / "whole.safetensors"
    made = synthetic(300, heads=2, group=2, size=32, clusters=8)
    layer = made.layer(0)
    Trace.build([replace(layer, ahead=layer.query)], made.positions, meta={"model_layers": 9}).save(path)
    return path


BUCKETS = {
    "a2ats",
    "kascade",
    "kmeans",
    "locret",
    "moments",
    "saap",
    "seer",
}  # of a model: of a file for it, its layers or its RoPE
LEARN = {"doublesparsity", "h2o", "infllm", "infinigen", "pyramidkv", "bridge", "retrieval"}
LEARN |= {"a2sf", "fastgen", "keyformer", "querypq", "robustvamana", "scissorhands", "snapkv", "zipcache"}
LEARN |= {"d2o", "elasticcache", "kvmerger", "pillar"}
WIDE = {"infllm": 128, "infllm2": 64, "skipsoftmax": 128}  # rows that these read at a time


def run(trace: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(app, ["bench", str(trace), "--out", str(out), *SMALL, *more])


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.filterwarnings("ignore:.*the keys serve as queries")
def test_every_method_is_measured_or_its_reason_is_said(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    pytest.importorskip("numba")
    done = run(
        trace, tmp_path, "--selector", "all", "--selector", "quest:page=8", "--budget", "16,64", "--bytes", "60%"
    )
    assert done.exit_code == 0, done.output
    measured = {one["selector"] for one in records(tmp_path / "bench.jsonl")}
    rows, read = records(tmp_path / "by-layer.jsonl")
    text = " ".join(done.output.split())
    for name in SELECTORS:
        method = make_selector(name)
        label = method.label()
        assert (label in BUCKETS | LEARN) == (repr(method) not in measured), label
        if repr(method) in measured:
            there = label in {one["label"] for one in rows["methods"]}
            assert there or (label in WIDE and label in rows["left_out"]), "rows that wait for a block are read too"
            assert (label in read["left_out"]) != (label in {one["label"] for one in read["methods"]})
        else:
            assert label in rows["left_out"], "not left out in silence"
            assert rows["left_out"][label] == read["left_out"][label]
            assert f"small: {label} is not measured: {' '.join(rows['left_out'][label].split())}" in text
    assert repr(Quest(8)) in measured, "beside what is named"
    assert "learns from the queries of the prefill" in rows["left_out"]["retrieval"]
    assert "RoPE" in rows["left_out"]["saap"]
    assert "small, 74 tokens attended (budget 64): all methods, smallest error first" in text
    assert "small, 60% of the cache's bytes: all methods" in text
    reads = {one["label"]: one["mean"]["bytes_share"] for one in read["methods"]}
    for one in read["methods"]:
        mixed = len(one["budgets"]) == 2
        assert not mixed or reads[one["label"]] == pytest.approx(0.6)


@pytest.mark.filterwarnings("ignore:.*the keys serve as queries")
def test_only_what_is_trained_for_a_model_is_left_out_where_a_trace_holds_all(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    pytest.importorskip("numba")
    done = run(whole, tmp_path, "--selector", "all", "--budget", "16,130")
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    found = records(tmp_path / "bench.jsonl")
    labels = {make_selector(name).label() for name in SELECTORS}
    assert {one["label"] for one in found} == labels - BUCKETS, "pyramidkv too, as the trace tells the depth"
    assert text.count("is not measured") == len(BUCKETS)
    budgets = {one["label"]: [] for one in found}
    for one in found:
        budgets[one["label"]].append(one["budget"])
    for name, page in WIDE.items():
        assert budgets.pop(name) == [page, 130], "a whole block, and what is asked for"
    assert "whole: infllm reads 128 rows at a time, so it is measured at a budget of 128 in place of 16" in text
    assert budgets.pop("window") == [16]
    assert set(map(tuple, budgets.values())) == {(16, 130)}
    rows, _ = records(tmp_path / "by-layer.jsonl")
    assert rows["left_out"].keys() == BUCKETS | (WIDE.keys() & rows["left_out"].keys())


def test_what_is_named_must_run(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path / "out", "--selector", "all", "--selector", "saap")
    assert done.exit_code == 2
    assert "RoPE" in done.stderr
    assert not (tmp_path / "out").exists(), "before any work"


def test_settings_that_suit_no_method_are_refused(trace: Path, tmp_path: Path) -> None:
    done = run(trace, tmp_path / "out", "--selector", "all", "--last", "7")
    assert done.exit_code == 2
    assert "holds the queries of its last 6 tokens" in done.stderr


class Greedy(Exact):
    def select(self, query, step, budget) -> Selection:
        return super().select(query, step, budget + 1)


class Refusing(Exact):
    def append(self, rows) -> None:
        check_group("rows")  # a sentence of the package


class Faulty(Exact):
    def append(self, rows) -> None:
        torch.zeros(2).numpy().reshape(3)  # a ValueError of a library


@pytest.mark.parametrize(("method", "left_out"), [(Refusing, True), (Greedy, False), (Faulty, False)])
def test_what_a_method_refuses_when_it_sees_rows_is_said_and_a_fault_ends_the_run(
    method: type[Exact], left_out: bool, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(SELECTORS) - {"exact", "lowbit", "quest", "random", "window"}:
        monkeypatch.delitem(SELECTORS, name)
    monkeypatch.setitem(SELECTORS, "other", method)
    done = run(trace, tmp_path, "--selector", "all")
    assert (done.exit_code == 0) == left_out, done.output
    if left_out:
        assert "Refusing is not measured: group is one of" in " ".join(done.output.split())
        assert records(tmp_path / "by-layer.jsonl")[0]["left_out"][identity(Refusing)].startswith("group is one of")
    else:
        assert "Greedy" in done.stderr or "reshape" in str(done.exception)


def test_a_measure_by_step_has_its_mean(trace: Path) -> None:
    opened, settings = Trace.open(trace), {"sink": 2, "window": 8, "last": 4}
    one = evaluate(opened, "quest", 32, **settings, steps=("recall@10", "relative_error"))
    assert set(one.steps) == {"recall@10", "relative_error"}
    for name, values in one.steps.items():
        assert values.shape == (1, 4, 4)
        torch.testing.assert_close(values.double().mean(-1), one.heads[name])
        assert len(set(one.by_step(name)[0].tolist())) > 1, "steps differ"
        assert one.record()["steps"][name] == one.by_step(name).tolist()
    assert evaluate(opened, "quest", 32, **settings).record().keys().isdisjoint({"steps"})
    far = one.far(float(one.heads["indexed_mass"].median()))
    assert far.by_step("recall@10").shape == (1, 4)
    assert int(far.steps["recall@10"].isnan().any(-1).sum()) == int(far.heads["mass"].isnan().sum()) > 0


def test_steps_of_roles_are_in_the_order_of_the_heads(trace: Path) -> None:
    opened, settings = Trace.open(trace), {"sink": 2, "window": 8, "last": 4, "steps": ("recall@10",)}
    mixed = evaluate(opened, Roles({0: [Role("window"), Role("quest")]}, name="mixed"), 32, **settings)
    alone = evaluate(opened, "quest", 32, **settings)
    assert torch.equal(mixed.steps["recall@10"][0, 2:], alone.steps["recall@10"][0, 2:])
    assert not mixed.steps["recall@10"][0, :2].any()


def test_bench_by_step_records_and_draws(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from sparseattn.reporting.plots import bench_steps as plots_steps

    drawn: list[Any] = []
    save = plots_steps.save
    monkeypatch.setattr(plots_steps, "save", lambda figure, path: (drawn.append(figure), save(figure, path)))
    methods = ("--selector", "quest", "--selector", "exact", "--selector", "window")
    done = run(trace, tmp_path, *methods, "--budget", "16,32", "--by-step", "recall@10", "--figures")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "recall@10-small.png").stat().st_size > 0
    found = {(one["label"], one["budget"]): one["steps"]["recall@10"] for one in records(tmp_path / "bench.jsonl")}
    assert found["exact", 32] == [[1.0] * 4]
    (figure,) = drawn
    for axis, budget in zip(figure.axes, (16, 32), strict=True):
        lines = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        assert set(lines) == {"quest", "exact", "window", "full attention"}
        assert lines["quest"] == pytest.approx(found["quest", budget][0])
        assert lines["window"] == [0.0] * 4, "without a budget, in every panel"


def test_what_has_no_value_at_every_step_is_refused(trace: Path) -> None:
    with pytest.raises(ValueError, match=r"step by step is recall@1, .*; got \['lookup_hits'\]"):
        evaluate(Trace.open(trace), "quest", 32, last=4, steps=["lookup_hits"])


def test_a_record_without_steps_has_none() -> None:
    heads = {"mass": torch.ones(1, 1, dtype=torch.float64)}
    assert Evaluation("t", "w", "w", None, {}, (0,), heads).steps == {}
