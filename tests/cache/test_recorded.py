"""A decode step needs nothing that a CUDA graph forbids: no wait of the host, no size or address that is data."""

from __future__ import annotations

import functools
import os

import pytest
import torch

from sparseattn import SELECTORS, KVCache, Mass, decode
from sparseattn.cache.decode import attend_chosen
from tests.cache.recorded import HostWaits, Recording, break_ties, choose_without_numba
from tests.cases import FEW, ON_DEVICE, Case, attention, by_name

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: with a GPU, test_decode_gpu.py captures a graph", allow_module_level=True)
from sparseattn.core.budget import Budget
from sparseattn.kernels import implementations
from sparseattn.kernels.attend import dispatch
from sparseattn.kernels.attend import gpu as attend_gpu
from sparseattn.kernels.bucket_spans import gpu as bucket_spans_gpu
from sparseattn.kernels.listed_scores import gpu as listed_scores_gpu
from sparseattn.kernels.page_bounds import gpu as page_bounds_gpu
from sparseattn.kernels.page_directions import dispatch as page_directions
from sparseattn.kernels.page_directions import gpu as page_directions_gpu
from sparseattn.kernels.product_codes import gpu as product_codes_gpu
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu
from sparseattn.kernels.quantized_keys import gpu_listed
from sparseattn.kernels.topk import gpu as topk_gpu

B, H, G, D = 2, 1, 2, 16
ALL = ("exact", "quest", "bridge-few", "saap")  # at unlimited budget too


def test_every_device_selector_is_covered() -> None:
    covered = {type(case.make()) for case in ON_DEVICE}
    others = {"flat", "hnsw", "ivf", "retrieval", "robustvamana"}  # on the host
    others |= {"infinigen", "freekv"}  # on traces alone; waits to learn which heads choose anew
    others |= {"vattention", "cam", "d2o", "elasticcache", "kvmerger", "pillar"}  # in no fixed storage
    assert {name for name, kind in SELECTORS.items() if kind not in covered} == others


def step(case: Case, prefill: int = 150, budget: Budget = 40, seal: int = 64, fixed: bool = False):
    """A cache and a step of it, recorded as a CUDA device would run it: inputs, cache, recording, query and output."""
    queries, keys, values = attention(B, H, G, 260, D)
    cache = KVCache(case.make(), sink=4, window=8, seal=seal, capacity=400, fixed=fixed, check=False)
    cache.append(keys[:, :, :prefill], values[:, :, :prefill], queries[:, :, :, :prefill])
    query = queries[:, :, :, prefill - 1].clone()
    cache.seal()
    allowed = cache.prepare(query, budget)
    cache.search.choose(query, allowed)  # as before a capture: what is looked up once is here
    recording = Recording()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementations, "choose", lambda impl, _, __, names, *___: impl or _kernel(names))
        patch.setattr(dispatch, "_torch_only", lambda *_: False)
        patch.setattr(dispatch, "_check_bounds", lambda *_: None)  # which reads numbers of the host's
        patch.setattr(attend_gpu, "attend", recording.opaque(attend_gpu.attend))
        for module, name in (
            (page_bounds_gpu, "scores"),
            (topk_gpu, "best_pages"),
            (topk_gpu, "best_rows"),
            (product_codes_gpu, "best_rows"),
            (bucket_spans_gpu, "spans"),
            (listed_scores_gpu, "scores"),
            *((product_codes_gpu, launch) for launch in ("nearest", "voted", "voted_beside", "logits")),
        ):
            patch.setattr(module, name, recording.opaque(getattr(module, name)))
        # Interpreted, lowbit's kernels take a minute here; tests/kernels/test_quantized_keys_gpu.py has them.
        for module, name, same in (
            (quantized_keys_gpu, "scores", quantized_keys.scores),
            (quantized_keys_gpu, "listed_logits", quantized_keys.listed_logits),
            (gpu_listed, "listed_logits", quantized_keys.listed_logits),
        ):
            patch.setattr(module, name, recording.opaque(functools.partial(same, impl="torch")))
        same = functools.partial(page_directions.scores, impl="torch")  # its kernel: test_page_directions_gpu.py
        patch.setattr(page_directions_gpu, "scores", recording.opaque(same))
        with recording:
            chosen = cache.search.choose(query, allowed)
            out = attend_chosen(query, cache, chosen, impl="triton")
    return (queries, keys, values), cache, recording, query, out


def _kernel(names: tuple[str, ...]) -> str:
    return "triton" if "triton" in names else "torch"


# QueryBridge at its defaults is fixed at 2,048 lists of 256 keys, all of which a replay writes again.
@by_name([case for case in ON_DEVICE if case.name != "bridge"], few=True)
def test_a_step_never_waits_and_follows_the_rows_that_come(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded once, replayed as tokens are appended until the next seal: what eager steps of the same cache give."""
    break_ties(monkeypatch)
    (queries, keys, values), cache, recording, query, out = step(case)
    sealed = cache.sealed
    for t in (150, 170):
        part = slice(t, t + 20)
        cache.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
        query.copy_(queries[:, :, :, t + 19])
        twin = cache.clone()  # which has not observed this step yet
        recording.replay()
        with pytest.MonkeyPatch.context() as patch:  # keys of few bits are scored as in the recording
            choose_without_numba(patch)
            expected = decode(query, twin, 40, impl="reference")
        assert torch.equal(twin.sealed, sealed), "a seal lies between the recording and the replay"
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "budget"),
    [
        *(pytest.param(case, 40, marks=[pytest.mark.slow] * (case.name not in FEW)) for case in ON_DEVICE),
        *(pytest.param(case, None, marks=pytest.mark.slow) for case in ON_DEVICE if case.name in ALL),
    ],
    ids=lambda given: getattr(given, "name", str(given)),
)
def test_in_fixed_storage_a_step_follows_seals_and_another_batch(
    case: Case, budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded once, replayed as tokens are appended and sealed and after a reset: what an ordinary cache gives."""
    break_ties(monkeypatch)
    (queries, keys, values), cache, recording, query, out = step(case, budget=budget, seal=32, fixed=True)
    for shift in (0, 1):
        plain = KVCache(case.make(), sink=4, window=8, seal=32)
        if shift:
            queries, keys, values = (x.flip(0) * 1.25 for x in (queries, keys, values))
            cache.reset()
        seals, end = set(), 150 if not shift else 0
        if end:
            plain.append(keys[:, :, :end], values[:, :, :end], queries[:, :, :, :end])
            plain.seal()  # of the same prompt, its newest row included
            decode(queries[:, :, :, end - 1], plain, budget)  # as when it was recorded: some learn from a step
        for t in (110, 153, 225, 259) if shift else (153, 160, 189, 259):
            part = slice(end, t + 1)
            for one in (cache, plain):
                one.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
                one.seal()
            end = t + 1
            query.copy_(queries[:, :, :, t])
            recording.replay()
            with pytest.MonkeyPatch.context() as patch:  # ties of a vote fall as in the recording, which has torch's
                choose_without_numba(patch)
                expected = decode(query, plain, budget)
            assert torch.equal(cache.sealed, plain.sealed)
            seals.add(int(cache.sealed[0]))
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert len(seals) > 2, "rows are sealed between the replays"


@pytest.mark.parametrize("name", ["exact-group", "quest-each", "lowbit-page", "sparq-mean"])
def test_a_step_by_mass_never_waits_and_follows_seals(name: str) -> None:
    """As above: what is cut to the mass is data, and where it lies is not."""
    case = next(case for case in ON_DEVICE if case.name == name)
    budget = Mass(0.7, 48)
    (queries, keys, values), cache, recording, query, out = step(case, budget=budget, seal=32, fixed=True)
    plain = KVCache(case.make(), sink=4, window=8, seal=32)
    plain.append(keys[:, :, :150], values[:, :, :150], queries[:, :, :, :150])
    plain.seal()
    end, kept = 150, set()
    for t in (153, 189, 259):
        part = slice(end, t + 1)
        for one in (cache, plain):
            one.append(keys[:, :, part], values[:, :, part], queries[:, :, :, part])
            one.seal()
        end = t + 1
        query.copy_(queries[:, :, :, t])
        recording.replay()
        with pytest.MonkeyPatch.context() as patch:
            choose_without_numba(patch)
            expected = decode(query, plain, budget)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert plain.search.latest is not None
        kept.add(tuple(plain.search.latest.attended.flatten().tolist()))
    assert len(kept) == 3, "other numbers of rows at every step"


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
