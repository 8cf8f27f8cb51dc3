"""numba's code for keys of a few bits against the specification in torch, on what instructions there are."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparseattn import KVCache, LowBit
from sparseattn.kernels.encode_keys.dispatch import encode, extremes, packed_codes
from sparseattn.kernels.encode_keys.levels import levels_of_8_bits
from sparseattn.kernels.group_vote.dispatch import vote
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import level_grid, packing, reference
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows
from sparseattn.selectors.base import GROUPS, Rows

pytest.importorskip("numba")
from sparseattn.kernels.quantized_keys import cpu_products, cpu_rows, cpu_vote

fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
LEVELS = {1: "means", 2: "bins", 4: "bins"}
# bits, G, groups, rows of one, D, dtype of queries and keys, bits of levels if not 16: odd numbers of tiles, more than
# four query heads, channels that fill no register and no word
SHAPES = [
    (2, 4, 5, 64, 128, bf16),
    (2, 7, 3, 48, 80, fp16),
    (1, 3, 2, 16, 40, fp32),
    (1, 1, 4, 32, 256, bf16),
    (4, 5, 3, 16, 40, bf16),
    (4, 2, 2, 64, 64, fp32),
    (2, 1, 1, 16, 1, fp32),
    (2, 5, 3, 48, 72, bf16, 8),
]
# Kernels are compiled for each dtype of levels: those of float16 in the slow run.
BY_SHAPE = pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.slow] * (fp16 in shape)) for shape in SHAPES]
)


class Index:
    """Two sequences of two KV heads, in storage with spare places that hold anything; one row in five is not real."""

    def __init__(self, bits: int, group: int, groups: int, rows: int, size: int, dtype: torch.dtype, scales: int = 16):
        self.bits, self.rows, self.dtype = bits, rows, dtype
        self.query = torch.randn(2, 2, group, size).to(dtype)
        self.keys = (torch.randn(2, 2, groups * rows, size) * torch.rand(size).exp() + torch.randn(size)).to(dtype)
        kind = fp16 if dtype == fp16 else bf16
        self.found = encode(self.keys, rows, bits, LEVELS[bits], kind, impl="torch")
        if scales == 8:
            low, step, grid = levels_of_8_bits(*extremes(self.keys, rows, LEVELS[bits]), bits, LEVELS[bits], None)
            codes = packed_codes(self.keys, low, step, bits, grid, "torch")
            self.found = QuantizedKeys(codes, low, step, bits, grid=grid)
        self.real = torch.rand(2, groups * rows) < 0.8
        self.real[1, : 2 * rows // 3] = False

    @property
    def inputs(self) -> tuple[Tensor, QuantizedKeys]:
        found = self.found
        parts = (spare(x, torch.nan if x.is_floating_point() else 99) for x in (found.codes, found.low, found.step))
        return self.query, QuantizedKeys(*parts, self.bits, spare(self.real, True, 1), found.grid)

    @property
    def bound(self) -> Tensor:
        """`[B,H,G,N]`: how far rounding the query to 8 bits may move a logit."""
        found, size = self.found, self.query.shape[-1]
        step = level_grid.read(found.low, found.step, found.grid)[1]
        largest = (self.query.float()[:, :, :, None] * step[:, :, None]).abs().amax(-1)  # [B,H,G,N/rows]
        return (largest * ((1 << self.bits) - 1) * size**0.5 / 508).repeat_interleave(self.rows, -1)


def spare(x: Tensor, filling: float, dim: int = 2) -> Tensor:
    shape = list(x.shape)
    shape[dim] += 3
    wide = x.new_full(shape, filling)
    wide.narrow(dim, 0, x.shape[dim]).copy_(x)
    return wide.narrow(dim, 0, x.shape[dim])


def off(got: Tensor, expected: Tensor) -> Tensor:
    """How far `got` is, the places of -inf being the same."""
    assert got.dtype == expected.dtype
    assert torch.equal(got.isneginf(), expected.isneginf())
    return (got - expected).masked_fill(expected.isneginf(), 0).abs()


@BY_SHAPE
def test_logits_are_the_specifications_within_the_bound(shape: tuple) -> None:
    index = Index(*shape)
    expected = quantized_keys.logits(*index.inputs, impl="torch")
    found = quantized_keys.logits(*index.inputs, impl="numba")
    assert found.shape == expected.shape
    slack = 1e-5 * expected.masked_fill(expected.isinf(), 0).abs().max() + 1e-5
    assert (off(found, expected) <= index.bound + slack).all()
    assert off(found, expected).max() < 0.5 * index.bound.max() + slack  # which it comes near in no random case


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("bits", "size"), [(1, 520), (2, 264), (4, 72)])
def test_sums_of_the_largest_products_do_not_overflow(bits: int, size: int, sign: int) -> None:
    """All codes the largest, all of the query 127 times as large as what it is rounded to. Where sums have 16 bits,
    they are cut before the last words."""
    rows = 64
    keys = torch.full((1, 1, rows, size), 100.0, dtype=bf16)
    low, step = torch.zeros(1, 1, 1, size, dtype=bf16), torch.ones(1, 1, 1, size, dtype=bf16)
    found = QuantizedKeys(packed_codes(keys, low, step, bits), low, step, bits, torch.ones(1, rows, dtype=torch.bool))
    query = torch.full((1, 1, 4, size), 127.0 * sign, dtype=bf16)
    logits = quantized_keys.logits(query, found, impl="numba")
    expected = torch.full_like(logits, sign * 127.0 * size**0.5 * ((1 << bits) - 1))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_the_error_of_logits_has_the_bound_that_scales_say(size: int, bits: int, impl: str) -> None:
    """Half a step in each channel; numba's code rounds the query to 8 bits besides. Keys with a drift, an outlier
    channel and one huge number; a query that asks for one channel above all."""
    rows, n = 64, 256
    keys = torch.randn(2, 3, n, size) + torch.linspace(-5, 5, n)[:, None]
    keys[..., 3] *= 50
    keys[:, :, 70, 5] = 1000.0
    query = torch.randn(2, 3, 4, size)
    query[..., 7] = 100.0
    index = replace(encode(keys, rows, bits, "bins", torch.bfloat16), valid=torch.ones(2, n, dtype=torch.bool))
    exact = query @ keys.mT / size**0.5
    error = (quantized_keys.logits(query, index, impl) - exact).abs()
    stretch = query.abs()[:, :, :, None] * index.step.float()[:, :, None]  # [B,H,G,n/rows,D]
    bound = stretch.sum(-1) / (2 * size**0.5)
    if impl == "numba":
        bound = bound + ((1 << bits) - 1) * size**0.5 / 508 * stretch.amax(-1)
    assert (error <= bound.repeat_interleave(rows, -1) * (1 + 1e-5)).all()
    assert error.max() > 0.01 * bound.max()


@BY_SHAPE
def test_nothing_is_lost_where_the_query_needs_no_rounding(shape: tuple) -> None:
    """Steps of 1 and a query of whole numbers to 127: integers through and through, but for the base."""
    index = Index(*shape)
    index.query = torch.randint(-127, 128, index.query.shape).to(index.dtype)
    index.query[..., 0] = 127
    found, grid = index.found, index.found.grid
    if grid is not None:
        grid = torch.tensor([0.0, 0.1, 1.0])[:, None].expand_as(grid)
    low = found.low.float().round().to(found.low.dtype)
    index.found = replace(found, low=low, step=torch.ones_like(found.step), grid=grid)
    expected = quantized_keys.logits(*index.inputs, impl="torch")
    found = quantized_keys.logits(*index.inputs, impl="numba")
    assert off(found, expected).max() <= 2e-6 * index.query.shape[-1] ** 0.5 * 2000


# The choice is compiled for each dtype of queries: in the fast run for that of which the laws are.
@pytest.mark.parametrize("dtype", [fp32, pytest.param(bf16, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("page", [1, 2, 16, 32])
@pytest.mark.parametrize("group", GROUPS)
def test_scores_are_the_vote_on_the_masses_of_pages(
    group: str, page: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(2, 3, 7, 32, 64, dtype, 8 if page == 2 else 16)
    logits = quantized_keys.logits(*index.inputs, impl="numba")
    masses = logits.unflatten(-1, (-1, page)).logsumexp(-1)
    expected = vote(masses, group, "torch")
    for rows, threads in ((32, 1), (96, 2), (96, 3), (2048, 4)):  # of a part; 4 lists are shared by 3 threads
        monkeypatch.setattr(cpu_rows, "PART_ROWS", rows)
        for module in (cpu_rows, cpu_vote):
            monkeypatch.setattr(module, "use_threads", lambda work, alone, threads=threads: threads)
        found = quantized_keys.scores(*index.inputs, group, page, impl="numba")
        # Where a product is half way between two integers, one in ten thousand, the logarithm's factor rounds it off.
        assert off(found, expected).max() < 0.02
        assert off(found, expected).mean() < 5e-4
        # In one kernel, or of scores:
        best = quantized_keys.best(*index.inputs, group, 5, page, "numba").long()
        assert torch.equal(found.gather(2, best).sort(-1).values, found.topk(5).values.sort(-1).values)
    index.real[:] = False
    assert bool(quantized_keys.scores(*index.inputs, group, page, impl="numba").isneginf().all())
    assert bool((quantized_keys.best(*index.inputs, group, 5, page, "numba") == -1).all())
    for impl in ("torch", "numba"):
        keys = index.inputs[1]
        none = (part[:, :, :0] for part in (keys.codes, keys.low, keys.step))
        keys = QuantizedKeys(*none, keys.bits, index.real[:, :0])
        assert quantized_keys.best(index.query, keys, group, 5, page, impl).shape[2] == 0


@pytest.mark.parametrize("page", [1, 4, 16, 32, 128])
@pytest.mark.parametrize("each", [False, True])
def test_listed_pages_have_the_logits_of_their_rows(page: int, each: bool) -> None:
    index = Index(2, 6, 8, 48, 72, bf16, 8 if page == 4 else 16)
    every = quantized_keys.logits(*index.inputs, impl="numba")  # [B,H,G,N]
    many = every.shape[-1] // page
    pages = torch.stack([torch.randperm(many + 1)[:9] for _ in range(2 * 2 * (6 if each else 1))])
    pages = pages.view(2, -1, pages.shape[-1])  # page `many` is behind all rows, or its end is
    pages[:, :, 1] = -1
    found = quantized_keys.listed_logits(*index.inputs, pages, page, impl="numba")
    expected = quantized_keys.listed_logits(*index.inputs, pages, page, impl="torch")
    assert (off(found, expected) <= index.bound.max()).all()
    rows = (pages[..., None] * page + torch.arange(page)).flatten(2)
    rows = rows.unflatten(1, (2, -1)).expand(2, 2, 6, -1)
    there = (rows >= 0) & (rows < every.shape[-1])
    held = every.gather(3, torch.where(there, rows, 0)).masked_fill(~there, -torch.inf)
    assert torch.equal(found, held)


# The store of a serving engine: three sequences of 2 KV heads and 9 query heads over 40 entries, one of them short.
@pytest.mark.parametrize("dtype", [fp32, pytest.param(fp16, marks=pytest.mark.slow), bf16], ids=str)
@pytest.mark.parametrize(("rows", "page"), [(64, 1), (64, 4), (64, 16), (64, 64), (48, 16), (32, 32)])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_pages_in_a_store_have_the_specifications_masses(bits: int, rows: int, page: int, dtype: torch.dtype) -> None:
    """Each mass within the bound of its rows' logits, whether the groups fill the last part of a thread or not."""
    query, store, table = in_a_store(bits, rows, dtype)
    for entries in (1, 24, 2048 // rows + 1):  # the last: a part and one group more
        listed = table.repeat(1, -(-entries // table.shape[1]))[:, :entries]
        expected = quantized_keys.scores_at(query, store, listed, "each", page, "torch")
        found = quantized_keys.scores_at(query, store, listed, "each", page, "numba")
        assert found.shape == (3, 18, entries * rows // page)
        bound = bound_in_a_store(query, store)
        assert (off(found, expected) <= bound).all()
        for group in ("softmax", "sum", "max"):
            votes = [quantized_keys.scores_at(query, store, listed, group, page, impl) for impl in ("torch", "numba")]
            assert off(*votes).max() <= float(bound.max()) * (9 if group == "sum" else 2)


def bound_in_a_store(query: Tensor, store: QuantizedKeys) -> Tensor:
    """`[B,H*G,1]`: how far rounding the query may move a mass."""
    largest = (query.float().abs()[:, :, :, None] * store.step.float().abs().amax(0)[:, None, None]).amax(-1)
    return largest.flatten(1, 2) * ((1 << store.bits) - 1) * 64**0.5 / 508 + 1e-4


def in_a_store(bits: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, QuantizedKeys, Tensor]:
    """A query `[3,2,9,64]`, codes and levels of 40 entries, of which each sequence has some, and the table."""
    keys = torch.randn(1, 2, 40 * rows, 64).to(dtype)
    made = encode(keys, rows, bits, LEVELS[bits], fp16 if dtype == fp16 else bf16, impl="torch")
    table = torch.stack([torch.randperm(40)[:24] for _ in range(3)]).int()
    table[1, 7:] = -1
    table[2, 3] = -1
    parts = (part[0].transpose(0, 1) for part in (made.codes, made.low, made.step))
    return torch.randn(3, 2, 9, 64).to(dtype), QuantizedKeys(*parts, bits), table


@pytest.mark.parametrize("far", [0.0, 3e4])
def test_masses_of_pages_far_apart_are_kept(far: float) -> None:
    """Sums of exponentials that float32 does not hold, of pages whose logits lie thousands apart."""
    rows = 16
    keys = torch.randn(1, 1, 8 * rows, 64) + torch.tensor([0.0, far, -far, 1.0] * 2).repeat_interleave(rows)[:, None]
    index = encode(keys, rows, 2, "bins", bf16, impl="torch")
    query, valid = (
        torch.full((1, 1, 1, 64), 127.0),
        torch.ones(1, 8 * rows, dtype=torch.bool),
    )  # rounded, it is the same
    index = replace(index, step=torch.ones_like(index.step), valid=valid)
    expected, found = (quantized_keys.scores(query, index, "each", 16, impl) for impl in ("torch", "numba"))
    assert expected.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("group", GROUPS)
def test_no_logits_of_rows_leave_the_kernel(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch makes while pages are scored has as many numbers as there are pages and not as there are rows; nor is
    there a mask over the store."""
    query, store, table = in_a_store(1, 64, bf16)
    selector = LowBit(1, page=16, group=group)
    parts = store.codes, store.low, store.step
    made = dict(zip(selector.entry_names, parts, strict=True))
    cache = KVCache(LowBit(1, page=16, group=group), sink=0, window=0, seal=64)
    cache.append(*torch.randn(2, 1, 2, 24 * 64, 64).bfloat16())
    cache.seal()
    mine = cache.selector
    assert isinstance(mine, LowBit)
    entries = {name: getattr(mine, name).visible for name in mine.entry_names}
    valid = cache.search.step().valid

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            out = function(*given, **(named or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in held:
                    self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.element_size())
            return out

    asked = (query, *parts, table, *entries.values(), valid)
    held = {x.untyped_storage().data_ptr() for x in asked}
    for module in (quantized_keys, reference):
        monkeypatch.setattr(module, "logits", None)
        monkeypatch.setattr(module, "listed_logits", None)
    pages = 24 * 4
    for batch, call in (
        (3, lambda: selector.scores_at(query, made, table)),
        (1, lambda: mine.scores(query[:1], entries, valid)),
        (1, lambda: mine.page_logits(query[:1], entries, valid)),
    ):
        with Largest() as seen:
            call()
        assert 0 < seen.numbers <= max(batch * 18 * -(-pages // 128) * 128, query.numel()) < batch * 18 * 24 * 64


@pytest.mark.parametrize("selector", [LowBit(rows=32, page=16), LowBit(4, rows=48, page=16, group="each")], ids=repr)
def test_entries_in_a_store_have_the_scores_of_a_sequences_own(selector: LowBit) -> None:
    """A store that sequences share, as a serving engine's: no row of it is left out because of what lies in memory."""
    query, keys = torch.randn(3, 2, 5, 64), torch.randn(1, 2, 40 * selector.unit, 64)
    made = selector.entries(keys)
    store = {name: part[0].transpose(0, 1).contiguous() for name, part in made.items()}
    table = torch.stack([torch.randperm(40)[:24] for _ in range(3)]).int()
    table[1, 7:] = -1
    found = selector.scores_at(query, store, table)
    assert (found.isneginf() == (table < 0).repeat_interleave(selector.unit // selector.page, 1)[:, None]).all()
    for one in range(3):
        own = {name: part[table[one][table[one] >= 0].long()].transpose(0, 1)[None] for name, part in store.items()}
        rows = int((table[one] >= 0).sum()) * selector.unit
        expected = selector.scores(query[one : one + 1], own, torch.ones(1, rows, dtype=torch.bool))
        torch.testing.assert_close(found[one : one + 1, :, : expected.shape[2]], expected, rtol=1e-3, atol=1e-3)


@BY_SHAPE
def test_keys_are_coded_as_the_specification_codes_them(shape: tuple) -> None:
    index = Index(*shape)
    keys, rows, bits = index.keys, index.rows, index.bits
    keys[:, :, :rows, :2] = 0.3  # a channel of one number
    kind = fp16 if index.dtype == fp16 else bf16
    for levels in ("bins", "ends", LEVELS[bits]):
        expected = encode(keys, rows, bits, levels, kind, impl="torch")
        found = encode(spare(keys, torch.nan), rows, bits, levels, kind, impl="numba")
        pairs = [(getattr(found, name), getattr(expected, name)) for name in ("codes", "low", "step")]
        if levels != "means":
            assert all(torch.equal(a, b) for a, b in pairs)
            continue
        for a, b in pairs[1:]:  # sums in another order: the next number of 16 bits
            torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-4)
        codes = [packing.unpack(part, bits, keys.shape[-1]) for part in pairs[0]]
        assert (codes[0] != codes[1]).float().mean() < 0.01


@pytest.mark.parametrize("bits", [2, 4])
def test_levels_of_8_bits_keep_the_bound_and_make_room_for_larger_keys(bits: int) -> None:
    """Half a step, as they are read; where the grid has grown at most `(last + 1) pace / 4 + unit / 2` more, and little
    of a step; the choice of the grown index is numba's as torch's."""
    selector = LowBit(bits, 32, scales=8)
    parts = [torch.randn(2, 3, 96, 40) * torch.rand(40).exp() + torch.randn(40) for _ in range(2)]
    parts[1][..., ::2] *= 10
    before = None
    for times, keys in enumerate(parts, 1):
        selector.append(Rows(keys, keys, torch.arange(96).expand(2, -1)))
        grid, levels = selector.grid.data.clone(), (selector.low.data, selector.step.data)
        step = level_grid.read(*levels, grid)[1]
        index = QuantizedKeys(selector.codes.data, *levels, bits, torch.ones(2, 96 * times, dtype=torch.bool), grid)
        away = index.decoded() - torch.cat(parts[:times], 2)
        away = away.abs().unflatten(2, (-1, 32)).amax(3) - step / 2
        if before is not None:
            grew = (grid != before).any(2, keepdim=True)  # [B,H,1,D]
            assert grew[..., ::2].all()
            assert not grew.all()
            _, unit, pace = grid[:, :, :, None].unbind(2)
            away[:, :, :3] -= ((1 << bits) * pace / 4 + unit / 2) * grew
        assert away.max() <= 1e-5
        before = grid
    query, budget = torch.randn(2, 3, 4, 40), 20
    first, second = (quantized_keys.scores(query, index, "each", impl=impl) for impl in ("torch", "numba"))
    assert (first - second).abs().max() < 0.1 * first.std()
    read = selector.scan(query, 192, budget).read
    assert read == 192 * 4 * packing.words(40, bits) + 6 * 2 * 40 + 12 * 40


def test_scales_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="scales is 8 or 16 bits of a level, got 4"):
        LowBit(scales=4)


@pytest.mark.parametrize(
    ("total", "count"), [(4000, 100), (4000, 300), (1000, 7), (32, 2), (17, 3), (5, 9), (403, 403), (1, 1)]
)
def test_best_rows_are_the_highest(total: int, count: int) -> None:
    """Scattered, in runs, with ties, far from zero, with few that may be chosen, and with none."""
    drawn = torch.randn(2, 3, total)
    few = drawn.masked_fill(torch.rand(2, 3, total) < 0.98, -torch.inf)
    none = drawn.new_full(drawn.shape, -torch.inf)
    for scores in (drawn, drawn.sort(-1).values, drawn.round(), drawn * 0, drawn - 60, drawn * 1e-30, few, none):
        for impl in ("torch", "numba"):
            ids = best_rows(scores, count, impl)
            assert ids.dtype == torch.int32
            assert ids.shape == (2, 3, min(count, total))
            named = torch.zeros(2, 3, total + 1, dtype=torch.int32)
            named.scatter_add_(2, torch.where(ids < 0, total, ids).long(), torch.ones_like(ids))
            assert named[..., :total].max() <= 1
            held = scores.masked_fill(named[..., :total] == 0, -torch.inf).sort(-1, descending=True).values
            assert torch.equal(held[..., : ids.shape[2]], scores.topk(ids.shape[2]).values)
    assert best_rows(drawn, 0, "numba").shape == (2, 3, 0)


def test_rounding_the_query_hardly_changes_the_choice() -> None:
    """Of the 256 best of 4,096 rows by keys of so many bits, at least 97 % are chosen by the rounded query too."""
    keys, query = torch.randn(1, 2, 4096, 128), torch.randn(1, 2, 4, 128)
    real = torch.ones(1, 4096, dtype=torch.bool)
    for bits in (1, 2, 4):
        index = replace(encode(keys, 64, bits, LEVELS[bits], bf16), valid=real)
        chosen = []
        for impl in ("torch", "numba"):
            ids = best_rows(quantized_keys.scores(query, index, "each", impl=impl), 256).long()
            chosen.append(torch.zeros(1, 8, 4096, dtype=torch.bool).scatter_(2, ids, True))
        assert (chosen[0] & chosen[1]).sum() >= 0.97 * chosen[0].sum()


def test_a_row_may_be_no_number() -> None:
    """A query or level that is NaN or infinite harms its own head, and nothing is read or written astray."""
    index = Index(2, 4, 3, 32, 64, fp32)
    expected = quantized_keys.scores(*index.inputs, "softmax", impl="numba")
    index.query[0, 0, 1, 3] = torch.nan
    found = quantized_keys.scores(*index.inputs, "softmax", impl="numba")
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0, 1], expected[0, 1])
    ids = best_rows(torch.full((1, 1, 100), torch.nan), 7, "numba")
    assert len(set(ids.flatten().tolist())) == 7
    assert 0 <= int(ids.min()) <= int(ids.max()) < 100


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    index = Index(2, 4, 130, 64, 64, bf16)
    before, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        scores = quantized_keys.scores(*index.inputs, "softmax", impl="numba")
        found.append((scores, best_rows(scores, 100, "numba")))
    torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_named_numba_runs_or_raises() -> None:
    index = Index(2, 4, 2, 32, 64, fp32)
    query, keys = index.inputs
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16, not float64"):
        quantized_keys.logits(query.double(), keys, impl="numba")
    with pytest.raises(ValueError, match="impl is one of torch, numba, triton or None, got 'fast'"):
        quantized_keys.scores(query, keys, "softmax", impl="fast")
    query.requires_grad_()
    best = quantized_keys.best(query, keys, "softmax", 3)
    assert torch.equal(
        best.sort().values, quantized_keys.best(query.detach(), keys, "softmax", 3, impl="torch").sort().values
    )
    quantized_keys.logits(query, keys).masked_fill(~keys.mask[:, None, None], 0).sum().backward()  # by torch
    assert bool((query.grad != 0).any())


def test_the_selector_seals_while_it_decodes() -> None:
    """Built in one go or row by row, its index is the same, and so is its choice."""
    keys, values = torch.randn(2, 1, 2, 300, 64)
    whole, grown = KVCache(LowBit(), sink=4, window=8, seal=64), KVCache(LowBit(), sink=4, window=8, seal=64)
    whole.append(keys, values)
    for row in range(300):
        grown.append(keys[:, :, row : row + 1], values[:, :, row : row + 1])
    query = torch.randn(1, 2, 4, 64)
    first, second = (cache.select(query, 50) for cache in (whole, grown))
    assert torch.equal(first.mask(300), second.mask(300))
    assert first.attended.tolist() == [[50, 50]]


@pytest.mark.slow
@pytest.mark.skipif("KERNEL_LOWBIT" in os.environ, reason="this is the inner run")
@pytest.mark.parametrize(
    ("name", "features", "expected"),
    [
        ("haswell", "+avx2,+avx,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt,+sse4.2", "avx2"),
        ("x86-64", "+sse2", "plain"),
    ],
)
def test_other_instructions_do_the_same(name: str, features: str, expected: str) -> None:
    """These tests once more, compiled for a processor without AVX-512, and for one without AVX2."""
    if cpu_products.instructions() not in ("vnni", "avx2"):
        pytest.skip("needs a processor with AVX2")
    flags = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "KERNEL_LOWBIT": expected}
    here = [*(f"{__file__}::{test}" for test in INNER), str(Path(__file__).with_name("test_likely_rows.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", *here],
        env=os.environ | flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif("KERNEL_LOWBIT" not in os.environ, reason="asked of the runs that `INNER` names")
def test_the_instructions_are_those_named() -> None:
    assert cpu_products.instructions() == os.environ["KERNEL_LOWBIT"]


INNER = (  # one of each kind, all of bfloat16: numba compiles for other dtypes anew
    "test_the_instructions_are_those_named",
    "test_logits_are_the_specifications_within_the_bound[shape0]",
    "test_logits_are_the_specifications_within_the_bound[shape3]",
    "test_logits_are_the_specifications_within_the_bound[shape4]",
    "test_sums_of_the_largest_products_do_not_overflow",
    "test_scores_are_the_vote_on_the_masses_of_pages[softmax-16-bf16]",
    "test_best_rows_are_the_highest[4000-100]",
)
