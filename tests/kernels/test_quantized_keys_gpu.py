"""The Triton kernels of `lowbit` against the torch specification, on a GPU or else under Triton's interpreter.

What they compile to is in tests/kernels/test_compile.py, with that of the other kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sparseattn import KVCache, LowBit, decode
from sparseattn.kernels.encode_keys.dispatch import extremes, packed_codes
from sparseattn.kernels.encode_keys.levels import levels_of_8_bits, levels_of_16_bits
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import level_grid, packing
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from tests.cache.recorded import choose_without_numba
from tests.cases import heads

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)
from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
fp16, fp32, bf16 = torch.float16, torch.float32, torch.bfloat16


@pytest.fixture(params=[1, packing.TILE], ids="tile{}".format)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Codes ordered as on a GPU, then as in host memory, which the kernels read too."""
    monkeypatch.setattr(packing, "tile", lambda device: request.param)
    return request.param


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes ordered as on a GPU, wherever they lie."""
    monkeypatch.setattr(packing, "tile", lambda device: 1)


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype
    size: int  # D
    group: int  # G
    bits: int
    rows: int  # of a group
    page: int
    vote: str
    groups: int = 2
    scales: int = 16

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}-D{self.size}-G{self.group}-{self.bits}bit-rows{self.rows}-page{self.page}-{self.vote}" + (
            "-scales8" if self.scales == 8 else ""
        )


# Every value of each column at least once: head sizes whose bytes are no power of two, few bytes, groups of one part
# and of several, pages within a part and of several, more groups than a program takes.
CASES = [
    Case(fp32, 64, 4, 2, 64, 1, "softmax"),
    Case(fp16, 128, 3, 2, 64, 1, "softmax", 5),
    Case(fp16, 80, 3, 2, 32, 4, "each"),
    Case(fp16, 64, 9, 1, 64, 1, "sum"),
    Case(fp32, 96, 2, 4, 16, 16, "max"),
    Case(fp16, 96, 1, 1, 48, 16, "softmax", 1),
    Case(fp16, 256, 4, 4, 128, 128, "softmax"),
    Case(fp32, 80, 17, 1, 32, 32, "sum", 1),
    Case(fp16, 72, 3, 2, 64, 1, "softmax", 2, 8),
]


@dataclass(frozen=True)
class Inputs:
    query: Tensor
    keys: QuantizedKeys


def make(case: Case, batch: int = 2, kv: int = 1, factor: float = 1.0) -> Inputs:
    """In storage with spare groups. What is not real has levels that are NaN; a second sequence has a group less."""
    stored, spare = case.groups * case.rows, case.rows
    keys = torch.randn(batch, kv, stored + spare, case.size, device=DEVICE) * factor
    levels = "bins" if case.bits > 1 else "means"
    kind = case.dtype if case.dtype != fp32 else bf16
    keys, grid = keys.to(case.dtype), None
    if case.scales == 16:
        low, step = levels_of_16_bits(*extremes(keys, case.rows, levels, "torch"), case.bits, levels, kind)
    else:
        low, step, grid = levels_of_8_bits(*extremes(keys, case.rows, levels, "torch"), case.bits, levels, None)
    packed = packed_codes(keys, low, step, case.bits, grid, "torch")
    real = torch.ones(batch, stored + spare, dtype=torch.bool, device=DEVICE)
    real[:, stored:] = False
    real[1:, : case.rows] = False
    unread = ~real[:, None, :: case.rows, None].expand_as(low)
    anything = torch.nan if grid is None else 99
    low, step = low.masked_fill(unread, anything), step.masked_fill(unread, anything)
    query = torch.randn(batch, kv, case.group, case.size, device=DEVICE).to(case.dtype)
    return Inputs(query, QuantizedKeys(packed, low, step, case.bits, real, grid))


def slack(x: Inputs) -> float:
    """How far a logit may lie from the specification's: every number of the query times a step is rounded once more to
    the query's dtype, and sums of D products of 1.5 times the size in float32."""
    size = x.query.shape[-1]
    unit = torch.finfo(x.query.dtype).eps / 2 + (size + 16) * 2.0**-24
    low, step = (level.nan_to_num().abs() for level in level_grid.read(x.keys.low, x.keys.step, x.keys.grid))
    largest = low + ((1 << x.keys.bits) - 1) * step
    return float((x.query.float().abs() @ largest.mT).amax()) / size**0.5 * unit


def check(case: Case, x: Inputs) -> None:
    got = quantized_keys.scores(x.query, x.keys, case.vote, case.page, impl="triton")
    expected = quantized_keys.scores(x.query, x.keys, case.vote, case.page, impl="torch")
    assert got.dtype == fp32
    assert torch.equal(got.isneginf(), expected.isneginf())
    held = ~expected.isneginf()
    assert held.any()
    far = slack(x) * (case.group if case.vote == "sum" else 2) + 1e-5
    assert float((got - expected)[held].abs().max()) <= far


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_are_the_specification(case: Case, on_gpu: None) -> None:
    check(case, make(case, kv=16 // case.scales))


@pytest.mark.parametrize(
    ("dtype", "size", "bits", "rows", "page", "vote"),
    [
        (fp32, 64, 1, 64, 16, "softmax"),
        (fp16, 80, 2, 32, 4, "each"),
        (fp16, 64, 4, 48, 16, "sum"),
        (fp32, 40, 2, 32, 32, "max"),
    ],
)
def test_pages_in_a_store_score_as_a_sequences_own(
    dtype: torch.dtype, size: int, bits: int, rows: int, page: int, vote: str, on_gpu: None
) -> None:
    """Entries in any order, used by two sequences, one of them shorter; a page may be of more rows than a product."""
    x = make(Case(dtype, size, 3, bits, rows, page, vote, 4), 1, 2)
    keys = replace(x.keys, low=x.keys.low.nan_to_num(), step=x.keys.step.nan_to_num())
    store = QuantizedKeys(*(part[0].transpose(0, 1) for part in (keys.codes, keys.low, keys.step)), bits)
    table = torch.tensor([[3, 0, 2], [1, -1, 3]], dtype=torch.int32, device=DEVICE)
    query = torch.randn(2, 2, 3, size, device=DEVICE).to(dtype)
    got = quantized_keys.scores_at(query, store, table, vote, page, "triton")
    expected = quantized_keys.scores_at(query, store, table, vote, page, "torch")
    assert got.shape == expected.shape == (2, 6 if vote == "each" else 2, 3 * rows // page)
    assert torch.equal(got.isneginf(), expected.isneginf())
    assert expected.isneginf().any()
    held = ~expected.isneginf()
    far = slack(Inputs(query, keys)) * (3 if vote == "sum" else 2) + 1e-5
    assert float((got - expected)[held].abs().max()) <= far
    none = table[:, :0]
    assert quantized_keys.scores_at(query, store, none, vote, page, "triton").shape[2] == 0


def test_both_orders_of_codes_are_read(tile: int) -> None:
    case = Case(fp32, 40, 2, 4, 32, 1, "each", 1)
    x = make(case, 1)
    assert packing.unpack(x.keys.codes, 4, 40).shape == (1, 1, 64, 40)
    check(case, x)


@pytest.mark.parametrize("factor", [1e-3, 3e3])
def test_a_query_times_a_step_fits_float16(factor: float, on_gpu: None) -> None:
    """Keys of thousandths, and queries and keys whose products float16 does not hold."""
    case = Case(fp16, 64, 1, 2, 64, 1, "each", 1)
    x = make(case, 1, factor=factor)
    x.query.mul_(max(factor, 1.0))
    check(case, x)


@pytest.mark.parametrize("lists", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "size", "bits", "rows", "page", "scales"),
    [(fp32, 64, 2, 64, 16, 16), (fp16, 80, 1, 32, 8, 16), (fp16, 128, 4, 16, 64, 16), (fp32, 40, 2, 32, 8, 8)],
)
def test_rows_of_listed_pages_score_as_among_all(
    dtype: torch.dtype, size: int, bits: int, rows: int, page: int, scales: int, lists: int, on_gpu: None
) -> None:
    """Pages within a group and of several; among them places without one, padding, and pages past the rows."""
    x = make(Case(dtype, size, 3, bits, rows, 1, "each", 128 // rows, scales))
    stored = x.keys.mask.shape[1]
    pages = torch.stack([torch.randperm(stored // page + 2, device=DEVICE)[:3] - 1 for _ in range(2 * lists)])
    pages = pages.view(2, lists, 3)
    row = (pages[..., None] * page + torch.arange(page, device=DEVICE)).flatten(2)  # [B,Hs,n]
    row = row.repeat_interleave(3 // lists, 1)[:, None]  # [B,1,G,n]
    outside = (row < 0) | (row >= stored)
    every = quantized_keys.logits(x.query, x.keys, impl="torch")
    expected = every.gather(3, row.clamp(0, stored - 1)).masked_fill(outside, -torch.inf)
    for impl in ("torch", "triton"):
        got = quantized_keys.listed_logits(x.query, x.keys, pages, page, impl=impl)
        assert torch.equal(got.isneginf(), expected.isneginf()), impl
        held = ~expected.isneginf()
        assert float((got - expected)[held].abs().max()) <= slack(x) + 1e-6, impl


def test_nothing_stored_and_nothing_listed() -> None:
    x = make(Case(fp32, 64, 2, 2, 16, 1, "each", 1))
    parts = (part[:, :, :0] for part in (x.keys.codes, x.keys.low, x.keys.step))
    none = QuantizedKeys(*parts, 2, x.keys.mask[:, :0])
    unlisted = torch.zeros(2, 1, 0, dtype=torch.long, device=DEVICE)
    for impl in ("torch", "triton"):
        assert quantized_keys.listed_logits(x.query, x.keys, unlisted, 4, impl).shape == (2, 1, 2, 0)
    assert quantized_keys_gpu.scores(x.query, none, "each", 1).shape == (2, 2, 0)
    assert quantized_keys_gpu.scores(x.query, none, "softmax", 1).shape == (2, 1, 0)


def test_what_the_kernels_cannot_read_is_refused() -> None:
    x = make(Case(fp32, 64, 2, 2, 16, 1, "each", 1))
    low = x.keys.low
    with pytest.raises(
        ValueError, match=r"levels of one 16-bit dtype, got torch.uint8, torch.float32 and torch.bfloat16"
    ):
        quantized_keys_gpu.scores(x.query, replace(x.keys, low=low.float()), "each", 1)
    with pytest.raises(ValueError, match=r"adjacent elements, got last strides \(1, 2, 1\)"):
        quantized_keys_gpu.scores(x.query, replace(x.keys, low=low.repeat_interleave(2, -1)[..., ::2]), "each", 1)
    with pytest.raises(ValueError, match=r"agree in B, H and N/rows, got .*\[2, 1, 1, 64\]"):
        quantized_keys_gpu.scores(x.query, replace(x.keys, low=low[:, :, 1:]), "each", 1)
    with pytest.raises(ValueError, match="impl is one of torch"):
        quantized_keys.scores(x.query, x.keys, "each", impl="gather")


def test_codes_are_reordered_as_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a device with T = 16 and one with T = 1: what `pack` gives there, spare groups included."""
    codes = torch.randint(0, 4, (2, 3, 96, 80), dtype=torch.uint8)
    host = packing.pack(codes, 32, 2)
    sides = iter([packing.TILE, 1])
    monkeypatch.setattr(packing, "tile", lambda device: next(sides))
    there = packing.repack(host, 2, 80, host.device)
    monkeypatch.setattr(packing, "tile", lambda device: 1)
    assert torch.equal(there, packing.pack(codes, 32, 2))
    assert not torch.equal(there, host)
    assert torch.equal(packing.unpack(there, 2, 80), codes)
    sides = iter([1, packing.TILE])
    monkeypatch.setattr(packing, "tile", lambda device: next(sides))
    assert torch.equal(packing.repack(there, 2, 80, host.device), host)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_selector_that_moves_takes_its_codes_along(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the meta device, which has a GPU's order and no numbers: what is put there is looked at on the way."""
    queries, keys, values = heads(2, 1, 2, 160, 32)
    cache = KVCache(LowBit(rows=16), sink=4, window=8, seal=32, capacity=200 if fixed else 0, fixed=fixed)
    cache.append(keys, values)
    decode(queries[:, :, :, -1], cache, 40)
    selector = cache.selector
    seen: list[Tensor] = []
    real = packing.repack

    def moved(packed: Tensor, bits: int, size: int, device: torch.device) -> Tensor:
        sides = iter([packing.TILE, 1])
        with monkeypatch.context() as patch:
            patch.setattr(packing, "tile", lambda _: next(sides))
            seen.append(real(packed, bits, size, packed.device))
        return seen[-1].to(device)

    monkeypatch.setattr(packing, "repack", moved)
    held = selector.codes.full.clone()
    selector.to("cpu")
    assert not seen, "the order is the same"
    selector.to("meta")
    assert selector.codes.full.is_meta
    assert selector.codes.full.shape == held.shape
    groups = selector.codes.rows
    expected = packing.unpack(held[:, :, :groups], 2, 32)
    monkeypatch.setattr(packing, "tile", lambda device: 1)
    assert torch.equal(packing.unpack(seen[0][:, :, :groups], 2, 32), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_in_bfloat16(case: Case) -> None:
    case = Case(bf16, *(getattr(case, name) for name in list(Case.__dataclass_fields__)[1:]))
    check(case, make(case, kv=3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [fp32, fp16, bf16], ids=str)
@pytest.mark.parametrize("vote", ["softmax", "each", "sum", "max"])
def test_scores_at_full_size(dtype: torch.dtype, vote: str) -> None:
    case = Case(dtype, 128, 4, 2, 64, 1, vote, 600)
    check(case, make(case, kv=8))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_an_index_moved_to_the_gpu_and_back_chooses_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_without_numba(monkeypatch)  # which rounds the query to 8 bits
    queries, keys, values = heads(2, 2, 4, 500, 64)
    cache = KVCache(LowBit(bits, rows=32), sink=4, window=8)
    cache.append(keys, values)
    query = queries[:, :, :, -1]
    cache.seal()
    expected = decode(query, cache, 48)
    cache.to("cuda")
    torch.testing.assert_close(decode(query.cuda(), cache, 48).cpu(), expected, rtol=1e-3, atol=1e-3)
    cache.to("cpu")
    torch.testing.assert_close(decode(query, cache, 48), expected)
