"""`sealed_device="cpu"`: the numbers of the joint cache, and storage beside the sealed rows that does not grow.

Where there is no GPU both parts lie on the CPU, in storages of their own, and take the same path but for the copies
(tests/cache/test_decode_gpu.py). The laws and the model of lists run over such caches too.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparseattn import Exact, KVCache, Quest, Rows, Selection, Selector, Window, attend, decode
from sparseattn.evaluation.step_measures import compare
from sparseattn.kernels.attend.merge import merge
from tests.cases import CASES, Buckets, Case, SampledBuckets, by_name, full, heads, together

B, H, G, D = 3, 2, 2, 16


def pair(case: Case, **settings) -> tuple[KVCache, KVCache]:
    return KVCache(case.make(), **settings), KVCache(case.make(), **settings, sealed_device="cpu")


def same(query: Tensor, caches: tuple[KVCache, KVCache], budget) -> None:
    joint, apart = (decode(query, cache, budget) for cache in caches)
    torch.testing.assert_close(apart, joint, rtol=1e-5, atol=1e-5)


@by_name(CASES, few=True)
def test_a_replay_of_sequences_of_different_lengths_equals_the_joint_cache(case: Case) -> None:
    """Through a padded prefill, several seals, a crop, beams and a clone."""
    queries, keys, values = heads(B, H, G, 200, D)
    caches = pair(case, sink=4, window=8, seal=32, rollback=3)
    at = torch.arange(120).expand(B, -1).clone()
    for b, padding in enumerate((0, 50, 118)):
        at[b, :padding] = -1
        at[b, padding:] -= padding
    beams = torch.tensor([1, 0, 0])
    for cache in caches:
        cache.append(keys[:, :, :120], values[:, :, :120], queries[:, :, :, :120], at)
    for t in range(120, 200):
        one = slice(t, t + 1)
        for cache in caches:
            if t % 20 == 0:
                cache.append(keys[:, :, :3], values[:, :, :3], queries[:, :, :, :3])
                cache.crop(torch.tensor([3, 3, 3]))
            cache.append(keys[:, :, one], values[:, :, one], queries[:, :, :, one])
            if t == 150:
                cache.reorder(beams)
        same(queries[:, :, :, t], caches, 40)
        if t == 170:
            caches = (caches[0].clone(), caches[1].clone())
    assert caches[0].sealed.tolist() == caches[1].sealed.tolist()
    assert int(caches[1].sealed[0]) > 64
    for joint, apart in zip(together(caches[0])[:2], together(caches[1])[:2], strict=True):
        rows = int(caches[0].bounds.rows.min())
        assert torch.equal(joint[:, :, 4:rows], apart[:, :, 4:rows])
    assert torch.equal(caches[0].stored.sealed_values, caches[1].stored.sealed_values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Two 16-bit parts merged are as near full attention as one rounding more allows."""
    queries, keys, values = heads(B, H, G, 400, 64, dtype)
    cache = KVCache(Exact(), sink=4, window=16, sealed_device="cpu")
    cache.append(keys, values)
    out = decode(queries[:, :, :, -1], cache, None)
    assert out.dtype == dtype
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.005}
    torch.testing.assert_close(out.double(), full(queries[:, :, :, -1], keys, values), **close)


def device_rows(cache: KVCache) -> int:
    """Rows of storage on the cache's device, capacity included, as bytes over those of a row."""
    batch, heads, _, size = cache.keys.shape
    held = cache.keys.untyped_storage().nbytes() + cache.values.untyped_storage().nbytes()
    return held // (2 * batch * heads * size * cache.keys.element_size())


@pytest.mark.parametrize("capacity", [0, 5000])
def test_storage_beside_the_sealed_rows_does_not_grow_with_the_context(capacity: int) -> None:
    settings = {"sink": 4, "window": 20, "seal": 200, "rollback": 2}
    after = set()
    for prefill in (500, 4000):
        cache = KVCache(Quest(), **settings, capacity=capacity, sealed_device="cpu")
        _, keys, values = heads(1, 2, 1, prefill, 8)
        cache.append(keys, values)
        cache.seal()
        assert int(cache.sealed[0]) >= prefill - 26 - 16
        places = {cache.stored.sealed_keys.data_ptr()}
        for _ in range(600):
            after.add(device_rows(cache))
            place, sealed = cache.keys.data_ptr(), int(cache.sealed[0])
            cache.append(keys[:, :, :1], values[:, :, :1])
            cache.seal()
            assert cache.keys.data_ptr() == place or int(cache.sealed[0]) > sealed, "storage moves at seals only"
            places.add(cache.stored.sealed_keys.data_ptr())
        assert len(places) == 1 or (capacity == 0 and len(places) <= 3), "the sealed rows are not copied at each seal"
        assert cache.stored.sealed_keys.shape[2] == int(cache.sealed[0])
    assert max(after) <= 4 + 20 + 200 + 2 + 16, "sink, window, rollback, rows that wait and a span"


def test_the_storage_of_queries_goes_with_their_rows() -> None:
    selector = SampledBuckets(0.25)
    cache = KVCache(selector, sink=0, window=8, seal=16, sealed_device="cpu")
    queries, keys, values = heads(1, 2, 4, 2000, 8)
    cache.append(keys, values, queries)
    assert 500 <= cache.stored.queries.sampled.full.shape[3] < 600, "a quarter of the rows and spare ones"
    cache.seal()
    assert cache.stored.queries.sampled.full.shape[3] < 100


def test_a_method_that_reads_keys_is_shown_the_sealed_ones() -> None:
    cache = KVCache(Exact(), sink=4, window=8, seal=32, sealed_device="cpu")
    cache.append(*torch.randn(2, 2, 2, 200, D))
    cache.seal()
    assert cache.selector.stored.data_ptr() == cache.stored.sealed_keys.data_ptr()  # type: ignore[union-attr]


def test_both_parts_are_what_they_say_and_merge_to_the_whole() -> None:
    queries, keys, values = heads(2, 2, 3, 200, D)
    cache = KVCache(Quest(), sink=4, window=8, seal=32, sealed_device="cpu")
    cache.append(keys, values)
    query = queries[:, :, :, -1]
    selection = cache.select(query, 64)
    assert cache.stored.sealed_keys.shape[2] == int(cache.sealed[0]) == 176
    assert cache.keys.shape[2] == 200 - 176
    for bounds, expected in ((cache.bounds, (4, 4, 4, 24)), (cache.stored.sealed_bounds, (0, 0, 176, 176))):
        assert (int(bounds.sink[0]), bounds.base, int(bounds.sealed[0]), int(bounds.rows[0])) == expected
    near = attend(query, cache.keys, cache.values, Selection.none(2, 2), cache.bounds)
    far = attend(query, cache.stored.sealed_keys, cache.stored.sealed_values, selection, cache.stored.sealed_bounds)
    merged = merge(*(torch.stack(part) for part in zip(near, far, strict=True)))
    stored_keys, stored_values, bounds = together(cache)
    whole = attend(query, stored_keys, stored_values, selection, bounds)
    for got, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(decode(query, cache, 64), whole[0])


def test_sealed_rows_of_a_joint_cache_are_a_view_of_its_keys() -> None:
    _, keys, values = heads(1, 2, 1, 100, D)
    cache = KVCache(Quest(), sink=4, window=8, seal=16)
    cache.append(keys, values)
    assert cache.stored.sealed_keys.shape[2] == 0
    cache.seal()
    assert torch.equal(cache.stored.sealed_keys, keys[:, :, 4:84])
    assert torch.equal(cache.stored.sealed_values, values[:, :, 4:84])
    assert cache.stored.sealed_keys.data_ptr() == cache.keys[:, :, 4:].data_ptr()
    assert int(cache.stored.sealed_bounds.rows[0]) == 80


@pytest.mark.parametrize("rows", [1, 3, 30])
@pytest.mark.parametrize("make", [Quest, Window, Exact])
def test_nothing_sealed_is_dense(make, rows: int) -> None:
    queries, keys, values = heads(2, 2, 3, rows, D)
    cache = KVCache(make(), sink=3, window=40, sealed_device="cpu")
    cache.append(keys, values)
    out = decode(queries[:, :, :, -1], cache, 16)
    assert cache.stored.sealed_keys.shape == (2, 2, 0, D)
    torch.testing.assert_close(out.double(), full(queries[:, :, :, -1], keys, values), rtol=1e-5, atol=1e-5)


def test_no_row_at_all_gives_zero() -> None:
    cache = KVCache(Window(), sink=0, window=0, sealed_device="cpu")
    cache.append(*torch.randn(2, 1, 2, 8, D))
    assert bool((decode(torch.randn(1, 2, 3, D), cache, 4) == 0).all())


def test_an_impl_and_a_scale_are_those_of_the_joint_cache() -> None:
    queries, keys, values = heads(2, 2, 3, 200, D)
    caches = pair(CASES[0], sink=4, window=8, seal=32)
    for cache in caches:
        cache.append(keys, values)
    for impl in ("reference", "gather", None):
        joint, apart = (decode(queries[:, :, :, -1], cache, 40, scale=0.5, impl=impl) for cache in caches)
        torch.testing.assert_close(apart, joint)
    with pytest.raises(ValueError, match="impl is one of"):
        decode(queries[:, :, :, -1], caches[1], 40, impl="numpy")


def test_reset_and_another_shape() -> None:
    caches = pair(CASES[3], sink=2, window=4, seal=16, capacity=300)
    for batch, dtype in ((2, torch.float32), (3, torch.float64)):
        queries, keys, values = heads(batch, 2, 1, 100, 8, dtype)
        for cache in caches:
            cache.append(keys, values)
        same(queries[:, :, :, -1], caches, 32)
        for cache in caches:
            cache.reset()
    assert caches[1].batch == 0


def test_to_moves_the_part_on_the_device_alone() -> None:
    queries, keys, values = heads(1, 1, 2, 64, 32)
    cache = KVCache(Buckets(), sink=0, window=8, seal=16, sealed_device="cpu")
    cache.append(keys, values, queries)
    cache.seal()
    assert cache.to("meta") is cache
    assert cache.keys.device.type == cache.bounds.rows.device.type == cache.positions.device.type == "meta"
    assert cache.stored.sealed_keys.device.type == cache.stored.sealed_bounds.rows.device.type == "cpu"
    assert cache.selector.mean.full.device.type == "cpu"  # type: ignore[attr-defined]


def test_the_repr_names_it_where_it_is_set() -> None:
    assert "sealed_device" not in repr(KVCache(Quest()))
    assert "sealed_device='cpu'" in repr(KVCache(Quest(), sealed_device=torch.device("cpu")))


@pytest.mark.parametrize("bad", ["cuda", "disk", 3, torch.device("meta"), ""])
def test_another_sealed_device_is_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"None .* or 'disk:FOLDER', got "):
        KVCache(Quest(), sealed_device=bad)


def test_a_refused_budget_or_query_seals_nothing() -> None:
    cache = KVCache(Quest(), sink=0, window=0, sealed_device="cpu")
    cache.append(*torch.randn(2, 1, 1, 96, 8))
    for query, budget in ((torch.randn(1, 1, 1, 8), 8), (torch.randn(1, 1, 1, 9), 32)):
        with pytest.raises(ValueError, match=r"budget|query"):
            decode(query, cache, budget)
    assert int(cache.sealed[0]) == 0


def test_compare_refuses_rows_that_lie_apart() -> None:
    cache = KVCache(Quest(), sink=0, window=0, sealed_device="cpu")
    cache.append(*torch.randn(2, 1, 1, 96, 8))
    query = torch.randn(1, 1, 1, 8)
    with pytest.raises(ValueError, match="without sealed_device"):
        compare(query, cache, cache.select(query, 32), 1.0)


class Failing(Selector):
    def append(self, rows: Rows) -> None:
        raise ArithmeticError("a fault of the method")

    def select(self, query, step, budget) -> Selection:
        return Selection.none(*query.shape[:2])


def test_a_selector_that_fails_voids_the_cache_until_reset() -> None:
    cache = KVCache(Failing(), sink=0, window=0, sealed_device="cpu")
    cache.append(*torch.zeros(2, 1, 1, 4, 8))
    with pytest.raises(ArithmeticError):
        cache.seal()
    with pytest.raises(RuntimeError, match="failed while rows were sealed"):
        _ = cache.stored.sealed_keys
    cache.reset()
    cache.append(*torch.zeros(2, 1, 1, 4, 8))
    assert cache.stored.sealed_keys.shape[2] == 0
