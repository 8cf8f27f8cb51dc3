"""PillarAttn: the rows that the last full pass gave the most weight, by brute force, through a cache and a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, Pillar
from sparseattn.cache.attend_stored import with_new_rows
from sparseattn.cache.rank_checks import check_dealable
from tests.cases import attention

B, H, G, N, D = 2, 2, 3, 120, 16


def _filled(rows: int = N) -> tuple[KVCache, Tensor, Tensor, Tensor]:
    queries, keys, values = attention(B, H, G, N + 20, D)
    cache = KVCache(Pillar(queries=4), sink=4, window=8, seal=16)
    cache.append(keys[:, :, :rows], values[:, :, :rows], queries[:, :, :, :rows])
    cache.seal()
    return cache, queries, keys, values


def _heaviest(cache: KVCache, weights: Tensor, rows: int) -> Tensor:
    """Which sealed rows have the largest weights `[B,H,N]`, as a mask `[B,H,n]`."""
    sealed = weights[:, :, 4 : 4 + int(cache.sealed[0])]
    return torch.zeros_like(sealed, dtype=torch.bool).scatter_(2, sealed.topk(rows).indices, True)


def test_the_prompts_last_queries_choose_first() -> None:
    cache, queries, keys, _ = _filled()
    logits = (queries[:, :, :, N - 4 : N] @ keys[:, :, None, :N].mT) / D**0.5  # [B,H,G,4,N]
    causal = torch.arange(N) <= torch.arange(N - 4, N)[:, None]
    given = logits.masked_fill(~causal, -torch.inf).softmax(-1).sum((2, 3))
    chosen = cache.select(torch.randn(B, H, G, D), 12)  # whatever the query
    assert torch.equal(chosen.mask(int(cache.sealed[0])), _heaviest(cache, given, 12))


def test_a_check_chooses_anew_and_weighs_rows_that_are_sealed_later() -> None:
    cache, queries, keys, values = _filled()
    asked = queries[:, :, :, N : N + 3]
    new = keys[:, :, N : N + 3], values[:, :, N : N + 3]
    seen = torch.ones(3, 3, dtype=torch.bool).tril()[None, None]
    _, total = with_new_rows(asked, cache, new, seen)
    cache.search.checked(asked, total)
    logits = (asked @ keys[:, :, None, : N + 3].mT) / D**0.5
    causal = torch.arange(N + 3) <= torch.arange(N, N + 3)[:, None]
    given = logits.masked_fill(~causal, -torch.inf).softmax(-1).sum((2, 3))
    chosen = cache.select(torch.randn(B, H, G, D), 12)
    assert torch.equal(chosen.mask(int(cache.sealed[0])), _heaviest(cache, given, 12))
    before = int(cache.sealed[0])
    cache.append(keys[:, :, N : N + 20], values[:, :, N : N + 20], queries[:, :, :, N : N + 20])
    cache.seal()
    assert int(cache.sealed[0]) > before
    logits = (asked @ keys[:, :, None].mT) / D**0.5
    given = (logits - total[..., None]).exp().sum((2, 3))
    chosen = cache.select(torch.randn(B, H, G, D), 12)
    assert torch.equal(chosen.mask(int(cache.sealed[0])), _heaviest(cache, given, 12))


def test_without_the_prompts_queries_the_newest_rows_are_read_until_a_check() -> None:
    _, keys, values = attention(B, H, G, N, D)
    cache = KVCache("pillar:queries=0", sink=4, window=8, seal=16)
    cache.append(keys, values)
    cache.seal()
    sealed = int(cache.sealed[0])
    chosen = cache.select(torch.randn(B, H, G, D), 12).mask(sealed)
    assert bool(chosen[..., -12:].all())
    assert not bool(chosen[..., :-12].any())
    cache.search.checked(torch.randn(B, H, G, 2, D), torch.full((B, H, G, 2), 3.0))
    assert not torch.equal(cache.select(torch.randn(B, H, G, D), 12).mask(sealed), chosen)


def test_steps_between_checks_read_nothing_to_choose() -> None:
    cache, *_ = _filled()
    sealed = int(cache.sealed[0])
    steps = [cache.select(torch.randn(B, H, G, D), budget) for budget in (12, 12, 5, 20)]
    assert [int(step.scan_bytes[0, 0]) for step in steps] == [4 * sealed, 0, 0, 4 * sealed]
    assert torch.equal(steps[2].start, steps[1].start[..., :5])
    cache.search.checked(torch.randn(B, H, G, 2, D), torch.full((B, H, G, 2), 3.0))
    steps = [cache.select(torch.randn(B, H, G, D), 12) for _ in range(2)]
    assert [int(step.scan_bytes[0, 0]) for step in steps] == [(4 + 4 * D) * sealed, 0]  # float32 keys once
    cache.search.checked(torch.randn(B, H, G, 2, D), torch.full((B, H, G, 2), 3.0))
    cache.reset()
    assert not cache.selector.stale


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="queries is 0 or more, got -1"):
        Pillar(-1)
    with pytest.raises(ValueError, match="no step of fixed shapes"):
        Pillar().fix(200, 16)
    without_queries = KVCache("pillar", sink=4, window=8, seal=16)
    with pytest.raises(ValueError, match="queries"):
        without_queries.append(*torch.randn(2, 1, H, 200, D))
    with pytest.raises(ValueError, match="learns from"):
        check_dealable(Pillar())
