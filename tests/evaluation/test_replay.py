"""evaluate: every measure against a hand computation, and its sentences."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseattn import Exact, Quest, Selection, Window, evaluate
from sparseattn.evaluation import replay_settings
from sparseattn.evaluation.full_attention import LIMIT, FullAttention, FullAttentions
from sparseattn.evaluation.replay import evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay
from sparseattn.evaluation.step_measures import MEASURES
from sparseattn.selectors.abilities import HostOnly
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer

SINK, WINDOW, LAST = 2, 6, 5


@pytest.fixture(scope="module")
def trace() -> Trace:
    return synthetic(200, heads=2, group=3, size=32, layers=2, clusters=8, rope=True)


CHOSEN = [[3, 40, 41], [3, 41], [3], [7], [], [8]]  # rows of the sealed zone for each of 2 * 3 query heads


class Chosen(Exact):
    """Selects `CHOSEN` and states a cost."""

    def __init__(self) -> None:
        super().__init__("each")

    def select(self, query, step, budget) -> Selection:
        ids = torch.tensor([[rows + [-1] * (3 - len(rows)) for rows in CHOSEN]])
        return Selection.tokens(ids, torch.arange(10, 16)[None], torch.tensor([[64, 128]]))


class Silent(Chosen):
    """Does not say what it read to choose."""

    def select(self, query, step, budget) -> Selection:
        return Selection.tokens(super().select(query, step, budget).rows)

    def scan(self, query, sealed, budget) -> None:
        return None


def test_measures_equal_a_hand_computation(trace: Trace) -> None:
    result = evaluate(trace, Chosen(), 50, sink=SINK, window=WINDOW, last=LAST, layers=[1])
    layer = trace.layer(1)
    expected = {name: torch.zeros(6, dtype=torch.float64) for name in MEASURES}
    for t in range(200 - LAST, 200):
        for head in range(6):
            h, g = divmod(head, 3)
            keys, values = layer.keys[h, : t + 1].double(), layer.values[h, : t + 1].double()
            logits = keys @ layer.query[h, g, t].double() * layer.scale
            weights = logits.softmax(0)
            chosen = [SINK + i for i in CHOSEN[head]]
            of_group = {row for rows in CHOSEN[3 * h : 3 * h + 3] for row in rows}
            dense = [*range(SINK), *range(t + 1 - WINDOW, t + 1)]
            named = sorted(chosen + dense)
            zone = torch.arange(SINK, t + 1 - WINDOW)
            full = weights @ values
            out = logits[named].softmax(0) @ values[named]
            best = zone[logits[zone].topk(100).indices].tolist()
            step = {
                "mass": weights[named].sum(),
                "indexed_mass": weights[zone].sum(),
                "recovered": weights[chosen].sum() / weights[zone].sum(),
                "relative_error": (out - full).norm() / full.norm(),
                "mse": (out - full).square().mean(),
                "attended": len(named),
                "kept": len(chosen),
                "denominator_error": 1 - weights[named].sum(),
                "attended_share": len(named) / (t + 1),
                "distinct_rows": len(of_group) + len(dense),
                "scanned": 10 + head,
                "scanned_share": (10 + head) / (t + 1),
                "bytes_share": ((len(of_group) + len(dense)) * 2 * 32 * 4 + (64, 128)[h]) / ((t + 1) * 2 * 32 * 4),
                "lookups": (weights[zone] >= 0.2).sum(),
                **{f"recall@{k}": len(set(best[:k]) & set(chosen)) / k for k in (1, 10, 100)},
            }
            for name, value in step.items():
                expected[name][head] += float(value) / LAST
    of_masses = {"oracle_kept", "promised", "fulfilled"}
    assert all(bool(result.heads[name].isnan().all()) for name in of_masses)
    for name in set(MEASURES) - {"lookup_hits"} - of_masses:
        torch.testing.assert_close(result.heads[name][0], expected[name], rtol=1e-4, atol=1e-6, msg=name)


def peaked(trace: Trace) -> Trace:
    """The same with sharper attention in layer 0, and none beyond a few rows in layer 1."""
    layers = []
    for index, factor in ((0, 6.0), (1, 0.0)):
        one = trace.layer(index)
        layers.append(TraceLayer(index, one.query * factor, one.keys, one.values, one.scale))
    return Trace.build(layers, trace.positions)


def test_lookups_are_rows_with_a_fifth_of_the_attention(trace: Trace) -> None:
    sharp = peaked(trace)
    result = evaluate(sharp, "exact:group=softmax", 1, sink=SINK, window=WINDOW, last=LAST)
    every = evaluate(sharp, "exact", 12, sink=SINK, window=WINDOW, last=LAST)
    layer, total = sharp.layer(0), 0
    for head in range(6):
        h, g = divmod(head, 3)
        count = 0
        for t in range(200 - LAST, 200):
            weights = (layer.keys[h, : t + 1] @ layer.query[h, g, t] * layer.scale).softmax(0)
            count += int((weights[SINK : t + 1 - WINDOW] >= 0.2).sum())
        assert float(result.heads["lookups"][0, head]) == pytest.approx(count / LAST)
        total += count
    assert total > 6
    assert every.mean("lookup_hits") == every.worst("lookup_hits") == 1.0, "the oracle finds five rows of 12"
    hits, counted = result.heads["lookup_hits"], result.heads["lookups"]
    assert hits[1].isnan().all(), "uniform attention looks nothing up"
    assert not math.isnan(result.worst("lookup_hits"))
    found = (hits[0] * counted[0]).nan_to_num().sum() * LAST
    assert float(found) == pytest.approx(round(float(found)), abs=1e-6), "a whole number of rows"
    assert result.mean("lookup_hits") == pytest.approx(float(found) / total)
    assert 0 < result.mean("lookup_hits") < 1
    none = evaluate(sharp, "window", 12, sink=SINK, window=WINDOW, last=LAST, layers=[1])
    assert math.isnan(none.mean("lookup_hits"))
    assert math.isnan(none.worst("lookup_hits"))
    assert none.record()["mean"]["lookup_hits"] is None


def test_far_heads_alone(trace: Trace) -> None:
    result = evaluate(trace, "quest", 32, sink=SINK, window=WINDOW, last=LAST)
    share = result.heads["indexed_mass"]
    least = float(share.flatten().sort().values[7])
    far = result.far(least)
    chosen = share >= least
    assert far.settings["far_heads"] == chosen.nonzero().tolist(), "layers 0 and 1 are rows 0 and 1"
    assert len(far.settings["far_heads"]) == 5
    assert far.record(True)["far_heads"] == far.settings["far_heads"], "the heads apart do not overwrite them"
    part = evaluate(trace, "quest", 32, sink=SINK, window=WINDOW, last=LAST, layers=[1]).far(least)
    assert part.settings["far_heads"] == [pair for pair in far.settings["far_heads"] if pair[0] == 1]
    assert far.settings["far"] == least
    for name in ("mass", "relative_error", "scanned"):
        assert far.mean(name) == pytest.approx(float(result.heads[name][chosen].mean()))
    assert far.worst("relative_error") == float(result.heads["relative_error"][chosen].max())
    assert far.record(True)["heads"]["mass"][0].count(None) + far.record(True)["heads"]["mass"][1].count(None) == 7
    with pytest.raises(ValueError, match=r"no head of .+ has 1 of its attention on indexed rows, the most is 0\."):
        result.far(1.0)


def test_the_oracle_and_the_exhaustive_budget(trace: Trace) -> None:
    oracle = evaluate(trace, "exact", 100, sink=SINK, window=WINDOW, last=LAST)
    assert oracle.layers == (0, 1)
    for k in (1, 10, 100):
        assert oracle.worst(f"recall@{k}") == 1.0
    everything = evaluate(trace, Quest(), None, sink=SINK, window=WINDOW, last=LAST)
    assert everything.worst("mass") == pytest.approx(1.0, abs=1e-5)
    assert everything.worst("relative_error") < 1e-5
    assert everything.mean("bytes_share") > 1.0, "Quest reads every row and its bounds"


def test_mean_and_worst_head(trace: Trace) -> None:
    result = evaluate(trace, "random", 20, sink=SINK, window=WINDOW, last=LAST)
    assert result.worst("mass") == float(result.heads["mass"].min()) < result.mean("mass")
    assert result.worst("mse") == float(result.heads["mse"].max()) > result.mean("mse")
    assert result.heads["mass"].shape == (2, 6)


def test_no_rows_beyond_the_stated_ones_flatter_a_method(trace: Trace) -> None:
    for method in ("exact", "random"):
        result = evaluate(trace, method, 20, sink=SINK, window=WINDOW, last=LAST)
        assert result.mean("attended") == result.worst("attended") == SINK + WINDOW + 20
    quest = evaluate(trace, "quest", 32, sink=SINK, window=WINDOW, last=LAST)
    assert SINK + WINDOW + 32 <= quest.mean("attended") < SINK + WINDOW + 32 + 16


def test_budgets_share_a_prefill_and_stay_apart(trace: Trace) -> None:
    settings = {"sink": SINK, "window": WINDOW, "last": LAST}
    together = evaluate_budgets(trace, "exact:refresh=3", [5, 0.1], Replay(**settings))
    for one in together:
        alone = evaluate(trace, "exact:refresh=3", one.budget, **settings)
        for name in MEASURES:
            torch.testing.assert_close(one.heads[name], alone.heads[name], rtol=0, atol=0, equal_nan=True)


def test_full_attention_is_computed_once_for_all_methods(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else was measured before, on which trace, and however little of it may be kept, records are the same."""
    computed = []
    of = FullAttention.of.__func__
    monkeypatch.setattr(FullAttention, "of", classmethod(lambda *given: (computed.append(1), of(*given))[1]))
    how = Replay(SINK, WINDOW, LAST)
    other = synthetic(150, heads=1, group=2, size=16)
    methods = ["exact:refresh=3", "louver", "quest:page=8", "window", "retroinfer"]  # the last one orders its rows
    one_step = FullAttention.of(torch.zeros(1, 2, 3, 32), *torch.zeros(2, 1, 2, 200, 32), 1.0).nbytes
    steps, runs = LAST * 2, len(methods) * 2
    for limit, found in ((LIMIT, steps), (3 * one_step, 3), (0, 0)):
        kept = FullAttentions(limit)
        evaluate_budgets(other, "window", [8], how, full_attentions=kept)
        computed.clear()
        shared = [evaluate_budgets(trace, method, [16, 32], how, full_attentions=kept) for method in methods]
        assert len(computed) == found + (runs - 2) * (steps - found) + 2 * steps
        assert kept.held <= limit
        for method, both in zip(methods, shared, strict=True):
            for one in both:
                alone = evaluate(trace, method, one.budget, sink=SINK, window=WINDOW, last=LAST)
                for name in MEASURES:
                    torch.testing.assert_close(one.heads[name], alone.heads[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("spec", ["quest:page=8", "h2o"])
def test_some_of_the_decoded_tokens_are_measured(trace: Trace, spec: str) -> None:
    """The method decodes the others too: one that observes learns from them."""
    settings = {"sink": 2, "window": 4, "last": 10}
    each, some = (evaluate(trace, spec, 16, steps=["recovered"], every=every, **settings) for every in (1, 4))
    assert torch.equal(some.steps["recovered"], each.steps["recovered"][..., [3, 7]])
    torch.testing.assert_close(some.heads["recovered"], some.steps["recovered"].double().mean(2), rtol=1e-6, atol=0.0)
    assert (some.settings["every"], "every" in each.settings) == (4, False)


def test_a_record_counts_what_its_steps_read_and_held(trace: Trace) -> None:
    """The window reads sink and window of every step, and `Silent` does not say what it read to choose."""
    settings = {"sink": 2, "window": 4, "last": 10}
    row = 2 * 2 * 32 * trace.dtype.itemsize  # keys and values of two heads
    for every, held in ((1, sum(range(191, 201))), (4, 194 + 198)):
        result = evaluate(trace, Window(), 1, every=every, **settings)
        one = result.record()["activity"]["by_layer"]["1"]
        steps = 10 // every
        assert (one["sparse_steps"], one["dense_steps"], one["rows_held"]) == (steps, 0, held)
        assert (one["rows_read"], one["bytes_held"]) == (6 * steps, held * row)
        assert one["bytes_read"] == pytest.approx(6 * steps * row, rel=1e-3)  # a mean of shares of ever more rows
    assert evaluate(trace, Silent(), 3, **settings).activity.total.bytes_read is None
    full = evaluate(trace, "exact", None, **settings).activity
    assert full.total.rows_read == full.total.rows_held == 2 * sum(range(191, 201))


def test_a_budget_may_be_a_text(trace: Trace) -> None:
    settings = {"sink": SINK, "window": WINDOW, "last": LAST}
    for text, number in (("10%", 0.1), ("20", 20), ("all", None)):
        said, meant = (evaluate(trace, "exact", budget, **settings) for budget in (text, number))
        assert said.record() == meant.record()
    with pytest.raises(ValueError, match=r'a share \("1%"\) or "all", got .10 of them.'):
        evaluate(trace, "exact", "10 of them", **settings)


def test_a_record_is_json_with_settings_and_heads(trace: Trace) -> None:
    steps: list[int] = []
    result = evaluate(trace, Window(), 1, sink=SINK, window=WINDOW, last=LAST, layers=[0], progress=steps.append)
    assert sum(steps) == LAST
    record = json.loads(json.dumps(result.record(per_head=True)))
    assert record["selector"] == "window"
    assert record["sink"] == SINK
    assert record["tokens"] == 200
    assert set(record["mean"]) == set(record["worst"]) == set(record["heads"]) == set(MEASURES)
    assert "heads" not in result.record()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"budget": 0}, "at least 1 row"),
        ({"budget": 8, "selector": "quest"}, "less than one span"),
        ({"window": 500}, "window of 500 rows leave 0"),
        ({"last": 200}, "last is 1 to 199"),
        ({"last": 0}, "last is 1 to 199"),
        ({"every": 0}, "every is 1 to the 32 tokens that are decoded, got 0"),
        ({"layers": [5]}, r"holds layers \[0, 1\], not \[5\]"),
        ({"selector": "exat"}, "did you mean 'exact'"),
    ],
)
def test_bad_settings_get_a_sentence(trace: Trace, arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(**{"trace": trace, "selector": "exact", "budget": 10, "sink": SINK, "window": WINDOW, **arguments})


def test_sliding_layers_are_left_out_and_refused_by_name() -> None:
    base = synthetic(100, heads=1, group=1, size=32, layers=2)
    one, two = (base.layer(i) for i in (0, 1))
    sliding = TraceLayer(1, two.query, two.keys, two.values, two.scale, two.rope, window=16)
    trace = Trace.build([one, sliding], base.positions, {})
    assert evaluate(trace, "exact", 4, window=8, last=2).layers == (0,)
    with pytest.raises(ValueError, match="sliding window of 16"):
        evaluate(trace, "exact", 4, window=8, last=2, layers=[1])


def test_a_trace_with_the_last_queries_only() -> None:
    whole = synthetic(200, heads=1, group=2, size=32, clusters=8)
    part = synthetic(200, heads=1, group=2, size=32, clusters=8, queries=6)
    settings = {"window": 8, "last": 4}
    one, other = (evaluate(trace, "quest", 16, **settings) for trace in (whole, part))
    torch.testing.assert_close(one.heads["recall@10"], other.heads["recall@10"])
    with pytest.raises(ValueError, match="last 6 tokens"):
        evaluate(part, "quest", 16, window=8, last=7)
    with pytest.raises(ValueError, match="learns from the queries of the prefill"):
        evaluate(part, "tests.cases:Buckets", 16, window=8, last=4)


def test_a_trace_needs_the_queries_that_are_wanted_of_the_prompt_and_no_others() -> None:
    layer = synthetic(200, heads=1, group=2, size=32, clusters=8).layer(0)
    whole, part, fewer = (
        Trace.build([replace(layer, query=layer.query[:, :, -held:].clone())], torch.arange(200))
        for held in (200, 7, 6)  # four that are decoded, and of the prompt three or two
    )
    one, other = (evaluate(trace, "tests.cases:Heaviest", 16, window=8, last=4) for trace in (whole, part))
    for name, values in one.heads.items():
        assert torch.equal(values, other.heads[name]) or bool(values.isnan().all()), name
    with pytest.raises(ValueError, match="learns from the queries of the prefill"):
        evaluate(fewer, "tests.cases:Heaviest", 16, window=8, last=4)


def test_an_unreported_cost_is_unknown_not_zero(trace: Trace) -> None:
    result = evaluate(trace, Silent(), 50, sink=SINK, window=WINDOW, last=LAST)
    record = json.loads(json.dumps(result.record(), allow_nan=False))
    assert record["mean"]["scanned"] is record["mean"]["bytes_share"] is None
    assert record["mean"]["mass"] > 0


def test_layers_are_different_and_there(trace: Trace) -> None:
    for layers in ([], [0, 0]):
        with pytest.raises(ValueError, match="one or more different"):
            evaluate(trace, "exact", 4, sink=SINK, window=WINDOW, layers=layers)


def test_a_head_that_looks_nowhere_far_recovers_all_there_is(trace: Trace) -> None:
    """A sink that draws all weight: the indexed rows' share underflows to 0, and 0 of 0 counts as found."""
    layer = trace.layer(0)
    keys = layer.keys.clone()
    keys[:, 0] = layer.query[:, :, -LAST:].mean((1, 2)) * 1e4
    query = layer.query.mean((1, 2), keepdim=True).expand_as(layer.query) * 0 + layer.query[:, :, -LAST:].mean(
        (1, 2), keepdim=True
    )
    sunk = Trace.build([TraceLayer(0, query.contiguous(), keys, layer.values, layer.scale, None)], trace.positions, {})
    result = evaluate(sunk, "window", 1, sink=SINK, window=WINDOW, last=LAST)
    assert result.mean("indexed_mass") == 0.0
    assert result.mean("recovered") == 1.0


def test_what_is_not_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trace is a Trace .*got 'text'"):
        evaluate("text", "window", 1)  # type: ignore[arg-type]


def test_a_query_that_is_not_finite_is_refused(trace: Trace) -> None:
    layer = trace.layer(0)
    query = layer.query.clone()
    query[0, 0, -1, 3] = torch.nan
    bad = Trace.build([TraceLayer(0, query, layer.keys, layer.values, layer.scale, layer.rope)], trace.positions, {})
    with pytest.raises(ValueError, match="query must be finite, got nan"):
        evaluate(bad, "window", 1, sink=SINK, window=WINDOW, last=LAST)


def test_settings_are_checked_without_loading_a_layer(trace: Trace, tmp_path: Path) -> None:
    """Shapes, windows and dtype come from the header: a trace of a large model is read a layer at a time, once."""
    trace.save(tmp_path / "t.safetensors")
    opened = Trace.open(tmp_path / "t.safetensors")
    load, loaded = opened._load, []
    opened._load = lambda index: (loaded.append(index), load(index))[1]
    assert (opened.shapes, opened.dtype) == (trace.shapes, torch.float32)
    evaluate_budgets(opened, "window", [1, 2], Replay(SINK, WINDOW, LAST))
    assert loaded == [0, 1]


def test_a_replay_is_where_it_is_asked_for_and_a_host_selectors_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnHost(HostOnly, Quest):
        pass

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(replay_settings, "usable_device", lambda name=None: gpu if name is None else torch.device(name))
    assert replay_settings.replay_device(Quest(), None) == gpu
    assert replay_settings.replay_device(Quest(), "cpu") == torch.device("cpu")
    assert replay_settings.replay_device(OnHost(), None) == torch.device("cpu")
    with pytest.raises(ValueError, match="works in host memory: its device is cpu, or none is named, got cuda:1"):
        replay_settings.replay_device(OnHost(), "cuda:1")
    trace = synthetic(300, heads=2, group=2, size=32, clusters=8)
    assert evaluate(trace, OnHost(), 16, window=8, last=2).settings["device"] == "cpu"
    with pytest.raises(ValueError, match="works in host memory"):
        evaluate(trace, OnHost(), 16, window=8, last=2, device="cuda:1")


@pytest.mark.parametrize(("spec", "grows"), [("quest", 1), ("exact", 1), ("flat", 1), ("quest:int8=True", 2)])
def test_bytes_are_those_of_a_cache_of_the_traces_dtype(spec: str, grows: int) -> None:
    """A share of what is kept in the keys' dtype is the same in 16 bits; of 8-bit bounds it is twice as large."""
    if spec == "flat":
        pytest.importorskip("faiss")
    scans = []
    for dtype in (torch.float32, torch.bfloat16):
        one = evaluate(synthetic(1024, size=64, clusters=8, dtype=dtype), spec, 64, window=WINDOW, last=1)
        scans.append(one.mean("bytes_share") - one.mean("distinct_rows") / 1024)
    assert scans[1] == pytest.approx(grows * scans[0], rel=0.02)
    assert scans[0] > 0.01
