"""Steps and layers of the CUDA backend on tables and caches as an engine has them; needs no vLLM, and no GPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparseattn import Bounds, KVCache, LowBit, Quest, Selection, Window, decode
from sparseattn.kernels import implementations
from sparseattn.selectors.base import Selector
from sparseattn.serving.vllm import cuda_layer
from sparseattn.serving.vllm.cuda_layer import SparseCUDALayer
from sparseattn.serving.vllm.cuda_rows import finished
from sparseattn.serving.vllm.cuda_step import Eager, FixedBuffers, decoding
from sparseattn.serving.vllm.page_tables import PageZones

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels.attend import gpu as attend_gpu

BLOCK, SINK, WINDOW, ABOVE = 32, 5, 9, 60
H, G, D = 2, 3, 16


@dataclass
class Metadata:
    """Of vLLM's, what steps read."""

    seq_lens: Tensor
    query_start_loc: Tensor
    block_table: Tensor


@dataclass
class Batch:
    """Requests whose rows lie in blocks of a cache in any order, each with `new` tokens in this step."""

    rows: list[int]
    new: list[int]
    prefilling: list[bool]

    def __post_init__(self) -> None:
        blocks = 50
        self.table = torch.randperm(blocks - 1)[: len(self.rows) * 8].view(len(self.rows), 8).int() + 1  # 0 is null
        # As vLLM's `LBNHC`: rows outermost in a block, keys and values of a head beside each other.
        self.cache = torch.full((blocks, BLOCK, H, 2 * D), torch.nan).transpose(1, 2)
        self.keys, self.values = self.cache.split(D, dim=-1)
        self.query = torch.randn(sum(self.new), H, G, D)
        slots = []
        for i, (n, new) in enumerate(zip(self.rows, self.new, strict=True)):
            at = torch.arange(n)
            place = self.table[i, at // BLOCK].long() * BLOCK + at % BLOCK
            self.cache[place // BLOCK, :, place % BLOCK] = torch.randn(n, H, 2 * D)
            slots.append(place[n - new :])
        starts = torch.tensor([0, *self.new]).cumsum(0).int()
        rows = torch.tensor(self.rows).int()
        self.metadata = Metadata(rows, starts, self.table)
        self.common = SimpleNamespace(
            query_start_loc_cpu=starts,
            seq_lens_cpu_upper_bound=rows,
            num_reqs=len(rows),
            num_actual_tokens=sum(self.new),
            is_prefilling=torch.tensor(self.prefilling),
            slot_mapping=torch.cat(slots),
        )

    def all_slots(self) -> Tensor:
        held = torch.arange(max(self.rows))
        place = self.table[:, held // BLOCK].long() * BLOCK + held % BLOCK
        return place[held < torch.tensor(self.rows)[:, None]]

    def rows_of(self, i: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[1,H,n,D]`."""
        held = self.cache[self.table[i].long()].transpose(0, 1).flatten(1, 2)[None, :, : self.rows[i]]
        return held[..., :D].contiguous(), held[..., D:].contiguous()


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is named, selectors score by Triton."""
    choose = implementations.choose

    def on_a_gpu(
        impl: str | None, device: torch.device, dtype: torch.dtype, names: tuple[str, ...], fallback: str = "torch"
    ) -> str:
        here = impl is None and "triton" in names and fallback == "torch"
        return choose("triton" if here else impl, device, dtype, names, fallback)

    monkeypatch.setattr(implementations, "choose", on_a_gpu)


def zones_of(selector: Selector) -> PageZones:
    page, unit = (1, 1) if isinstance(selector, Window) else (selector.page, selector.unit)
    return PageZones(page, unit, BLOCK, SINK, WINDOW)


@pytest.mark.parametrize(
    "selector",
    [
        Quest(16),
        pytest.param(Quest(8, group="each"), marks=pytest.mark.slow),
        pytest.param(Quest(16, group="softmax"), marks=pytest.mark.slow),
        pytest.param(LowBit(2, rows=32, page=16), marks=pytest.mark.slow),
        Window(),
    ],
    ids=repr,
)
def test_both_ways_read_what_a_cache_of_each_request_alone_reads(selector: Selector) -> None:
    """One token each, so that both ways serve the batch; the second is short and the fourth in its prompt."""
    batch = Batch([200, 50, 131, 90, 61], [1] * 5, [False, False, False, True, False])
    zones, indexed, budget = zones_of(selector), not isinstance(selector, Window), 32
    layer = SparseCUDALayer(selector, BLOCK, budget // zones.page if indexed else 0)
    places = finished(batch.all_slots(), zones.unit, 100) if indexed else None
    layer.fit(batch.keys)
    layer.update(batch.keys, places)
    steps = {"eager": Eager(zones, indexed).step(batch.common, batch.metadata, decoding(batch.common, ABOVE))}
    fixed = FixedBuffers(zones, 6, 8 * BLOCK, torch.device("cpu"), indexed)
    again, steps["fixed"] = fixed.fill(batch.common, batch.metadata, decoding(batch.common, ABOVE))
    if again is not None:
        before = {name: held.clone() for name, held in layer.store.entries.items()}
        layer.update(batch.keys, again)  # every request's last entry, finished or not
        whole = torch.unique(places[places > 0])  # 0 fills up
        assert all(torch.equal(before[name][whole], held[whole]) for name, held in layer.store.entries.items())
    long = [0, 2, 4]
    for step in steps.values():
        query = batch.query if step.queries is None else batch.query[step.queries]
        out = layer.attend(query, batch.keys, batch.values, step, D**-0.5)
        lines = long if step.queries is None else range(3)
        for i, line in zip(long, lines, strict=True):
            cache = KVCache(
                type(selector)(**arguments(selector)), sink=zones.first * zones.unit, window=WINDOW, seal=zones.unit
            )
            cache.append(*batch.rows_of(i))
            expected = decode(batch.query[i][None], cache, budget, impl="reference")
            torch.testing.assert_close(out[line], expected[0], rtol=1e-4, atol=1e-5)
        rest = step.others.seq_lens.tolist()
        assert rest == [1, 50, 1, 90, 1]
        if step.queries is None:
            assert step.sparse.tolist() == [True, False, True, False, True]
            assert not out[[1, 3]].any()  # they name no row at all


def arguments(selector: Selector) -> dict[str, object]:
    names = {Quest: ("page", "group"), LowBit: ("bits", "rows", "page", "group"), Window: ()}
    return {name: getattr(selector, name) for name in names[type(selector)]}


def test_a_mixed_batch_gathers_the_rows_of_its_decoding_requests() -> None:
    """A prompt's part between them, a request with two tokens, and one that is all there is of the others."""
    batch = Batch([200, 120, 131, 90], [1, 40, 1, 2], [False, True, False, False])
    step = Eager(zones_of(Quest(16))).step(batch.common, batch.metadata, decoding(batch.common, ABOVE))
    assert step.queries.tolist() == [0, 41]
    assert step.others.seq_lens.tolist() == [1, 120, 1, 90]
    assert torch.equal(step.blocks, batch.table[[0, 2]])
    assert step.bounds.rows.tolist() == [200, 131]


def test_without_others_vllm_has_nothing_to_do_and_without_sparse_ones_we_have_not() -> None:
    eager = Eager(zones_of(Quest(16)))
    batch = Batch([200, 120], [1, 1], [False, False])
    assert eager.step(batch.common, batch.metadata, decoding(batch.common, ABOVE)).others is None
    batch = Batch([60, 120], [1, 1], [False, True])
    assert eager.step(batch.common, batch.metadata, decoding(batch.common, ABOVE)) is None


def test_steps_of_a_fixed_shape_keep_their_tensors() -> None:
    fixed = FixedBuffers(zones_of(Quest(16)), 4, 8 * BLOCK, torch.device("cpu"))
    seen = []
    for rows in ([200, 61, 20], [33, 256, 70]):
        batch = Batch(rows, [1] * 3, [False] * 3)
        places, step = fixed.fill(batch.common, batch.metadata, decoding(batch.common, ABOVE))
        held = [
            places,
            step.sparse,
            step.table,
            step.others.seq_lens,
            step.bounds.rows,
            step.bounds.sealed,
            step.bounds.sink,
        ]
        seen.append([(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in held])
    assert seen[0] == seen[1]


class NothingAsked(TorchDispatchMode):
    """Fails where the host would wait for a device: a number taken from a tensor, a shape that depends on data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "repeat_interleave"), name
        if name in ("index", "index_put_", "_index_put_impl_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("selector", [Quest(16), Quest(16, group="softmax"), Window()], ids=repr)
def test_a_step_of_fixed_shape_never_waits(selector: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a graph records, and what fills its tensors. `attend` looks at its inputs on the CPU alone."""
    batch, indexed = Batch([200, 50, 131], [1] * 3, [False] * 3), not isinstance(selector, Window)
    layer = SparseCUDALayer(selector, BLOCK, 2)
    layer.fit(batch.keys)
    fixed = FixedBuffers(zones_of(selector), 4, 8 * BLOCK, torch.device("cpu"), indexed)
    sparse = decoding(batch.common, ABOVE)

    def unchecked(query: Tensor, keys: Tensor, values: Tensor, selection: Selection, bounds: Bounds, **how: Any) -> Any:
        return attend_gpu.attend(query, keys, values, selection, bounds, how["scale"], how["block_table"])

    monkeypatch.setattr(cuda_layer, "attend", unchecked)
    with NothingAsked():
        places, step = fixed.fill(batch.common, batch.metadata, sparse)
        layer.update(batch.keys, places)
        out = layer.attend(batch.query, batch.keys, batch.values, step, 1.0)
    assert out[[0, 2]].isfinite().all()
    with pytest.raises(AssertionError, match="nonzero"), NothingAsked():
        Eager(zones_of(selector), indexed).step(batch.common, batch.metadata, sparse)


@pytest.mark.parametrize("unit", [1, 8, 32])
def test_finished_entries_are_those_whose_last_row_is_new(unit: int) -> None:
    batch = Batch([200, 120, 131, 90], [1, 41, 130, 3], [False, True, True, False])
    slots = torch.cat([batch.common.slot_mapping, torch.tensor([-1, -1])])  # as vLLM pads
    expected = set()
    for i, (n, new) in enumerate(zip(batch.rows, batch.new, strict=True)):
        ends = [row for row in range(n - new, n) if row % unit == unit - 1]
        expected |= {(int(batch.table[i, row // BLOCK]) * BLOCK + row % BLOCK) // unit for row in ends}
    found = Eager(PageZones(unit, unit, BLOCK, SINK, WINDOW)).places(batch.common).tolist()
    assert sorted(found) == sorted(expected)
    more = finished(slots, unit, len(expected) + 2).tolist()
    assert sorted(more) == sorted([*expected, 0, 0])


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="of blocks of 32 rows, got a cache with blocks of 16"):
        SparseCUDALayer(Quest(16), 32, 2).fit(torch.zeros(3, 1, 16, 8))


def test_requests_that_pad_a_batch_are_not_sparse() -> None:
    """vLLM's older runner says so of each, the newer leaves them out of `is_prefilling`."""
    batch = Batch([200, 120], [1, 1], [False, True])
    common = batch.common
    common.query_start_loc_cpu = torch.tensor([0, 1, 2, 2, 2])
    common.seq_lens_cpu_upper_bound = torch.tensor([200, 120, 300, 0])  # in the older what was there before
    for prefilling in ([False, True], [False, True, False, False]):
        common.is_prefilling = torch.tensor(prefilling)
        assert decoding(common, ABOVE).tolist() == [True, False, False, False]


def test_more_requests_than_lines_are_refused() -> None:
    batch = Batch([200, 120], [1, 1], [False, False])
    fixed = FixedBuffers(zones_of(Quest(16)), 1, 8 * BLOCK, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"at most 1 requests \(max_num_seqs\), got 2"):
        fixed.fill(batch.common, batch.metadata, decoding(batch.common, ABOVE))


def test_metadata_that_does_not_say_who_is_in_the_prompt_is_refused() -> None:
    batch = Batch([200], [1], [False])
    batch.common.is_prefilling = None
    with pytest.raises(RuntimeError, match="needs vLLM's is_prefilling"):
        decoding(batch.common, ABOVE)
