"""The whole decode step on a CUDA device gives what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, Quest, attend, decode, evaluate
from sparseattn.traces.synthetic import synthetic
from tests.cache.recorded import choose_without_numba
from tests.cases import CASES, ON_DEVICE, Case, by_name, full, heads

pytestmark = pytest.mark.gpu
BY_NAME = by_name(CASES)


@pytest.fixture
def _checked() -> None:
    """Nothing, in place of conftest's: a check of what was selected waits for the device, which a capture forbids."""


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


@by_name(ON_DEVICE)
def test_one_graph_of_a_step_follows_appends_seals_and_another_batch(case: Case) -> None:
    """Captured once, in fixed storage; nothing in it waits for the host, or the capture would fail."""
    queries, keys, values = (x.cuda() for x in heads(2, 2, 4, 600, 64))
    cache = KVCache(case.make(), sink=4, window=16, seal=32, capacity=1024, fixed=True)
    query = queries[:, :, :, 199].clone()
    graph, out, seals = None, query, set()
    for factor in (1.0, 1.25):
        plain = KVCache(case.make(), sink=4, window=16, seal=32)
        cache.reset()
        for start, stop in ((0, 200), *((t, t + 40) for t in range(200, 600, 40))):
            part = slice(start, stop)
            for one in (cache, plain):
                one.append(keys[:, :, part] * factor, values[:, :, part], queries[:, :, :, part])
                one.seal()
            query.copy_(queries[:, :, :, stop - 1])
            if graph is None:
                graph, out = captured(lambda: decode(query, cache, 48))
                decode(query, plain, 48)  # as `captured` ran it: methods that observe count each step
            graph.replay()
            torch.testing.assert_close(out, decode(query, plain, 48), rtol=1e-4, atol=1e-4)
            seals.add(int(cache.sealed[0]))
    assert len(seals) > 8


def test_a_graph_that_could_not_stay_right_is_refused() -> None:
    queries, keys, values = (x.cuda() for x in heads(1, 2, 4, 200, 64))
    cache = KVCache(Quest(), sink=4, window=50, seal=32, capacity=512, fixed=True)
    cache.append(keys[:, :, :50], values[:, :, :50])
    query = queries[:, :, :, 199].clone()
    with pytest.raises(RuntimeError, match="nothing is sealed yet"):
        captured(lambda: decode(query + 0, cache, 48))  # of a graph without any launch torch would warn
    cache.append(keys[:, :, 50:160], values[:, :, 50:160])
    decode(query + 0, cache, 48)
    cache.append(keys[:, :, 160:], values[:, :, 160:])
    for what, refused in (
        ("sealing rows", lambda: decode(query + 0, cache, 48)),
        ("storing rows", lambda: cache.append(keys[:, :, :1] + 0, values[:, :, :1])),
    ):
        with pytest.raises(RuntimeError, match=what), torch.cuda.graph(torch.cuda.CUDAGraph()):
            refused()


@BY_NAME
def test_a_replay_on_the_gpu_equals_the_cpu(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 choices at most 8 may fall otherwise: rows whose scores are equal to rounding. The CPU chooses by torch's
    products here, as its compiled code rounds queries to 8 bits where keys have few."""
    choose_without_numba(monkeypatch)
    queries, keys, values = heads(2, 2, 4, 300, 64)
    apart = "cpu" if case.make().host else None
    host = KVCache(case.make(), sink=4, window=16, seal=32)
    device = KVCache(case.make(), sink=4, window=16, seal=32, sealed_device=apart)
    otherwise = 0
    for start, stop in [(0, 200), *((t, t + 1) for t in range(200, 300))]:
        rows = slice(start, stop)
        host.append(keys[:, :, rows], values[:, :, rows], queries[:, :, :, rows])
        device.append(keys[:, :, rows].cuda(), values[:, :, rows].cuda(), queries[:, :, :, rows].cuda())
        if start:
            query = queries[:, :, :, start]
            out = decode(query.cuda(), device, 48, impl=("triton", "gather")[start % 2]).cpu()
            alike = torch.isclose(out, decode(query, host, 48), rtol=1e-3, atol=1e-3).all(-1).all(-1)  # [B,H]
            otherwise += int((~alike).sum())
    assert otherwise <= 8


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
    assert device.stored.sealed_keys.is_pinned()
    assert device.stored.sealed_values.is_pinned()
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


@pytest.mark.parametrize("spec", ["exact", "quest", "window"])
def test_a_replay_measures_what_the_cpu_measures(spec: str) -> None:
    trace = synthetic(600, heads=2, group=2, size=32, layers=2, clusters=8)
    here, there = (evaluate(trace, spec, 64, window=8, last=4, device=device) for device in ("cpu", "cuda"))
    assert (here.settings["device"], there.settings["device"]) == ("cpu", "cuda")
    for name, expected in here.heads.items():
        torch.testing.assert_close(there.heads[name], expected, rtol=1e-3, atol=1e-3, equal_nan=True)
