"""What the papers of the evicting methods promise: the rows that a plain implementation of each holds, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.measure import Temporaries
from sparseattn import H2O, TOVA, KVCache, PyramidKV, SnapKV, decode
from sparseattn.core.context import LayerContext
from sparseattn.selectors.eviction import attention_received as blockwise
from sparseattn.selectors.eviction.attention_received import received
from tests.cases import attention, heads

H, G, D = 2, 3, 32
PROMPT, STEPS, BUDGET = 90, 40, 24


def softmax(query: Tensor, keys: Tensor) -> Tensor:
    """`[H,G,N]`: the weights of `keys` `[H,N,D]` under one query a head, `[H,G,D]`, in float64."""
    return (query.double() @ keys.double().mT / D**0.5).softmax(-1)


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """`[H,G,N,N]`: the weights of the whole prompt."""
    logits = queries.double() @ keys[:, None].double().mT / D**0.5
    return logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf).softmax(-1)


def steps(cache: KVCache, queries, keys, values, budget: int | None = BUDGET) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(position, which rows `[H,n]` are read, output `[H,G,D]`) of every step after the prompt."""
    cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT], queries[:, :, :, :PROMPT])
    for t in range(PROMPT, keys.shape[2]):
        one = slice(t, t + 1)
        cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
        out = decode(queries[:, :, :, t], cache, budget)
        assert cache.search.latest is not None
        chosen = (
            cache.search.latest.mask(t)[0]
            if cache.search.latest.start.shape[2]
            else torch.zeros(H, t, dtype=torch.bool)
        )
        yield t, torch.cat([chosen, torch.ones(H, 1, dtype=torch.bool)], 1), out[0]


def attended(query: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Weights `[H,G,n]` and output of attention over exactly `rows` `[H,n]` of the first n."""
    logits = query.double() @ keys.double().mT / D**0.5
    weights = logits.masked_fill(~rows[:, None], -torch.inf).softmax(-1)
    return weights, weights @ values.double()


@pytest.mark.parametrize("scores", ["prompt", "decode"])
def test_h2o_holds_heavy_hitters_and_the_newest_rows(scores: str) -> None:
    """Sums of every weight since the prompt's first query, or since the first step; half and half."""
    queries, keys, values = heads(1, H, G, PROMPT + STEPS, D)
    q, k, v = queries[0], keys[0], values[0]
    total = torch.zeros(H, PROMPT + STEPS, dtype=torch.float64)
    if scores == "prompt":
        total[:, :PROMPT] = causal(q[:, :, :PROMPT], k[:, :PROMPT]).sum((1, 2))
    held = torch.zeros(H, PROMPT + STEPS, dtype=torch.bool)
    held[:, :PROMPT] = True
    cache = KVCache(**H2O.paper(scores), check=True)
    for t, rows, out in steps(cache, queries, keys, values):
        rank = total
        if scores == "decode" and t == PROMPT:  # nothing is known yet: the step's own weights
            rank = torch.zeros_like(total)
            rank[:, :PROMPT] = softmax(q[:, :, t], k[:, :PROMPT]).sum(1)
        for h in range(H):
            mine = held[h].nonzero()[:, 0]
            older = mine[: -(BUDGET // 2)]
            heavy = older[rank[h, older].topk(BUDGET // 2).indices]
            held[h] = False
            held[h, heavy] = held[h, mine[-(BUDGET // 2) :]] = True
        held[:, t] = True
        assert torch.equal(rows, held[:, : t + 1])
        weights, expected = attended(q[:, :, t], k[:, : t + 1], v[:, : t + 1], rows)
        total[:, : t + 1] += weights.sum(1)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_h2o_that_begins_with_decoding_knows_nothing_of_steps_before_the_first_seal() -> None:
    """Its first choice is by the step's own weights, though steps were taken before there was anything to choose."""
    queries, keys, values = heads(1, H, G, 60, D)
    cache = KVCache(H2O("decode", 0.0), sink=0, window=20, seal=1, check=True)
    for stop in (10, 60):
        new = slice(10 if stop == 60 else 0, stop)
        cache.append(keys[:, :, new], values[:, :, new], queries[:, :, :, new])
        decode(queries[:, :, :, stop - 1], cache, 12)
    assert cache.search.latest is not None
    weights = softmax(queries[0, :, :, -1], keys[0, :, :40]).sum(1)  # [H,40]
    expected = torch.zeros(H, 40, dtype=torch.bool).scatter_(1, weights.topk(12).indices, True)
    assert torch.equal(cache.search.latest.mask(40)[0], expected)


@pytest.mark.parametrize(("sink", "window", "rollback"), [(0, 1, 0), (3, 70, 0), (0, 75, 10)])
def test_h2o_counts_every_query_of_the_prompt(sink: int, window: int, rollback: int) -> None:
    """However many of the rows are in the cache's window."""
    queries, keys, values = heads(2, H, G, PROMPT, D)
    cache = KVCache(H2O(), sink=sink, window=window, rollback=rollback)
    cache.append(keys, values, queries)
    cache.seal()
    for b in range(2):
        total = causal(queries[b], keys[b]).sum((1, 2))[:, sink : PROMPT - window - rollback]
        torch.testing.assert_close(cache.selector.worth.data[b].double(), total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("peak", [1, 20], ids=["flat", "peaked"])
def test_tova_drops_the_row_with_the_least_attention_of_the_newest_query(peak: int) -> None:
    """In the mean over every head of the layer, the newest row's own weight among those compared, however small."""
    queries, keys, values = heads(1, H, G, PROMPT + STEPS, D)
    queries = queries * peak
    q, k, v = queries[0], keys[0], values[0]
    held = set(softmax(q[:, :, PROMPT - 1], k[:, :PROMPT]).mean((0, 1)).topk(BUDGET).indices.tolist())
    lost = []
    for t, rows, out in steps(KVCache(**TOVA.paper(), check=True), queries, keys, values):
        held.add(t)
        assert torch.equal(rows[0], rows[1]), "all heads hold the same"
        assert set(rows[0].nonzero()[:, 0].tolist()) == held
        weights, expected = attended(q[:, :, t], k[:, : t + 1], v[:, : t + 1], rows)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        lost.append(min(held, key=weights.mean((0, 1)).tolist().__getitem__))
        held.remove(lost[-1])
    assert any(row >= PROMPT for row in lost), "no row is safe"
    assert any(row < PROMPT for row in lost)


@pytest.mark.parametrize(("window", "kernel", "pool"), [(8, 7, "max"), (16, 5, "avg")])
@pytest.mark.parametrize("sealed", [True, False])
def test_snapkv_holds_what_the_prompts_last_queries_vote_for(window: int, kernel: int, pool: str, sealed: bool) -> None:
    """Once and for all; of the answer, every row. Whether the cache's window is that of the votes or not."""
    queries, keys, values = attention(1, H, G, PROMPT + STEPS, D)
    prefix = PROMPT - window
    votes = causal(queries[0, :, :, :PROMPT], keys[0, :, :PROMPT])[:, :, prefix:, :prefix].sum((1, 2))  # [H,prefix]
    sides = torch.nn.functional.pad(votes, (kernel // 2, kernel // 2)).unfold(1, kernel, 1)  # [H,prefix,kernel]
    pooled = sides.amax(-1) if pool == "max" else sides.mean(-1)
    wide = BUDGET + (window + STEPS) * (not sealed)  # without a window of its own, what is held anyway counts
    cache = KVCache(SnapKV(window, kernel, pool), sink=0, window=window if sealed else 1, seal=64 if sealed else 1)
    if sealed:
        cache.append(keys[:, :, :PROMPT], values[:, :, :PROMPT], queries[:, :, :, :PROMPT])
        cache.seal()
        cache.append(keys[:, :, PROMPT:], values[:, :, PROMPT:])
        chosen = cache.select(queries[:, :, :, -1], BUDGET).mask(prefix)[0]
    else:
        for _, rows, _ in steps(cache, queries, keys, values, wide):
            assert bool(rows[:, prefix:].all()), "the observation window and the answer"
            chosen = rows[:, :prefix]
        assert int(chosen.sum()) == H * (BUDGET + 1), "the last step's own row is the window's"
        chosen = chosen & (pooled >= pooled.topk(BUDGET).values[:, -1:])  # one more, for which there still was room
    cut = pooled.topk(BUDGET).values[:, -1:] * (1 - 1e-6)
    assert bool((pooled[chosen.nonzero(as_tuple=True)] >= cut.expand_as(pooled)[chosen]).all())
    assert int(chosen.sum()) >= H * BUDGET
    assert bool(chosen[pooled > cut * (1 + 2e-6)].all())


def test_what_is_dropped_stays_dropped_and_compact_frees_it() -> None:
    queries, keys, values = attention(1, H, G, PROMPT + STEPS, D)
    for selector in (H2O(), TOVA(), SnapKV(8), PyramidKV(4, window=8)):
        cache = KVCache(selector, sink=2, window=4, seal=1, check=True)
        held = torch.ones(H, PROMPT + STEPS, dtype=torch.bool)
        for t, rows, _ in steps(cache, queries, keys, values, BUDGET):
            held[:, : t - 4 - 2 + 1] &= rows[:, : t - 4 - 2 + 1]
            if t == PROMPT + 10:
                break
        before = cache.nbytes
        assert cache.compact() > 0
        assert cache.nbytes["kv"] < before["kv"] / 2
        assert cache.nbytes["worth"] < before["worth"] / 2
        later = cache.select(queries[:, :, :, t], 10 * BUDGET)
        assert int(later.attended.max()) == BUDGET, f"{selector!r} has nothing else left"


def test_pyramidkv_reads_less_in_higher_layers() -> None:
    """The mean over the layers is the paper's budget where layer 0 has `2 - 1 / beta` of it."""
    layers, beta, mean = 30, 20.0, 400
    whole = PyramidKV(layers, beta, 8)
    shares = [whole.for_layer(layer).allowed(round(mean * (2 - 1 / beta))) for layer in range(layers)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == mean * 2 - mean / beta
    assert shares[-1] == mean / beta
    assert sum(shares) / layers == pytest.approx(mean, abs=0.5)
    assert [PyramidKV(layers, 1.0).for_layer(layer).allowed(77) for layer in (0, 15, 29)] == [77] * 3
    queries, keys, values = attention(1, H, G, PROMPT + 1, D)
    read = []
    for layer in (0, 29):
        cache = KVCache(whole.for_layer(layer), sink=0, window=8, check=True)
        read += [rows.sum(-1).unique().tolist() for _, rows, _ in steps(cache, queries, keys, values, 39)]
    assert read == [[39 + 1], [1 + 1]]
    with pytest.raises(ValueError, match="for layers 0 to 29, and this is layer 30"):
        whole.for_layer(30)


def test_pyramidkv_shares_the_budget_as_given() -> None:
    """Not what the context leaves of it: where a layer's share exceeds the context, the layer drops nothing."""
    queries, keys, values = attention(1, H, G, PROMPT + 1, D)
    given = 10 * PROMPT
    for layer, read in ((0, PROMPT), (15, PROMPT), (29, round(given / 39))):
        cache = KVCache(PyramidKV(30, window=8).for_layer(layer), sink=0, window=1, seal=1, check=True)
        assert [int(rows.sum()) for _, rows, _ in steps(cache, queries, keys, values, given)] == [H * (read + 1)]
        cache = KVCache(PyramidKV(30, window=8).for_layer(layer), sink=0, window=1, seal=1, check=True)
        assert all(bool(rows.all()) for _, rows, _ in steps(cache, queries, keys, values, None)), "all is all"


def test_pyramidkv_knows_how_many_layers_the_model_has() -> None:
    """It is told, or refuses: a wrong number would be a wrong budget in every layer."""
    upper, told = PyramidKV().for_layer(3), PyramidKV(30).for_layer(3)
    with pytest.raises(ValueError, match="is not known here: give layers, as in pyramidkv:layers=32"):
        upper.check_shape(H, G, D)
    for one in (upper, told):
        one.bind(LayerContext(3, depth=30))
    assert upper.allowed(100) == told.allowed(100) < 100
    upper.check_shape(H, G, D)
    told.bind(LayerContext(3, depth=28))
    with pytest.raises(ValueError, match="is for a model of 30 layers, and this one has 28"):
        told.check_shape(H, G, D)


def test_a_prompts_attention_is_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order, whatever the block, with a softmax over all rows that a query sees; in memory, blocks alone."""
    queries, keys, _ = attention(2, H, G, 100, D)
    at = torch.arange(100).expand(2, -1).clone()
    at[1] -= 30  # padding in front
    place = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    parts = [(keys[:, :, place[:60]], at[:, place[:60]]), (keys[:, :, place[60:]], at[:, place[60:]])]
    expected = torch.zeros(2, H, 100)
    for b, first in enumerate((0, 30)):
        expected[b, :, first:] = causal(queries[b, :, :, first:], keys[b, :, first:]).sum((1, 2))
    for block in (64, 7, 1):
        monkeypatch.setattr(blockwise, "ROWS", block)
        got = torch.cat(received(queries.flip(3), at.flip(1), parts), 2)
        torch.testing.assert_close(got, expected[:, :, place], rtol=1e-5, atol=1e-5)
    queries, keys, _ = attention(1, 1, 1, 4000, D)
    at = torch.arange(4000)[None]
    monkeypatch.setattr(blockwise, "ROWS", 64)
    with Temporaries() as seen:
        received(queries, at, [(keys, at)])
    assert seen.peak < 3 * 4 * 64 * 4000 + 8 * keys.nbytes < 4 * 4000 * 4000 / 5, "which is far from N times N"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: H2O("all"), "prompt, decode, got 'all'"),
        (lambda: H2O(recent=1.5), "0 to 1, got 1.5"),
        (lambda: SnapKV(kernel=4), "an odd number of rows"),
        (lambda: SnapKV(pool="mean"), "max, avg, got 'mean'"),
        (lambda: SnapKV(window=0), "window is 1 or more"),
        (lambda: PyramidKV(beta=0.5), "1 .every layer alike. or more"),
        (lambda: PyramidKV(beta=math.nan), "1 .every layer alike. or more"),
        (lambda: KVCache(H2O("decode"), capacity=100, fixed=True), "scores is 'prompt'"),
    ],
)
def test_bad_arguments_get_a_sentence(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
