"""A decode step needs nothing that a CUDA graph forbids: no wait of the host, no size or address that is data."""

from __future__ import annotations

import os

import pytest
import torch
from cases import CASES, Case, attention
from recorded import HostWaits, Recording

from sparseattn import KVCache, Quest, Selection, attend
from sparseattn.storage import RowBuffer

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: with a GPU, test_gpu.py captures a graph", allow_module_level=True)
from sparseattn.kernels import lists, pages, probes, scoring, spans

B, H, G, D = 2, 1, 2, 16
# On the host (faiss, a graph that is walked), or a test double. PerfectBuckets is for measuring only.
STATIC = [
    case for case in CASES if not case.name.startswith(("flat", "ivf", "hnsw", "retrieval", "buckets", "perfect"))
]
BY_NAME = pytest.mark.parametrize("case", STATIC, ids=lambda case: case.name)


def test_every_device_selector_is_covered() -> None:
    kinds = {type(case.make()).__name__ for case in STATIC}
    assert kinds == {"Exact", "Quest", "QueryBridge", "SAAP", "Moments", "KMeans", "Random", "Window"}


def step(case: Case, prefill: int = 150, budget: int = 40):
    """A cache and a step of it, recorded as a CUDA device would run it: inputs, cache, recording, query and output."""
    queries, keys, values = attention(B, H, G, 220, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=64, capacity=400)
    cache.append(keys[:, :, :prefill], values[:, :, :prefill], queries[:, :, :, :prefill])
    query = queries[:, :, :, prefill - 1].clone()
    cache.seal()
    cache.search(query, budget)  # as before a capture: what is looked up once is looked up here
    recording = Recording()
    kernel = recording.opaque(spans.attend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "chosen", lambda impl, device, dtype: impl or "triton")
        for module, name in ((pages, "scores"), (pages, "best"), (probes, "spans"), (lists, "scores")):
            patch.setattr(module, name, recording.opaque(getattr(module, name)))
        with recording:
            selection = cache.search(query, budget)
            out, _ = kernel(query, cache.keys, cache.values, selection, cache.bounds, D**-0.5)
    return (queries, keys, values), cache, recording, query, out


@BY_NAME
def test_a_step_never_waits_and_follows_the_rows_that_come(case: Case) -> None:
    """Recorded once, replayed as tokens are appended until the next seal: what eager steps of the same cache give."""
    if case.name == "exact-static":
        pytest.skip("chooses anew at every fourth query, which the host counts")
    (queries, keys, values), cache, recording, query, out = step(case)
    sealed = cache.sealed
    for t in (150, 170):
        part = slice(t, t + 20)
        cache.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
        query.copy_(queries[:, :, :, t + 19])
        recording.replay()
        selection = cache.select(query, 40)
        assert torch.equal(cache.sealed, sealed), "a seal lies between the recording and the replay"
        expected, _ = attend(query, cache.keys, cache.values, selection, cache.bounds, impl="reference")
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_kernels_of_a_quest_step_follow_seals_within_a_capacity() -> None:
    """Page bounds kept in storage of a fixed size: what is recorded once stays right through appends and seals."""
    queries, keys, values = attention(B, H, G, 300, D)
    selector = Quest(8)
    selector.low, selector.high, selector.real = RowBuffer(2, 40), RowBuffer(2, 40), RowBuffer(1, 40)
    cache = KVCache(selector, sink=4, window=8, seal=16, capacity=400)
    cache.append(keys[:, :, :100], values[:, :, :100])
    cache.seal()
    selector.real.full[:, selector.real.rows :] = False
    query, recording = queries[:, :, :, 99].clone(), Recording()
    score, best, kernel = (recording.opaque(f) for f in (pages.scores, pages.best, spans.attend))
    with recording:
        start, length = best(score(query, selector.low.full, selector.high.full, selector.real.full, "sum"), 5, 8)
        out, _ = kernel(query, cache.keys, cache.values, Selection(start, length, 8), cache.bounds, D**-0.5)
    for t in range(100, 300, 67):
        part = slice(t, t + 67)
        before = cache.sealed
        cache.append(keys[:, :, part], values[:, :, part])
        query.copy_(queries[:, :, :, min(t + 66, 299)])
        expected, _ = attend(query, cache.keys, cache.values, cache.select(query, 40), cache.bounds, impl="reference")
        assert bool((cache.sealed > before).all())
        recording.replay()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_waiting_is_refused() -> None:
    x = torch.arange(5.0)
    for wait in (
        lambda: x.sum().item(),
        lambda: bool((x > 1).any()),
        lambda: x.tolist(),
        lambda: x[x > 2],
        lambda: x.nonzero(),
        lambda: x.masked_select(x > 1),
        lambda: x.unique(),
        lambda: x.repeat_interleave(torch.tensor([1, 2, 3, 4, 5])),
        lambda: int(x[3]),
        lambda: torch.equal(x, x),
    ):
        with pytest.raises(HostWaits), Recording():
            wait()


def test_a_replay_bakes_in_what_the_host_knew() -> None:
    x, number = torch.zeros(3), [1.0]
    recording = Recording()
    with recording:
        y = (x + number[0]) * 2
        y[1:].mul_(3)
    x.fill_(5)
    number[0] = 100.0
    recording.replay()
    assert y.tolist() == [12.0, 36.0, 36.0]
