"""PillarAttn: the rows that the last full pass gave the most weight, by brute force, through a cache and a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, Pillar, TwoStage
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


def test_copies_and_batches_keep_what_a_check_said() -> None:
    """A clone and a reordered batch choose by the check, and by none that comes to the other."""
    cache, *_ = _filled()
    sealed = int(cache.sealed[0])
    asked, total = torch.randn(B, H, G, 2, D), torch.full((B, H, G, 2), 3.0)
    cache.search.checked(asked, total)
    twin = cache.clone()
    cache.search.checked(torch.randn(B, H, G, 2, D), total)
    twin.reorder(torch.tensor([1, 0]))
    given = (asked.flatten(2, 3) @ cache.selector.stored.mT / D**0.5 - 3.0).clamp(max=0).exp().sum(2)
    best = given[..., :sealed].topk(12).indices
    expected = torch.zeros(B, H, sealed, dtype=torch.bool).scatter_(2, best, True).flip(0)
    assert torch.equal(twin.select(torch.randn(B, H, G, D), 12).mask(sealed), expected)
    assert not torch.equal(cache.select(torch.randn(B, H, G, D), 12).mask(sealed), expected)


def test_a_sequence_whose_pass_was_padding_keeps_its_weights() -> None:
    cache, *_ = _filled()
    sealed = int(cache.sealed[0])
    before = cache.select(torch.randn(B, H, G, D), 12).mask(sealed)
    total = torch.full((B, H, G, 2), 3.0)
    total[1] = torch.inf
    cache.search.checked(torch.randn(B, H, G, 2, D), total)
    chosen = cache.select(torch.randn(B, H, G, D), 12).mask(sealed)
    assert torch.equal(chosen[1], before[1])
    assert not torch.equal(chosen[0], before[0])


def test_a_part_of_another_method_is_told_and_asks_for_no_queries_of_its_own() -> None:
    method = TwoStage(Pillar(0), 2, rows=16)
    queries, keys, values = attention(B, H, G, N, D)
    cache = KVCache(method, sink=4, window=8, seal=16)
    cache.append(keys, values, queries)
    cache.seal()
    assert not method.pages.asked.rows
    cache.search.checked(queries[:, :, :, :2], torch.full((B, H, G, 2), 3.0))
    assert method.pages.asked.rows == 2 * G


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
