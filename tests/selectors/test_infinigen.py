"""InfiniGen: few skewed channels, the threshold below the largest logit, and the query of a layer ahead."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparseattn import Exact, InfiniGen, KVCache, TwoStage, decode, evaluate, make_selector
from sparseattn.selectors.abilities import LooksAhead
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from tests.cases import Foreseen, heads


def low_rank(rank: int, rows: int = 200, size: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries in a plane of `rank` dimensions that lies along no channel, keys anywhere."""
    queries, keys, values = heads(1, 2, 2, rows, size)
    plane = torch.linalg.qr(torch.randn(size, rank, generator=torch.Generator().manual_seed(3)))[0]
    return queries @ plane @ plane.T, keys, values


def test_skewed_channels_of_low_rank_queries_lose_nothing() -> None:
    queries, keys, values = low_rank(4)
    chosen = []
    for selector in (Foreseen(0.25, math.inf), Exact()):
        cache = KVCache(selector, sink=0, window=0, seal=1)
        cache.append(keys, values, queries)
        chosen.append(cache.select(queries[:, :, :, -1], 20).mask(200))
    assert torch.equal(*chosen)


def test_rows_that_fall_short_of_the_largest_logit_by_alpha_are_not_read() -> None:
    """As many for every head as the heads have on average, and never more than the budget."""
    queries, keys, values = heads(1, 2, 2, 300, 16)
    queries[:, 0] *= 4  # a sharper head
    logits = (queries[:, :, :, -1] @ keys.mT / 4)[0].flatten(0, 1)  # [HG,N]
    for alpha in (0.5, 2.0, 5.0):
        cache = KVCache(Foreseen(1.0, alpha), sink=0, window=0, seal=1)
        cache.append(keys, values, queries)
        near = (logits > logits.amax(1, keepdim=True) - alpha).sum(1).double()
        assert near.max() > near.min()
        selection = cache.select(queries[:, :, :, -1], 100)
        count = min(100, int(near.mean()))
        assert selection.attended.tolist() == [[count] * 4]
        best = logits.topk(count).indices
        assert [set(row[row >= 0].tolist()) for row in selection.rows[0]] == [set(one.tolist()) for one in best]


def test_the_query_ahead_holds_for_one_step_and_reaches_parts() -> None:
    queries, keys, values = heads(1, 2, 2, 200, 16)
    query, other = queries[:, :, :, -1], queries[:, :, :, -2].contiguous()
    for selector in (InfiniGen(1.0, 100.0, share=1.0), TwoStage(InfiniGen(1.0, 100.0, share=1.0), 1, rows=16)):
        cache = KVCache(selector, sink=0, window=0, seal=16)
        cache.append(keys, values, queries)
        assert selector.find(LooksAhead)
        with pytest.raises(ValueError, match="capture --ahead"):
            decode(query, cache, 20)
        cache.search.foresee(other)
        chosen = cache.select(query, 20)
        exact = KVCache(Exact(), sink=0, window=0, seal=16)
        exact.append(keys, values, queries)
        if isinstance(selector, InfiniGen):
            assert torch.equal(chosen.mask(192), exact.select(other, 20).mask(192))
        with pytest.raises(ValueError, match="capture --ahead"):
            cache.select(query, 20)
        with pytest.raises(ValueError, match=r"a query of this cache is \[B,H,G,D\]"):
            cache.search.foresee(other[..., :8])


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_what_was_foreseen_does_not_outlive_a_change_of_the_cache(apart: str | None) -> None:
    queries, keys, values = heads(2, 2, 2, 200, 16)
    query, other = queries[:, :, :, -1], queries[:, :, :, -2].contiguous()
    cache = KVCache(InfiniGen(1.0, 100.0, share=1.0), sink=0, window=4, seal=16, rollback=4, sealed_device=apart)
    cache.append(keys, values, queries)
    cache.seal()
    for change in (lambda: cache.crop(1), lambda: cache.reorder(torch.tensor([1, 0]))):
        cache.search.foresee(other)
        change()
        with pytest.raises(ValueError, match="capture --ahead"):
            decode(query, cache, 20)
    cache.search.foresee(other)
    with pytest.raises(ValueError, match="capture --ahead"):
        decode(query, cache.clone(), 20)
    assert decode(query, cache, 20).isfinite().all(), "the clone's is its own"


def test_a_trace_is_replayed_with_its_queries_ahead(tmp_path: Path) -> None:
    """Queries foreseen as they come are worth exact search; a trace that has none is refused before any work."""
    plain = synthetic(300, clusters=8)
    layer = plain.layer(0)
    Trace.build([replace(layer, ahead=layer.query)], plain.positions).save(tmp_path / "t.safetensors")
    trace = Trace.open(tmp_path / "t.safetensors")
    method = InfiniGen(1.0, 100.0, share=1.0)
    found, exact = (evaluate(trace, one, 20, last=8) for one in (method, "exact"))
    assert found.mean("recall@10") == exact.mean("recall@10") == 1.0
    with pytest.raises(ValueError, match=r"synthetic.* holds none for layers \[0\]: `sparseattn capture --ahead`"):
        evaluate(plain, method, 20, last=8)


def test_a_prompt_without_queries_is_told() -> None:
    _, keys, values = heads(1, 2, 2, 100, 16)
    cache = KVCache(InfiniGen(share=0.0), sink=0, window=0, seal=1)
    cache.append(keys, values)
    with pytest.warns(UserWarning, match="no queries of the prefill"):
        cache.seal()


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [("infinigen:ratio=0", "above 0 to 1, got 0"), ("infinigen:alpha=-1", "alpha is 0 or more, got -1")],
)
def test_arguments_out_of_range(spec: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_selector(spec)
