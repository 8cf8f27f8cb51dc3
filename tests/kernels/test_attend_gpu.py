"""The Triton kernel against the specification in float64, on a GPU or, without one, under Triton's interpreter."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import dispatch, gather
from sparseattn.kernels.attend import reference as attend_reference

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels import triton_ahead  # noqa: E402
from sparseattn.kernels.attend import gpu as attend_gpu  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
fp16, fp32, bf16 = torch.float16, torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Case:
    size: int = 64  # D
    group: int = 4  # G
    span: int = 16
    dtype: torch.dtype = fp32
    per_query_head: bool = False
    stored: int = 403  # N
    sink: int = 0
    slots: int = 6
    batch: int = 2
    heads: int = 2
    bias: bool = False

    def __str__(self) -> str:
        per = "query" if self.per_query_head else "kv"
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"D{self.size}-G{self.group}-span{self.span}-{name}-{per}-N{self.stored}-sink{self.sink}-S{self.slots}"
            + ("-bias" if self.bias else "")
        )


# Every value of each column at least once, not the product: D, G, span, dtype, heads, odd sizes, sinks, slots.
CASES = [
    Case(32, 1, 1, fp32, False, 403, 1, 37),
    Case(64, 3, 16, fp16, False, 403, 4, 6),
    Case(80, 4, 64, fp32, False, 403, 0, 3, heads=1),
    Case(96, 5, 1, fp16, True, 63, 4, 13),
    Case(128, 8, 16, fp16, False, 403, 1, 9),
    Case(128, 4, 64, fp32, True, 403, 4, 2, heads=1),
    Case(256, 16, 16, fp32, False, 63, 0, 2, heads=1),
    Case(256, 3, 1, fp16, False, 403, 1, 50, heads=1),
    Case(1, 1, 1, fp32, False, 63, 0, 5),
    Case(17, 17, 2, fp16, False, 63, 1, 5, heads=1),  # more query heads than one tile of tl.dot holds, odd D
    Case(64, 4, 16, fp32, False, 1, 0, 0),  # one row, nothing selected
    Case(64, 4, 1, fp16, True, 403, 4, 0, heads=1),  # the zones alone
    Case(64, 4, 16, fp32, False, 403, 4, 9, heads=1, bias=True),
    Case(96, 3, 4, fp16, True, 403, 1, 37, bias=True),
    Case(64, 2, 64, fp32, False, 403, 4, 3, bias=True),  # spans of a whole tile
]

LONG = {3, 5, 13}  # seconds each, interpreted; what they alone hold is in the slow run


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    keys: Tensor
    values: Tensor
    selection: Selection
    bounds: Bounds
    scale: float

    def run(self, module: object, **options: int | None) -> tuple[Tensor, Tensor]:
        args = self.query, self.keys, self.values, self.selection, self.bounds, self.scale
        return module.attend(*args, **options)  # type: ignore[attr-defined]


def ints(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def make(case: Case) -> Inputs:
    """Ragged sequences and spans; every row that nobody names is NaN.

    The spans are the same rows for all sequences, so in the shorter ones they reach past the sealed zone.
    """
    batch, heads, group, size = case.batch, case.heads, case.group, case.size
    ends = [max(1, case.stored * (batch - b) // batch) for b in range(batch)]
    sealeds = [min(end, max(case.sink, end - 23)) for end in ends]
    bounds = Bounds(ints([min(case.sink, end) for end in ends]), case.sink, ints(sealeds), ints(ends))

    chosen = heads * group if case.per_query_head else heads
    pages = math.ceil((sealeds[0] - case.sink) / case.span)
    page = torch.stack([torch.randperm(max(pages, case.slots))[: case.slots] for _ in range(batch * chosen)])
    page = page.view(batch, chosen, case.slots)
    length = torch.randint(0, case.span + 1, page.shape)
    length[..., ::3] = case.span
    unused = (length == 0) | (page >= pages)
    start = torch.where(unused, 1_234_567, page * case.span)  # the start of an unused slot means nothing
    length = torch.where(unused, 0, length)
    bias = torch.where(unused, torch.nan, 3 * torch.randn(page.shape)).to(DEVICE) if case.bias else None
    selection = Selection(start.int().to(DEVICE), length.int().to(DEVICE), case.span, bias=bias)

    named = attend_reference.named(selection, bounds, heads, case.stored).any(2)[..., None]  # [B,H,N,1]

    def rows() -> Tensor:
        return torch.randn(batch, heads, case.stored, size, device=DEVICE).masked_fill(~named, torch.nan).to(case.dtype)

    query = torch.randn(batch, heads, group, size, device=DEVICE).to(case.dtype)
    return Inputs(query, rows(), rows(), selection, bounds, 1.3 / math.sqrt(size))


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within it `torch.empty` gives NaN: whatever a kernel forgets to write shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> Tensor:
        return empty(*args, **kwargs).fill_(torch.nan)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


@dataclass(frozen=True)
class Truth:
    """The specification in float64 and how far float32 arithmetic may lie from it.

    With u = 2^-24, M = scale * max over rows of sum_d |q_d k_d|, R rows, and w the unit roundoff of the inputs' dtype:

    - a logit is wrong by at most E = (D + 6) u M: D for the dot product in any order, 2 for the scale and its
      product, 2 for subtracting the peak (a difference is at most 2M), 2 for moving the peak from tile to tile; with a
      bias M is larger by its magnitude;
    - the sum of weights by a relative (2R + 64) u more: R additions, 4u for each exp2, 5u for each of at most
      R/16 + 8 tiles and splits (a shrink factor and its product);
    - lse adds its logarithm and its two last operations: 4u + 4u |lse|;
    - out is a quotient of two such sums, so twice all of that relative to A = sum of weight * |value|, plus w A for
      rounding weights to the values' dtype, w A for rounding the result, and half the least positive number of the
      dtype times R max|value| where a weight underflows.

    Errors of several roundings multiply; 1 % covers the products. That bound is rigorous but far from sharp in float32,
    so the largest error is also compared with the largest error of the specification run in the inputs' dtype.
    """

    out: Tensor
    lse: Tensor
    out_bound: Tensor
    lse_bound: Tensor
    eager_bound: float

    @classmethod
    def of(cls, x: Inputs) -> Truth:
        wide = replace(x, query=x.query.double(), keys=x.keys.double(), values=x.values.double())
        out, lse = wide.run(attend_reference)
        heads, stored, size = x.keys.shape[1:]
        named = attend_reference.named(x.selection, x.bounds, heads, stored)  # [B,H,Hs/H,N]
        unread = ~named.any(2)[..., None]
        keys, values = wide.keys.masked_fill(unread, 0), wide.values.masked_fill(unread, 0)
        most = (wide.query.abs() @ keys.abs().mT).masked_fill(~named, 0).amax(-1) * x.scale  # M [B,H,G]
        logits = wide.query @ keys.mT * x.scale
        if x.selection.bias is not None:
            bias = torch.zeros(*x.selection.start.shape[:2], stored, device=DEVICE)
            bias[..., x.bounds.base :] = x.selection.row_bias(stored - x.bounds.base)
            recent = torch.arange(stored, device=DEVICE) >= x.bounds.sealed[:, None]
            logits = logits + bias.masked_fill(recent[:, None], 0).unflatten(1, (heads, -1))
            most = most + x.selection.bias.nan_to_num().abs().max()
        weight = (logits - lse[..., None]).exp().masked_fill(~named | lse.isinf()[..., None], 0)
        spread = weight @ values.abs()  # A [B,H,G,D]
        u, w = 2.0**-24, torch.finfo(x.query.dtype).eps / 2
        read = named.sum(-1).expand(lse.shape)  # R [B,H,G]
        error = (size + 6) * u * most + (2 * read + 64) * u
        underflow = torch.finfo(x.query.dtype).tiny * w * read * values.abs().amax()
        out_bound = 1.01 * ((2 * error + 2 * w)[..., None] * spread + underflow[..., None])
        lse_bound = 1.01 * (error + 4 * u + 4 * u * lse.abs().masked_fill(lse.isinf(), 0))
        eager = (x.run(attend_reference)[0].double() - out).abs().max().item()
        return cls(out, lse, out_bound, lse_bound, 4 * eager + 2 * w * spread.max().item())

    def check(self, out: Tensor, lse: Tensor) -> None:
        assert lse.dtype == fp32
        assert torch.equal(lse.isinf(), self.lse.isinf())
        off = (out.double() - self.out).abs()
        assert (off <= self.out_bound).all(), f"largest error {(off / self.out_bound).max():.3g} times its bound"
        off_lse = (lse.double() - self.lse).abs().masked_fill(lse.isinf(), 0)
        assert (off_lse <= self.lse_bound).all(), f"lse wrong by {(off_lse / self.lse_bound).max():.3g} times its bound"
        assert off.max() <= self.eager_bound


def check_kernel(x: Inputs, splits: tuple[int | None, ...] = (1,)) -> None:
    truth = Truth.of(x)
    for number in splits:
        with poisoned_empty():
            out, lse = x.run(attend_gpu, splits=number)
        assert out.dtype == x.query.dtype
        assert out.shape == x.query.shape
        truth.check(out, lse)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (at in LONG)) for at, case in enumerate(CASES)], ids=str
)
def test_kernel_gather_and_reference_are_the_specification(case: Case) -> None:
    """In one part and, by turns of the cases, in 2 or 7; programs under the interpreter take their time."""
    x = make(case)
    truth = Truth.of(x)
    truth.check(*x.run(attend_reference))
    truth.check(*x.run(gather))
    check_kernel(x, (1, 7 if CASES.index(case) % 2 else 2))


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 12))])
def test_any_zones_and_spans(seed: int) -> None:
    """Zones and spans drawn at random, empty ones and sequences without rows among them."""
    torch.manual_seed(seed)
    batch, heads, group, stored, span, slots = 3, 1, 2, 70, 8, 5
    base = int(torch.randint(0, 6, ()))
    sink = torch.randint(0, base + 1, (batch,))
    sealed = base + torch.randint(0, stored - base + 1, (batch,))
    rows = sealed + (torch.rand(batch) * (stored - sealed + 1)).long()
    bounds = Bounds(sink.int().to(DEVICE), base, sealed.int().to(DEVICE), rows.int().to(DEVICE))
    start = torch.stack([torch.randperm(9)[:slots] for _ in range(batch)]).view(batch, heads, slots) * span
    length = torch.randint(0, span + 1, start.shape)
    selection = Selection(start.int().to(DEVICE), length.int().to(DEVICE), span)
    named = attend_reference.named(selection, bounds, heads, stored).any(2)[..., None]
    keys, values = torch.randn(2, batch, heads, stored, 16, device=DEVICE).masked_fill(~named, torch.nan)
    query = torch.randn(batch, heads, group, 16, device=DEVICE)
    check_kernel(Inputs(query, keys, values, selection, bounds, 0.25), (1, 3))


def test_sequence_without_rows_gives_zero_and_minus_infinity() -> None:
    x = make(Case(64, 4, 16, fp32, slots=3, heads=1))
    bounds = Bounds(ints([0, 0]), 0, ints([380, 0]), ints([403, 0]))
    keys, values = (rows.nan_to_num() for rows in (x.keys, x.values))
    keys[1], values[1] = torch.nan, torch.nan
    x = replace(x, keys=keys, values=values, bounds=bounds)
    for splits in (1, 2):
        with poisoned_empty():
            out, lse = x.run(attend_gpu, splits=splits)
        assert (out[1] == 0).all()
        assert (lse[1] == -torch.inf).all()
    check_kernel(x, (1, 2))


@pytest.mark.parametrize(("stored", "slots"), [(11, 1), (403, 380)])
def test_more_splits_than_the_merge_takes_at_once(stored: int, slots: int) -> None:
    """Of 20 splits 19 have no work, but write their partials, or all have."""
    check_kernel(make(Case(128, 1, 1, fp32, stored=stored, slots=slots, heads=1, batch=1)), (20,))


def test_cache_views_of_any_strides() -> None:
    x = make(Case(80, 3, 16, fp16))
    batch, heads, stored, size = x.keys.shape
    both = torch.full((batch, stored + 5, heads, 2, size + 16), torch.nan, dtype=fp16, device=DEVICE)
    both[:, 2:-3, :, 0, :size], both[:, 2:-3, :, 1, :size] = x.keys.transpose(1, 2), x.values.transpose(1, 2)
    keys, values = both[:, 2:-3, :, :, :size].permute(3, 0, 2, 1, 4)
    query = x.query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not any(view.is_contiguous() for view in (query, keys, values))
    check_kernel(replace(x, query=query, keys=keys, values=values), (1, 2))
    check_kernel(replace(x, values=values))


def test_selection_shared_by_expansion() -> None:
    x = make(Case(64, 2, 16, fp32))
    start, length = (part[:, :1].expand(-1, 2, -1) for part in (x.selection.start, x.selection.length))
    keys, values = x.keys.nan_to_num(), x.values.nan_to_num()
    check_kernel(replace(x, keys=keys, values=values, selection=Selection(start, length, 16)))


def test_rows_with_gaps_between_their_elements_are_refused() -> None:
    x = make(Case(64, 1))
    keys = x.keys.mT.contiguous().mT
    with pytest.raises(ValueError, match="last stride of keys and values must be 1, got 403 and 1"):
        replace(x, keys=keys).run(attend_gpu)


def test_weights_far_apart_and_large_logits() -> None:
    """Logits of several hundred, growing and then shrinking along the rows, neither overflow nor lose the peak."""
    x = make(Case(64, 4, 16, fp32, slots=20, heads=1, batch=1))
    ramp = torch.linspace(-3, 3, 403, device=DEVICE).abs()[:, None]
    check_kernel(replace(x, query=5 * x.query, keys=x.keys * ramp, scale=1.0), (1, 7, 20))


def test_splits_fill_the_multiprocessors_in_one_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    gpu = torch.device("cuda", 0)
    tile = attend_gpu.Tile(64, 4, 5, resident=2, waves=1)
    assert attend_gpu._splits(8, 100_000, 0, tile, gpu) == 33  # 8 * 33 = 2 * 132
    assert attend_gpu._splits(100, 100_000, 0, tile, gpu) == 2  # rounded down
    assert attend_gpu._splits(1000, 100_000, 0, tile, gpu) == 1
    assert attend_gpu._splits(8, 1000, 0, tile, gpu) == 16  # no more than tiles
    assert attend_gpu._splits(1, 100_000, 0, tile, gpu) == attend_gpu.MOST_SPLITS


def test_more_programs_than_run_at_once_where_lists_are_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    gpu, tile = torch.device("cuda", 0), attend_gpu.Tile(64, 4, 5, resident=2, waves=4)
    assert attend_gpu._splits(256, 100_000, 2048, tile, gpu) == 4  # 4 * 264 / 256
    assert attend_gpu._splits(64, 100_000, 2048, tile, gpu) == 8  # of 4 tiles each, though 16 would make four waves
    assert attend_gpu._splits(256, 100_000, 128, tile, gpu) == 1  # 2 tiles are too few to divide
    assert attend_gpu._splits(8, 100_000, 2048, tile, gpu) == 33  # the device is filled first


@pytest.mark.parametrize("used", [0, 1, 5, 255, 256, 257, 600])
def test_work_is_divided_by_the_slots_used(used: int) -> None:
    """A list with room for 600 slots: however few it uses, the rows of any two of its splits differ by at most a tile.

    Rows read are told by the partial sums of weights: with equal keys, exp(lse - logit) counts them.
    """
    slots, splits, rows = 600, 4, attend_gpu.tile_of(4, 16).rows
    length = torch.zeros(1, 1, slots, dtype=torch.int32, device=DEVICE)
    seen: list[Tensor] = []
    length[..., :used] = 1
    start = torch.arange(slots, dtype=torch.int32, device=DEVICE).view(1, 1, -1)
    query, keys = torch.zeros(1, 1, 1, 16, device=DEVICE), torch.zeros(1, 1, slots + 9, 16, device=DEVICE)
    bounds = Bounds(ints([3]), 4, ints([604]), ints([609]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_gpu, "merge_splits", Watched(attend_gpu.merge_splits, seen))
        attend_gpu.attend(query, keys, keys, Selection(start, length, 1), bounds, 1.0, splits=splits)
    read = seen[0].exp().flatten().round().long().tolist()
    assert sum(read) == used + 3 + 5
    tiles = [math.ceil(number / rows) for number in read]
    assert max(tiles) - min(tiles) <= 1


@dataclass
class Watched:
    """The merge kernel, of which each launch keeps the partial lse that it is given."""

    kernel: Any
    seen: list[Tensor]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(parts: Tensor, part_lse: Tensor, *args: Any, **options: Any) -> None:
            self.seen.append(part_lse.clone())
            self.kernel[grid](parts, part_lse, *args, **options)

        return launch


def test_tuned_cuts_otherwise_and_computes_the_same() -> None:
    x, held = make(Case(64, 4, 16, fp32, slots=20, heads=1, batch=1)), dict(attend_gpu.TILES)
    with attend_gpu.tuned(attend_gpu.Tile(16, 1, 2)):
        assert attend_gpu.tile_of(4, 64) == attend_gpu.Tile(16, 1, 2)
        check_kernel(x, (1, 3))
    assert held == attend_gpu.TILES


def test_public_attend_runs_the_kernel() -> None:
    x = make(Case(32, 2, 1, fp32, stored=63, slots=9))
    x = replace(x, scale=1 / math.sqrt(32))
    out, lse = dispatch.attend(x.query, x.keys, x.values, x.selection, x.bounds, impl="triton")
    Truth.of(x).check(out, lse)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel multiplies bfloat16 correctly")
def test_bfloat16_is_refused_under_the_interpreter() -> None:
    x = make(Case(32, 1, dtype=bf16))
    with pytest.raises(RuntimeError, match="wrong bfloat16 products"):
        dispatch.attend(x.query, x.keys, x.values, x.selection, x.bounds, impl="triton")


@pytest.mark.skipif(not INTERPRETED, reason="only an interpreting process cannot compile")
def test_compiling_ahead_is_refused_under_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        triton_ahead.compile_ahead(fp16, 128, 16, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_in_bfloat16(case: Case) -> None:
    check_kernel(make(replace(case, dtype=bf16)), (None, 1, 2, 7))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [fp32, fp16, bf16], ids=str)
@pytest.mark.parametrize(("span", "slots"), [(1, 4096), (16, 256), (64, 64)])
@pytest.mark.parametrize("per_query_head", [False, True])
def test_kernel_at_full_size(dtype: torch.dtype, span: int, slots: int, per_query_head: bool) -> None:
    check_kernel(make(Case(128, 4, span, dtype, per_query_head, 40_000, 4, slots, heads=4)), (None,))


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements() -> None:
    """Row addresses are 64-bit: with 8.6 GB of float16 keys and values a 32-bit offset would wrap."""
    stored = 2**31 // 128 + 4096
    keys = torch.zeros(1, 1, stored, 128, dtype=fp16, device=DEVICE)
    values = torch.zeros_like(keys)
    keys[:, :, -64:], values[:, :, -64:] = torch.randn(2, 1, 1, 64, 128, device=DEVICE).half()
    query = torch.randn(1, 1, 4, 128, device=DEVICE).half()
    near = Bounds.of(1, 64, sealed=0, device=DEVICE)
    selection = Selection.none(1, 1, DEVICE)
    far = Bounds.of(1, stored, sealed=stored - 64, device=DEVICE)
    expected = attend_gpu.attend(query, keys[:, :, -64:], values[:, :, -64:], selection, near, 0.1)
    for got, want in zip(attend_gpu.attend(query, keys, values, selection, far, 0.1), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_cuda_graph_follows_growing_bounds_and_new_selections() -> None:
    x = make(Case(128, 4, 16, bf16, False, 4096, 4, 32))
    keys, values = torch.randn(2, *x.keys.shape, device=DEVICE, dtype=bf16)
    x = replace(x, keys=keys, values=values)
    x.run(attend_gpu)  # compiles, which a capture must not do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = x.run(attend_gpu)
    ends = x.bounds.rows.clone()
    for step in range(3):
        x.bounds.rows.copy_(ends - 40 + 13 * step)
        x.bounds.sealed.copy_(ends - 300 + 100 * step)
        x.selection.start.copy_(x.selection.start.roll(1, -1))
        x.selection.length.copy_(x.selection.length.roll(1, -1))
        graph.replay()
        Truth.of(x).check(out, lse)
