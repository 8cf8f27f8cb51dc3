"""inspect: laws of its measures, that they are what `evaluate` finds, and the command."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sparseattn import evaluate
from sparseattn.evaluation.attention_stats import (
    BEFORE,
    COUNTS,
    MEASURES,
    NEEDED,
    PAGES,
    Inspection,
    head_distances,
    inspect_trace,
    mahalanobis,
    overlap,
    top_rows,
    top_shares,
)
from sparseattn.evaluation.rank_correlation import rank_correlation
from sparseattn.reporting import inspect_tables
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer
from tests.command import run

if importlib.util.find_spec("sklearn") is None:  # found, not imported: that takes every worker a second
    pytest.skip("could not import 'sklearn'", allow_module_level=True)
SINK, WINDOW, LAST = 2, 6, 12
ZONES = {"sink": SINK, "window": WINDOW, "last": LAST}
SMALL = ["--sink", str(SINK), "--window", str(WINDOW), "--last", str(LAST)]


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic(700, heads=2, group=3, size=32, layers=2, clusters=8, rope=True)


@pytest.fixture(scope="module")
def found(trace: Trace) -> Inspection:
    return inspect_trace(trace, **ZONES)


def of(query: torch.Tensor, keys: torch.Tensor) -> Trace:
    """A trace of one layer; query `[H,G,T,D]`, keys `[H,T,D]`."""
    layer = TraceLayer(0, query, keys, torch.randn_like(keys), keys.shape[-1] ** -0.5)
    return Trace.build([layer], torch.arange(keys.shape[1]))


def test_the_distance_is_mahalanobis_own() -> None:
    mean, mix = torch.randn(6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    keys = torch.randn(50_000, 6, dtype=torch.float64) @ mix + mean
    away = torch.randn(20, 6, dtype=torch.float64)
    torch.testing.assert_close(mahalanobis(away @ mix + mean, keys), away.norm(dim=-1), rtol=0.03, atol=0.03)


def test_vectors_distributed_as_keys_have_ratio_one_and_others_more() -> None:
    mix = torch.randn(2, 16, 16)
    keys, held = (torch.randn(2, n, 16) @ mix for n in (2000, 300))
    queries = torch.randn(2, 3, 300, 16) @ mix[:, None]
    queries[:, 2] += 4 * mix.sum(1)[:, None]  # each coordinate 4 standard deviations away
    asked, control = head_distances(queries, held, keys)
    ratio = (asked / control).view(2, 3)
    torch.testing.assert_close(ratio[:, :2], torch.ones(2, 2, dtype=torch.float64), atol=0.05, rtol=0)
    assert (ratio[:, 2] > 3).all()
    assert control.view(2, 3)[0].unique().numel() == 1, "one of a KV head"


def test_few_keys_that_do_not_span_the_space_have_finite_distances() -> None:
    keys = torch.randn(20, 1) * torch.ones(32)
    assert mahalanobis(torch.randn(5, 32), keys).isfinite().all()


def test_shares_of_the_best_rows_rise_with_their_number_and_reach_one(found: Inspection) -> None:
    for heads in found.heads.values():
        shares = torch.stack([heads[f"top_share@{k}"] for k in COUNTS])
        assert (shares.diff(dim=0) >= 0).all()
        torch.testing.assert_close(shares[-1], torch.ones(6, dtype=torch.float64))  # 1,024 rows are all
    weights = torch.tensor([[4.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.5, 0.75, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(top_shares(weights, (1, 2, 9)), expected)


def test_it_measures_what_evaluate_finds(trace: Trace, found: Inspection) -> None:
    """The best rows are those of Exact, the pages by bounds those of Quest, and `far_mass` is the indexed rows'."""

    def stacked(measure: str) -> torch.Tensor:
        return torch.stack([heads[measure] for heads in found.heads.values()])

    exact = evaluate(trace, "exact", NEEDED, **ZONES).heads
    torch.testing.assert_close(stacked(f"top_share@{NEEDED}"), exact["recovered"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stacked("far_mass"), exact["indexed_mass"], rtol=1e-5, atol=1e-6)
    for page in PAGES:
        quest = evaluate(trace, f"quest:page={page},group=each", NEEDED, **ZONES).heads
        torch.testing.assert_close(stacked(f"bound_share@{page}"), quest["recovered"], rtol=1e-5, atol=1e-6)


def test_a_bound_is_never_below_the_largest_logit_and_the_best_pages_hold_the_most(found: Inspection) -> None:
    for heads in found.heads.values():
        for page in PAGES:
            assert (heads[f"slack@{page}"] > 0).all()
            assert (heads[f"rank@{page}"].abs() <= 1).all()
            assert ((heads[f"hits@{page}"] >= 0) & (heads[f"hits@{page}"] <= 1)).all()


def test_bounds_of_pages_of_equal_keys_are_exact() -> None:
    keys = torch.randn(1, 40, 8).repeat_interleave(16, 1)  # no sink and no window: pages start at row 0
    found = inspect_trace(of(torch.randn(1, 2, 640, 8), keys), sink=0, window=0, last=8)
    for page in PAGES:
        assert abs(found.mean(f"slack@{page}")) < 1e-5
        assert found.mean(f"bound_share@{page}") == pytest.approx(found.mean(f"best_share@{page}"), abs=1e-5)
    assert found.mean("hits@16") == 1.0
    assert found.mean("rank@16") == pytest.approx(1.0)


def test_equal_queries_need_equal_rows() -> None:
    query = torch.randn(1, 1, 1, 8)
    keys = torch.randn(1, 600, 8)
    keys[:, -30:] = -query[0]  # a row that leaves the window between two tokens is not among the best
    found = inspect_trace(of(query.repeat(1, 2, 600, 1), keys), **ZONES)
    assert found.mean("overlap@1") == found.mean(f"overlap@{BEFORE}") == 1.0
    assert found.mean(f"rows@{BEFORE}") == NEEDED


def test_an_overlap_needs_tokens_before(trace: Trace) -> None:
    alone = inspect_trace(trace, sink=SINK, window=WINDOW, last=1, layers=[0])
    few = inspect_trace(trace, sink=SINK, window=WINDOW, last=BEFORE, layers=[0])
    enough = inspect_trace(trace, sink=SINK, window=WINDOW, last=BEFORE + 1, layers=[0])
    assert math.isnan(alone.mean("overlap@1"))
    assert not math.isnan(few.mean("overlap@1"))
    assert math.isnan(few.mean(f"overlap@{BEFORE}"))
    assert not math.isnan(enough.mean(f"overlap@{BEFORE}"))
    assert few.records()[0]["mean"][f"rows@{BEFORE}"] is None, "JSON has no NaN"
    for one in (alone, few):
        assert inspect_tables.tables(one, per_head=False)
        assert not any("nan" in sentence for sentence in inspect_tables.findings(one))


def test_rows_overlaps_and_ranks_by_hand() -> None:
    logits = torch.tensor([[1.0, 5.0, -2.0, 4.0]])
    assert top_rows(logits, 2).tolist() == [[False, True, False, True]]
    assert top_rows(logits, 9).all()
    assert overlap(top_rows(logits, 2), top_rows(-logits, 3)).tolist() == [0.5]
    rising = torch.arange(5.0)
    assert rank_correlation(rising, rising.exp()).item() == 1.0
    assert rank_correlation(rising, -rising).item() == -1.0
    assert rank_correlation(rising, torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0])).item() == pytest.approx(0.9)
    assert math.isnan(rank_correlation(rising[:1], rising[:1]).item())


def test_a_trace_that_holds_the_last_queries_alone_measures_the_same(trace: Trace, found: Inspection) -> None:
    layer = trace.layer(0)
    short = TraceLayer(0, layer.query[:, :, -LAST:].clone(), layer.keys, layer.values, layer.scale)
    heads = inspect_trace(Trace.build([short], trace.positions), **ZONES).heads[0]
    for name in MEASURES:
        torch.testing.assert_close(heads[name], found.heads[0][name], equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--window", "690"], "leave 0 of the 688 rows before the replay"),
        (["--last", "0"], "last is 1 to 699"),
        (["--layers", "7"], "holds layers [0, 1], not [7]"),
        (["--layers", "x"], "--layers takes integers"),
        (["--sink", "-1"], "sink"),
    ],
)
def test_bad_options_are_one_sentence_before_any_work(
    trace: Trace, tmp_path: Path, arguments: Sequence[str], sentence: str
) -> None:
    trace.save(tmp_path / "small.safetensors")
    done = run("inspect", tmp_path / "small.safetensors", *SMALL, *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert sentence in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_without_scikit_learn_it_says_so_before_any_work(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace.save(tmp_path / "small.safetensors")
    monkeypatch.setitem(sys.modules, "sklearn.covariance", None)
    done = run("inspect", tmp_path / "small.safetensors", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "need scikit-learn: pip install 'sparseattn[inspect]'" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_inspect_prints_tables_and_findings_and_writes_records_and_figures(
    trace: Trace, found: Inspection, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    trace.save(tmp_path / "small.safetensors")
    out = tmp_path / "deep" / "out"
    done = run("inspect", tmp_path / "small.safetensors", *SMALL, "--out", out)
    assert done.exit_code == 0, done.output
    names = ["inspect-small.png", "inspect.jsonl", "pages-small.png", "rows-small.png"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith("png"))
    records = [json.loads(line) for line in (out / "inspect.jsonl").read_text().splitlines()]
    assert [one["layer"] for one in records] == [0, 1]
    for one in records:
        assert set(one["mean"]) == set(one["heads"]) == set(MEASURES)
        assert (one["sink"], one["window"], one["last"], one["tokens"]) == (SINK, WINDOW, LAST, 700)
        assert one["versions"]["scikit-learn"]
        for name in MEASURES:
            assert len(one["heads"][name]) == 6
            assert one["mean"][name] == pytest.approx(found.mean(name, one["layer"]))
    text = " ".join(done.stdout.split())
    for what in ("tokens", "pages"):
        assert f"small, {what}: last 12 of 700 tokens, sink 2, window 6; mean over heads" in text
    ratio = found.mean("distance_ratio")
    assert f"small, distance: a query is {ratio:.1f} times as far from the keys as another key is" in text
    assert f"{found.mean('far_mass'):.0%} of the attention is outside sink and window" in text
    assert f"pages that Quest's bound selects {found.mean('bound_share@16'):.0%} (layer" in text


def test_per_head_lists_every_head_and_json_is_the_records(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "small.safetensors")
    heads = run("inspect", tmp_path / "small.safetensors", *SMALL, "--out", tmp_path, "--per-head", "--no-figures")
    rows = [line.split()[:2] for line in heads.stdout.splitlines() if line.split()[:1] in (["0"], ["1"])]
    assert rows == 2 * [[str(layer), str(head)] for layer in (0, 1) for head in range(6)]
    printed = run("inspect", tmp_path / "small.safetensors", *SMALL, "--out", tmp_path, "--json", "--no-figures")
    assert printed.stdout == (tmp_path / "inspect.jsonl").read_text()
    assert "a query is" in printed.stderr


@pytest.mark.slow
def test_pictures_of_many_layers_and_heads_and_of_one(tmp_path: Path, found: Inspection) -> None:
    plots = pytest.importorskip("sparseattn.reporting.plots")
    wide = {name: values.repeat(4) for name, values in found.heads[0].items()}  # 24 heads, more than are numbered
    many = Inspection("many", found.settings, dict.fromkeys(range(13), wide))
    one = Inspection("one", found.settings, {3: {name: values[:1] for name, values in found.heads[0].items()}})
    for which in (many, one):
        for draw in (plots.inspection, plots.needed_rows, plots.needed_pages):
            draw(which, tmp_path / "picture.png")
