"""Quest's bounds as the levels of rounded keys carry them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparseattn import KVCache, Levels, Quest, decode, evaluate
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores
from sparseattn.traces.synthetic import synthetic

ROWS, PAGE = 4 + 8 + 6 * 16 + 5, 16


def filled(bits: int, group: str = "sum", dtype: torch.dtype = torch.float32, size: int = 24) -> KVCache:
    keys, values = torch.randn(2, 2, 2, ROWS, size, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions = torch.arange(ROWS).repeat(2, 1)
    positions[1, : ROWS - 60] = -1
    positions[1, ROWS - 60 :] = torch.arange(60)
    cache = KVCache(Levels(PAGE, group), sink=4, window=8, seal=16, rows=f"kivi:bits={bits},group={PAGE}", check=True)
    cache.append(keys, values, None, positions)
    cache.seal()
    return cache


@pytest.mark.parametrize("group", ["sum", "softmax", "max", "each"])
@pytest.mark.parametrize(("bits", "dtype"), [(8, torch.float32), (4, torch.bfloat16)])
def test_scores_are_quests_of_the_levels(bits: int, dtype: torch.dtype, group: str) -> None:
    cache = filled(bits, group, dtype)
    held = cache.stored.sealed_codes
    assert held is not None
    levels = held.key_levels.float()
    low, high = levels[:, :, :, 0], levels[:, :, :, 0] + levels[:, :, :, 1] * ((1 << bits) - 1)
    keys = cache.stored.sealed_keys.float().unflatten(2, (-1, PAGE))
    assert bool(((keys >= low[:, :, :, None] - 1e-2) & (keys <= high[:, :, :, None] + 1e-2)).all())
    query = torch.randn(2, 2, 3, 24, dtype=dtype)
    selector = cache.selector
    assert isinstance(selector, Levels)
    real = cache.search.step().valid[:, ::PAGE].contiguous()
    right = page_scores(query.float(), PageBounds(low, high, real), group, impl="torch", temperature=24**0.5)
    torch.testing.assert_close(selector.scores(query, {}, real), right, rtol=1e-4, atol=1e-4)


def test_nothing_is_kept_and_copies_read_their_own_rows() -> None:
    cache, query = filled(8), torch.randn(2, 2, 3, 24)
    assert (
        sum(size for name, size in cache.nbytes.items() if name not in ("kv", "books")) < ROWS
    )  # which pages are real
    first = decode(query, cache, 32)
    twin = cache.clone()
    torch.testing.assert_close(decode(query, twin, 32), first)
    twin.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(decode(query.flip(0), twin, 32), first.flip(0))
    rows = torch.randn(2, 2, 2, 40, 24)
    twin.append(rows[0], rows[1])  # seals more
    decode(query, twin, 32)
    torch.testing.assert_close(decode(query, cache, 32), first)
    cost = cache.select(query, 32).scan_bytes
    assert cost is not None
    assert int(cost[0, 0]) == 6 * 2 * 24 * 2  # pages, levels, channels, bytes
    assert cache.selector.scan(query, 6 * 16, 32).read == int(cost[0, 0])


def test_it_finds_about_what_quest_finds() -> None:
    trace = synthetic(1200, heads=2, group=2, size=32, clusters=16)
    settings = {"sink": 4, "window": 28, "last": 8, "seal": 32}
    found = [evaluate(trace, one, 128, rows="kivi:bits=8", **settings) for one in (Levels(32), Quest(32))]
    assert found[0].mean("recovered") == pytest.approx(found[1].mean("recovered"), abs=0.03)


@pytest.mark.parametrize("cache", [{}, {"rows": "kivi:bits=8"}, {"rows": "kivi:bits=4,group=16"}])
def test_other_caches_are_refused(cache: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Levels:page=64,group=sum reads the levels of rounded keys in groups of 64"):
        KVCache(Levels(64), **cache)
    with pytest.raises(RuntimeError, match="use it in one with rows='kivi'"):
        Levels(16).scores(torch.zeros(1, 1, 1, 8), {}, torch.ones(1, 2, dtype=torch.bool))
