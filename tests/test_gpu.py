"""The whole decode step on a CUDA device gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import CASES, Case, full, heads
from torch import Tensor

from sparseattn import KVCache, Quest, Selection, attend, decode
from sparseattn.storage import RowBuffer

pytestmark = pytest.mark.gpu
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Chosen on the device. "exact-static" counts queries on the host, the last two are a test double and for measuring.
ON_DEVICE = [case for case in CASES if not case.make().host and case.name != "exact-static"]
ON_DEVICE = [case for case in ON_DEVICE if not case.name.startswith(("flat", "ivf", "hnsw", "buckets", "perfect"))]


def captured(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `step` and where its output appears. Run once before, which compiles and takes workspaces."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize("case", ON_DEVICE, ids=lambda case: case.name)
def test_one_graph_of_select_and_attend_follows_appended_rows(case: Case) -> None:
    """Captured once and replayed until the next seal; nothing in it waits for the host, or the capture would fail."""
    queries, keys, values = (x.cuda() for x in heads(2, 2, 4, 300, 64))
    cache = KVCache(case.make(), sink=4, window=16, seal=128, capacity=512)
    cache.append(keys[:, :, :200], values[:, :, :200], queries[:, :, :, :200])
    query = queries[:, :, :, 199].clone()
    cache.seal()
    graph, out = captured(lambda: decode(query, cache, 48))
    sealed = cache.sealed
    for t in range(200, 300, 20):
        part = slice(t, t + 20)
        cache.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
        query.copy_(queries[:, :, :, t + 19])
        graph.replay()
        torch.testing.assert_close(out, decode(query, cache, 48), rtol=1e-4, atol=1e-4)
        assert torch.equal(cache.sealed, sealed)


@pytest.mark.parametrize("group", ["sum", "max", "softmax", "each"])
def test_one_graph_of_a_quest_step_follows_seals_within_a_capacity(group: str) -> None:
    """Bounds of pages in storage of a fixed size; appends and seals happen between the replays."""
    from sparseattn.kernels import pages

    queries, keys, values = (x.cuda() for x in heads(2, 2, 4, 600, 64))
    selector = Quest(16, group)
    selector.low, selector.high, selector.real = RowBuffer(2, 64), RowBuffer(2, 64), RowBuffer(1, 64)
    cache = KVCache(selector, sink=4, window=16, seal=32, capacity=1024)
    cache.append(keys[:, :, :200], values[:, :, :200])
    cache.seal()
    selector.real.full[:, selector.real.rows :] = False
    query = queries[:, :, :, 199].clone()

    def step() -> Tensor:
        scores = pages.scores(query, selector.low.full, selector.high.full, selector.real.full, group)
        selection = Selection(*pages.best(scores, 5, 16), 16)
        return attend(query, cache.keys, cache.values, selection, cache.bounds, impl="triton")[0]

    graph, out = captured(step)
    for t in range(200, 600, 40):
        part = slice(t, t + 40)
        cache.append(keys[:, :, part], values[:, :, part])
        query.copy_(queries[:, :, :, t + 39])
        expected = decode(query, cache, 80)
        graph.replay()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    assert int(cache.sealed[0]) > 500


@BY_NAME
def test_a_replay_on_the_gpu_equals_the_cpu(case: Case) -> None:
    queries, keys, values = heads(2, 2, 4, 300, 64)
    apart = "cpu" if case.make().host else None
    host = KVCache(case.make(), sink=4, window=16, seal=32)
    device = KVCache(case.make(), sink=4, window=16, seal=32, sealed_device=apart)
    for start, stop in [(0, 200), *((t, t + 1) for t in range(200, 300))]:
        rows = slice(start, stop)
        host.append(keys[:, :, rows], values[:, :, rows], queries[:, :, :, rows])
        device.append(keys[:, :, rows].cuda(), values[:, :, rows].cuda(), queries[:, :, :, rows].cuda())
        if start:
            query = queries[:, :, :, start]
            expected = decode(query, host, 48)
            for impl in ("triton", "gather"):
                out = decode(query.cuda(), device, 48, impl=impl)
                torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exhaustive_is_full_attention_in_half_precision(case: Case, dtype: torch.dtype) -> None:
    if case.exhaustive is None:
        pytest.skip(case.reason)
    queries, keys, values = (x.cuda() for x in heads(2, 4, 4, 1000, 128, dtype))
    selector = case.exhaustive()
    cache = KVCache(selector, sink=4, window=16, sealed_device="cpu" if selector.host else None)
    cache.append(keys, values, queries)
    out = decode(queries[:, :, :, -1], cache, None)
    torch.testing.assert_close(out.double(), full(queries[:, :, :, -1], keys, values), rtol=0.02, atol=0.01)


def test_none_takes_triton_on_a_cuda_device() -> None:
    queries, keys, values = (x.cuda() for x in heads(1, 2, 4, 256, 64))
    cache = KVCache(CASES[0].make())
    cache.append(keys, values)
    query = queries[:, :, :, -1]
    selection = cache.select(query, 64)
    chosen = attend(query, cache.keys, cache.values, selection, cache.bounds)
    named = attend(query, cache.keys, cache.values, selection, cache.bounds, impl="triton")
    assert torch.equal(chosen[0], named[0])


@BY_NAME
def test_sealed_rows_in_host_memory_give_what_the_cpu_gives(case: Case) -> None:
    """Through several seals, beams and a clone; what is sealed stays in pinned host memory."""
    queries, keys, values = heads(2, 2, 4, 300, 64)
    host = KVCache(case.make(), sink=4, window=16, seal=32)
    device = KVCache(case.make(), sink=4, window=16, seal=32, sealed_device="cpu")
    for start, stop in [(0, 200), *((t, t + 1) for t in range(200, 300))]:
        rows = slice(start, stop)
        host.append(keys[:, :, rows], values[:, :, rows], queries[:, :, :, rows])
        device.append(keys[:, :, rows].cuda(), values[:, :, rows].cuda(), queries[:, :, :, rows].cuda())
        if start == 250:
            host.reorder(torch.tensor([1, 0]))
            device.reorder(torch.tensor([1, 0], device="cuda"))
            device = device.clone()
        if start:
            query = queries[:, :, :, start]
            impl = ("triton", "gather", None)[start % 3]
            out = decode(query.cuda(), device, 48, impl=impl)
            assert out.is_cuda
            torch.testing.assert_close(out.cpu(), decode(query, host, 48), rtol=1e-3, atol=1e-3)
    assert device.keys.is_cuda
    assert device.sealed_keys.is_pinned()
    assert device.sealed_values.is_pinned()
    assert device.select(queries[:, :, :, -1].cuda(), 48).start.device.type == "cpu"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_host_and_device_parts_merge_to_full_attention_in_half_precision(dtype: torch.dtype) -> None:
    queries, keys, values = (x.cuda() for x in heads(2, 4, 4, 1000, 128, dtype))
    cache = KVCache(Quest(), sink=4, window=100, sealed_device="cpu")
    cache.append(keys, values)
    out = decode(queries[:, :, :, -1], cache, None)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), full(queries[:, :, :, -1], keys, values), rtol=0.02, atol=0.01)


def test_device_memory_does_not_grow_with_the_context() -> None:
    held = []
    for rows in (4096, 4096, 32768):  # the first one pays for what stays, such as workspaces
        queries, keys, values = (x.cuda() for x in heads(1, 4, 2, rows, 128, torch.float16))
        query, head = queries[:, :, :, -1].clone(), keys[0, 0].nbytes
        del queries
        before = torch.cuda.memory_allocated()
        cache = KVCache(Quest(), sink=4, window=64, sealed_device="cpu")
        cache.append(keys, values)
        torch.cuda.reset_peak_memory_stats()
        full_of_rows = torch.cuda.memory_allocated()
        cache.seal()
        if rows > 4096:
            assert torch.cuda.max_memory_allocated() - full_of_rows < head, "sealing holds no second copy on the device"
        decode(query, cache, 512)
        held.append(torch.cuda.memory_allocated() - before)
        del cache, keys, values, query
    assert held[2] <= held[1] + 65536, held
