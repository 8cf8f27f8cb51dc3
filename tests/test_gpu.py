"""The whole decode step on a CUDA device gives what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch
from cases import CASES, Case, full, heads

from sparseattn import KVCache, attend, decode

pytestmark = pytest.mark.gpu
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@BY_NAME
def test_a_replay_on_the_gpu_equals_the_cpu(case: Case) -> None:
    queries, keys, values = heads(2, 2, 4, 300, 64)
    host, device = (KVCache(case.make(), sink=4, window=16, seal=32) for _ in range(2))
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
    cache = KVCache(case.exhaustive(), sink=4, window=16)
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
