"""A token's rows are stored by compiled code as torch stores them, and not at all where they are not finite."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from sparseattn import KVCache, decode, make_selector
from sparseattn.kernels.token_rows.dispatch import Storage, token_writer

DTYPES = torch.float32, torch.bfloat16, torch.float16


def storage(dtype: torch.dtype, batch: int = 2, heads: int = 3, rows: int = 7, size: int = 5) -> Storage:
    keys, values = torch.full((2, batch, heads, rows, size), 9.0).to(dtype)
    positions = torch.full((batch, rows), -7)
    return Storage(keys, values, positions, torch.zeros(batch, dtype=torch.int32), torch.zeros(batch).long())


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_stores_what_torch_stores(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, 2, 1, 3, 5, generator=draw).to(dtype).transpose(2, 3)
    held, expected = storage(dtype), storage(dtype)
    writers = token_writer(held, impl="numba"), token_writer(expected, impl="torch")
    for row, position in ((0, 0), (6, 40), (3, 41)):
        assert all(write(keys, values, row, position) for write in writers)
        for part, wanted in zip(held, expected, strict=True):
            assert torch.equal(part, wanted)
    assert held.rows.tolist() == [4, 4]
    assert held.newest.tolist() == [41, 41]


@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_are_not_finite_are_not_stored(impl: str, bad: float, which: int) -> None:
    rows = [torch.randn(2, 3, 1, 5) for _ in range(2)]
    rows[which][1, 2, 0, 4] = bad
    held, before = storage(torch.float32), storage(torch.float32)
    assert not token_writer(held, impl=impl)(*rows, 2, 2)
    assert all(torch.equal(part, wanted) for part, wanted in zip(held, before, strict=True))


def stepped(keys: Tensor, values: Tensor, one_by_one: bool) -> KVCache:
    """A cache with 40 rows at once and the rest one by one: by `put`, or each with its position, which `put` never
    takes."""
    cache = KVCache(make_selector("quest:page=4"), sink=2, window=4, seal=8)
    cache.append(keys[:, :, :40], values[:, :, :40])
    cache.seal()
    for row in range(40, keys.shape[2]):
        new = keys[:, :, row : row + 1], values[:, :, row : row + 1]
        positions = None if one_by_one else torch.full((len(keys), 1), row)
        cache.append(*new, positions=positions)
        cache.seal()
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_stores_tokens_in_one_call_is_that_of_the_checked_way(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 2, 2, 120, 16, generator=draw).to(dtype)
    query = torch.randn(2, 2, 3, 16, generator=draw).to(dtype)
    fast, checked = stepped(keys, values, True), stepped(keys, values, False)
    assert fast._tokens._room is not None, "tokens took the way of one call"
    assert fast.counts == checked.counts
    assert torch.equal(fast.positions, checked.positions)
    for name in ("keys", "values"):
        assert torch.equal(getattr(fast, name), getattr(checked, name)), name
    for name in ("sink", "sealed", "rows"):
        assert torch.equal(getattr(fast.bounds, name), getattr(checked.bounds, name)), name
    assert torch.equal(decode(query, fast, 16), decode(query, checked, 16))
    fast.crop(3)
    checked.crop(3)
    for cache in (fast, checked, fast.clone()):
        cache.append(keys[:, :, :1], values[:, :, :1])
        cache.reorder(torch.tensor([1, 0]))
        cache.append(keys[:, :, 1:2], values[:, :, 1:2])
    assert torch.equal(fast.keys, checked.keys)
    assert fast.counts == checked.counts
    with pytest.raises(ValueError, match="keys must be finite, got nan"):
        fast.append(keys[:, :, :1] * torch.nan, values[:, :, :1])
    assert fast.counts == checked.counts


def test_a_copy_stores_its_own_tokens() -> None:
    keys, values = torch.randn(2, 1, 2, 60, 16, generator=torch.Generator().manual_seed(1))
    cache = KVCache(make_selector("window"))
    cache.append(keys[:, :, :50], values[:, :, :50])
    cache.append(keys[:, :, 50:51], values[:, :, 50:51])
    twin = copy.deepcopy(cache)
    twin.append(keys[:, :, 51:52], values[:, :, 51:52])
    cache.append(keys[:, :, 52:53], values[:, :, 52:53])
    assert torch.equal(twin.keys, keys[:, :, :52])
    assert torch.equal(cache.keys[:, :, 51:], keys[:, :, 52:53])


def test_positions_whose_storage_grows_at_other_rows_than_the_keys_are_kept() -> None:
    """Where a first append exceeds the capacity, keys get room for 265 rows here and positions for 300."""
    keys, values = torch.randn(2, 1, 1, 420, 4, generator=torch.Generator().manual_seed(1))
    cache = KVCache(make_selector("window"), capacity=200)
    cache.append(keys[:, :, :201], values[:, :, :201])
    for row in range(201, 420):
        cache.append(keys[:, :, row : row + 1], values[:, :, row : row + 1])
    assert cache._tokens._room is not None
    assert torch.equal(cache.keys, keys)
    assert torch.equal(cache.stored.positions.data[0], torch.arange(420))
