"""Attention over chosen pages of an engine's packed blocks, by torch and compiled, against plain rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from sparseattn.core.context import LayerContext
from sparseattn.kernels.attend_vllm_blocks import cpu_part
from sparseattn.kernels.attend_vllm_blocks.blocks import PACKINGS, BlockCache, BoundedPages, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks, attend_bounded, attend_rows, write_bounds
from sparseattn.kernels.page_bounds.bounds import PageBounds, VotedBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores_at
from sparseattn.selectors.pages.base import Entries, PageSelector
from sparseattn.selectors.pages.mean import Mean
from sparseattn.selectors.pages.quest import Quest
from sparseattn.serving.vllm.page_index import Store

H, G = 2, 3


def packed(keys: Tensor, values: Tensor, packing: str) -> BlockCache:
    """A cache `[blocks,H,block,2*D]` of plain rows `[blocks,H,block,D]`, written number by number."""
    count, heads, block, size = keys.shape
    cache = torch.full((count, heads, 2, block * size), torch.nan).to(keys.dtype)
    row, channel = (x.flatten() for x in torch.meshgrid(torch.arange(block), torch.arange(size), indexing="ij"))
    if packing == "columns":
        key, value = channel * block + row, row * size + channel
    else:
        key = (row // 16) * 16 * size + (channel // 2) * 32 + (row % 16) * 2 + channel % 2
        value = (channel // 16) * block * 16 + (row // 2) * 32 + (channel % 16) * 2 + row % 2
    whole, parts = cache, (keys, values)
    if keys.itemsize == 1:  # torch puts no 8-bit floats at places
        whole, parts = cache.view(torch.uint8), (keys.view(torch.uint8), values.view(torch.uint8))
    whole[:, :, 0, key], whole[:, :, 1, value] = (part.flatten(2) for part in parts)
    return BlockCache(cache.view(count, heads, block, 2 * size), packing)


def case(dtype: torch.dtype, size: int, block: int, page: int, unit: int) -> dict[str, Tensor]:
    torch.manual_seed(size + page)
    count = 24
    keys, values = torch.randn(2, count, H, block, size).to(dtype)
    places = torch.randperm(count * block // unit).int()
    table = places[: 2 * 8].view(2, 8).clone()
    table[1, 5:] = -1
    per = unit // page
    last = places[16:18] * per
    always = torch.stack([torch.tensor([last[0], -1, last[0] + per - 1]), torch.tensor([-1, last[1], -1])]).int()
    if per == 1:
        always[0, 0] = -1
    scores = torch.randn(2, H, 8 * per)
    scores[1, :, 5 * per :] = -torch.inf
    query = torch.randn(5, H * G, size).to(dtype)
    # What is behind a sequence's last row is another's, or nothing.
    tails = torch.tensor([page - 3, 5], dtype=torch.int32)
    for r, place in ((0, int(always[0, 2])), (1, int(always[1, 1]))):
        where = (
            place * page // block,
            slice(None),
            slice(place * page % block + int(tails[r]), place * page % block + page),
        )
        keys[where], values[where] = torch.nan, torch.nan
    return {
        "keys": keys, "values": values, "query": query, "table": table, "always": always, "tails": tails,
        "scores": scores, "tokens": torch.tensor([3, 1]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "packing", "tolerance"),
    [
        pytest.param(torch.float32, "columns", 1e-5, marks=pytest.mark.slow),
        pytest.param(torch.float16, "columns", 2e-3, marks=pytest.mark.slow),
        (torch.bfloat16, "columns", 1.6e-2),
        (torch.bfloat16, "pairs", 1.6e-2),
    ],
)
@pytest.mark.parametrize(
    ("size", "block", "page", "unit", "count"), [(64, 128, 16, 16, 3), (128, 64, 32, 64, 5), (80, 48, 16, 48, 99)]
)
def test_attention_over_pages_is_attention_over_their_rows(
    dtype: torch.dtype, packing: str, tolerance: float, size: int, block: int, page: int, unit: int, count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By torch, by matrix tiles where there are any, and by vectors."""
    made = case(dtype, size, block, page, unit)
    keys, values = made.pop("keys"), made.pop("values")
    cache = packed(keys, values, packing)
    outs = []
    for impl, tiles in (("torch", False), ("numba", True), ("numba", False)):
        if not tiles:
            monkeypatch.setattr(cpu_part, "tiles", lambda: False)
        out = torch.full_like(made["query"], 7.0)
        pages = StepPages(page, unit, *(made[name] for name in ("table", "always", "tails", "tokens")))
        attend_blocks(made["query"], out, cache, pages, made["scores"], count, 0.1, impl=impl)
        assert (out[[0, 2, 4]] == 7).all()  # other tokens are not ours
        outs.append(out[made["tokens"]].float())
    per, flat = unit // page, [x.transpose(0, 1).flatten(1, 2).float() for x in (keys, values)]  # [H,rows,D]
    for r, token in enumerate(made["tokens"].tolist()):
        for h in range(H):
            best = made["scores"][r, h].topk(min(count, 8 * per))
            ids = best.indices[best.values > -torch.inf]
            places = [int(p) for p in made["always"][r] if p >= 0]
            rows = [torch.arange(p * page, p * page + page) for p in places]
            rows[-1] = rows[-1][: int(made["tails"][r])]
            rows += [int(made["table"][r, i // per]) * unit + i % per * page + torch.arange(page) for i in ids]
            row = torch.cat(rows)
            asked = made["query"][token, h * G : (h + 1) * G].float()
            expected = torch.softmax(asked @ flat[0][h, row].mT * 0.1, -1) @ flat[1][h, row]
            for out in outs:
                torch.testing.assert_close(out[r, h * G : (h + 1) * G], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "packing", "tolerance"),
    [
        pytest.param(torch.float32, "columns", 1e-5, marks=pytest.mark.slow),
        pytest.param(torch.float16, "columns", 2e-3, marks=pytest.mark.slow),
        (torch.bfloat16, "columns", 1.6e-2),
        (torch.bfloat16, "pairs", 1.6e-2),
    ],
)
@pytest.mark.parametrize(
    ("size", "block", "tile", "unit", "count"), [(64, 128, 16, 16, 3), (128, 64, 32, 64, 37), (80, 48, 16, 48, 999)]
)
@pytest.mark.parametrize("each", [False, True], ids=["shared", "each"])
def test_attention_over_single_rows_is_attention_over_them(
    dtype: torch.dtype, packing: str, tolerance: float, size: int, block: int, tile: int, unit: int, count: int,
    each: bool,
) -> None:  # fmt: skip
    """Rows that are clustered and rows that are scattered, for a KV head or for each of its query heads."""
    made = case(dtype, size, block, tile, unit)
    keys, values, chosen = made.pop("keys"), made.pop("values"), H * G if each else H
    cache, scores = packed(keys, values, packing), torch.randn(2, chosen, 8 * unit)
    scores[:, 0] += 3 * torch.sin(torch.arange(8 * unit) / 20)
    scores[1, :, 5 * unit :] = -torch.inf
    top = scores.topk(min(count, 8 * unit))
    ids = torch.where(top.values.isneginf(), -1, top.indices).int()
    pages = StepPages(tile, unit, *(made[name] for name in ("table", "always", "tails", "tokens")))
    outs = []
    for impl in ("torch", "numba"):
        out = torch.full_like(made["query"], 7.0)
        attend_rows(made["query"], out, cache, pages, ids, 0.1, impl=impl)
        assert (out[[0, 2, 4]] == 7).all()  # other tokens are not ours
        outs.append(out[made["tokens"]].float())
    flat = [x.transpose(0, 1).flatten(1, 2).float() for x in (keys, values)]  # [H,rows,D]
    for r, token in enumerate(made["tokens"].tolist()):
        near = torch.cat([int(p) * tile + torch.arange(tile) for p in made["always"][r] if p >= 0])
        near = near[: len(near) - tile + int(made["tails"][r])]
        for q in range(H * G):
            own = ids[r, q if each else q // G].long()
            own = own[own >= 0]
            rows = torch.cat([near, made["table"][r].long()[own // unit] * unit + own % unit])
            asked = made["query"][token, q].float()
            expected = torch.softmax(asked @ flat[0][q // G, rows].mT * 0.1, -1) @ flat[1][q // G, rows]
            for out in outs:
                torch.testing.assert_close(out[r, q], expected, rtol=tolerance, atol=tolerance)


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def every_number(dtype: torch.dtype) -> Tensor:
    """`[256]`: all numbers of 8-bit floats, subnormal ones too, and 0 in place of what is none."""
    return torch.arange(256).to(torch.uint8).view(dtype).float().nan_to_num(0, 0, 0).to(dtype)


# Each kernel is compiled for each: in the fast run for one, where all numbers of both are read by a test of their own.
BYTE_FLOATS = pytest.mark.parametrize(
    "dtype", [EIGHT_BITS[0], pytest.param(EIGHT_BITS[1], marks=pytest.mark.slow)], ids=str
)


@pytest.mark.parametrize("packing", PACKINGS)
@BYTE_FLOATS
def test_rows_of_8_bit_floats_are_attended_to_as_the_numbers_that_they_stand_for(
    dtype: torch.dtype, packing: str
) -> None:
    """By pages, single rows and bounds, with scales."""
    page, block = 32, 64
    made = case(torch.bfloat16, 64, block, page, page)
    byte_floats = [made.pop(name).to(dtype) for name in ("keys", "values")]
    cache = replace(packed(*byte_floats, packing), dtype=torch.bfloat16, key_scale=1.5, value_scale=0.25)
    for read, plain, scale in ((cache.keys, byte_floats[0], 1.5), (cache.values, byte_floats[1], 0.25)):
        rows = plain.float().mul(scale).bfloat16().unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(read(torch.arange(48), page), rows, rtol=0, atol=0, equal_nan=True)
    low = torch.randn(48, H, 64).bfloat16()
    layer = BoundedPages(cache, VotedBounds(PageBounds(low, low + 1), "max", 8.0))
    pages = StepPages(page, page, *(made[name] for name in ("table", "always", "tails", "tokens")))
    ids = torch.stack([torch.randperm(5 * page)[:50] for _ in range(2 * H)]).view(2, H, 50).int()
    for attended in (
        lambda out, impl: attend_blocks(made["query"], out, cache, pages, made["scores"], 3, 0.1, impl=impl),
        lambda out, impl: attend_bounded(made["query"], out, layer, pages, 3, 0.1, impl=impl),
        lambda out, impl: attend_rows(made["query"], out, cache, pages, ids, 0.1, impl=impl),
    ):
        outs = [torch.zeros_like(made["query"]) for _ in range(2)]
        for out, impl in zip(outs, ("torch", "numba"), strict=True):
            attended(out, impl)
        assert outs[0].any()
        torch.testing.assert_close(*outs, rtol=1.6e-2, atol=4e-3)


@pytest.mark.parametrize("packing", PACKINGS)
@BYTE_FLOATS
@pytest.mark.parametrize("own", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_every_8_bit_float_is_read_as_it_is(own: torch.dtype, dtype: torch.dtype, packing: str) -> None:
    """A sequence of one row, whose value is the output, also in bfloat16, which holds them all; subnormal numbers are
    none the less."""
    row = every_number(dtype).expand(1, 1, 32, 256)
    cache = replace(packed(row, row, packing), dtype=own)
    one, none = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 0, dtype=torch.int32)
    pages = StepPages(32, 32, none, one, torch.tensor([1], dtype=torch.int32), torch.tensor([0]))
    query = torch.zeros(1, 1, 256, dtype=own)
    for impl in ("torch", "numba"):
        out = torch.full_like(query, 7.0)
        attend_blocks(query, out, cache, pages, torch.zeros(1, 1, 0), 0, 1.0, impl=impl)
        torch.testing.assert_close(out[0, 0].float(), row[0, 0, 0].float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "packing"),
    [
        pytest.param(torch.float32, "columns", marks=pytest.mark.slow),
        (torch.bfloat16, "columns"),
        (torch.bfloat16, "pairs"),
        pytest.param(torch.float8_e4m3fn, "columns", marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [32, 64])
def test_means_stand_for_the_rows_that_are_not_read(dtype: torch.dtype, packing: str, rows: int) -> None:
    """By pages and by single rows: a mean weighs as many rows as its group has that are not read."""
    page, block = 32, 64
    own = torch.bfloat16 if dtype.itemsize == 1 else dtype
    made = case(own, 64, block, page, 64)
    keys, values = made.pop("keys").to(dtype), made.pop("values").to(dtype)
    cache = packed(keys, values, packing)
    if dtype.itemsize == 1:
        cache = replace(cache, dtype=own, key_scale=1.5, value_scale=0.5)
    every = torch.arange(24 * block // rows)
    mean_keys, mean_values = (
        read(every, rows).nan_to_num().float().mean(2).transpose(0, 1).bfloat16().contiguous()
        for read in (cache.keys, cache.values)
    )
    means = MeanRows(mean_keys, mean_values, rows)
    pages = StepPages(page, 64, *(made[name] for name in ("table", "always", "tails", "tokens")))
    ids = torch.stack([torch.randperm(5 * 64)[:90] for _ in range(2 * H)]).view(2, H, 90).int()
    alone = torch.zeros_like(made["query"])
    attend_blocks(made["query"], alone, cache, pages, made["scores"], 3, 0.1)
    for attended in (
        lambda out, impl: attend_blocks(made["query"], out, cache, pages, made["scores"], 3, 0.1, impl, means),
        lambda out, impl: attend_blocks(made["query"], out, cache, pages, made["scores"], 99, 0.1, impl, means),
        lambda out, impl: attend_rows(made["query"], out, cache, pages, ids, 0.1, impl, means),
    ):
        outs = [torch.zeros_like(made["query"]) for _ in range(2)]
        for out, impl in zip(outs, ("torch", "numba"), strict=True):
            attended(out, impl)
        torch.testing.assert_close(*outs, rtol=1.6e-2, atol=4e-3)
        assert (outs[0] - alone).abs().max() > 0.05
    r, h, token = 0, 1, int(made["tokens"][0])  # by hand, of the last
    near = torch.cat([torch.arange(page) + int(p) * page for p in made["always"][r] if p >= 0])
    near = near[: len(near) - page + int(made["tails"][r])]
    far = made["table"][r].long()[ids[r, h].long() // 64] * 64 + ids[r, h].long() % 64
    keys, values = (
        read(torch.arange(24), block).transpose(0, 1).flatten(1, 2)[h].float() for read in (cache.keys, cache.values)
    )
    group = (made["table"][r].long()[:, None] * (64 // rows) + torch.arange(64 // rows)).flatten()
    left = rows - torch.bincount(ids[r, h].long() // rows, minlength=len(group))
    asked, at = made["query"][token, h * G : (h + 1) * G].float(), torch.cat([near, far])
    logits = torch.cat([asked @ keys[at].mT * 0.1, asked @ mean_keys[h, group].float().mT * 0.1 + left.log()], 1)
    expected = torch.softmax(logits, -1) @ torch.cat([values[at], mean_values[h, group].float()])
    torch.testing.assert_close(outs[1][token, h * G : (h + 1) * G].float(), expected, rtol=1.6e-2, atol=4e-3)


@pytest.mark.parametrize("packing", PACKINGS)
def test_unpacked_rows_are_those_written(packing: str) -> None:
    keys, values = torch.randn(2, 3, H, 64, 48)
    cache, places = packed(keys, values, packing), torch.tensor([5, 0, 2])
    for read, plain in ((cache.keys, keys), (cache.values, values)):
        rows = plain.unflatten(2, (2, 32)).transpose(1, 2).flatten(0, 1)  # [6,H,32,D]
        torch.testing.assert_close(read(places, 32), rows[places], rtol=0, atol=0)


def test_a_list_without_any_row_gives_zeros() -> None:
    cache, none = torch.randn(1, 1, 32, 32).bfloat16(), torch.full((1, 1), -1, dtype=torch.int32)
    query, tails = torch.randn(1, 1, 16).bfloat16(), torch.zeros(1, dtype=torch.int32)
    out = torch.ones_like(query)
    scores = torch.full((1, 1, 2), -torch.inf)
    pages = StepPages(16, 32, none, none, tails, torch.tensor([0]))
    attend_blocks(query, out, BlockCache(cache, "columns"), pages, scores, 2, 1.0, impl="numba")
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("dtype", "packing"),
    [
        pytest.param(torch.float32, "columns", marks=pytest.mark.slow),
        (torch.bfloat16, "columns"),
        (torch.bfloat16, "pairs"),
    ],
)
@pytest.mark.parametrize("group", ["sum", "max", "each"])
@pytest.mark.parametrize("count", [3, numpy.array([2, 7])], ids=["one", "of_each"])
def test_choosing_by_bounds_and_attending_in_one_call_is_both_after_each_other(
    dtype: torch.dtype, packing: str, group: str, count: Any
) -> None:
    """To the last bit where both are compiled; what a call remembers of a step and of a layer changes nothing."""
    page, block = 32, 64
    made = case(dtype, 64, block, page, page)
    cache = packed(made.pop("keys"), made.pop("values"), packing)
    low = torch.randn(H, 24 * block // page, 64).to(dtype).transpose(0, 1)
    bounds = PageBounds(low, low + torch.rand(24 * block // page, H, 64).to(dtype))
    layer = BoundedPages(cache, VotedBounds(bounds, group, 8.0))
    pages = StepPages(page, page, *(made[name] for name in ("table", "always", "tails", "tokens")))
    table, tokens = made["table"], made["tokens"]
    for wider in (0, 5):  # a query is often a part of wider rows
        wide = torch.randn(5, H * G * 64 + wider).to(dtype)
        query = wide[:, : H * G * 64].unflatten(1, (H * G, 64))
        scores = page_scores_at(query[tokens].unflatten(1, (H, G)), bounds, table, group, temperature=8.0)
        expected, reference = torch.full_like(made["query"], 7.0), torch.full_like(made["query"], 7.0)
        attend_blocks(query, expected, cache, pages, scores, count, 0.1, impl="numba")
        attend_bounded(query, reference, layer, pages, count, 0.1, impl="torch")
        torch.testing.assert_close(reference, expected, rtol=2e-2, atol=2e-2)
        for _ in range(2):
            out = torch.full_like(made["query"], 7.0)
            attend_bounded(query, out, layer, pages, count, 0.1, impl="numba")
            assert torch.equal(out, expected)


def test_bounds_of_another_dtype_or_entry_are_refused() -> None:
    made = case(torch.bfloat16, 64, 64, 16, 32)
    cache = packed(made.pop("keys"), made.pop("values"), "columns")
    pages = StepPages(16, 32, *(made[name] for name in ("table", "always", "tails", "tokens")))
    out = torch.empty_like(made["query"])
    for low, why in (
        (torch.zeros(96, H, 64, dtype=torch.bfloat16), "an entry of bounds is a page of 16 rows, got 32"),
        (torch.zeros(96, H, 64), "bounds are of the rows' dtype torch.bfloat16, got torch.float32"),
        (torch.zeros(96, 64, H, dtype=torch.bfloat16).mT, "the numbers of a bound are adjacent"),
    ):
        layer = BoundedPages(cache, VotedBounds(PageBounds(low, low), "sum", 8.0))
        with pytest.raises(ValueError, match=why):
            attend_bounded(made["query"], out, layer, pages, 3, 0.1, impl="numba")


def test_a_step_with_nothing_to_choose_reads_what_it_reads_in_any_case() -> None:
    """A budget of no page, and no page to choose from; and layers of other heads in the same step."""
    made = case(torch.bfloat16, 64, 64, 32, 32)
    cache = packed(made.pop("keys"), made.pop("values"), "columns")
    low = torch.randn(48, H, 64).bfloat16()
    one_head = BlockCache(cache.packed[:, :1].contiguous(), "columns")
    for table, count in ((made["table"], 0), (made["table"][:, :0], 3), (made["table"], 2)):
        pages = StepPages(32, 32, table, *(made[name] for name in ("always", "tails", "tokens")))
        for rows, bounds in ((cache, PageBounds(low, low)), (one_head, PageBounds(low[:, :1], low[:, :1]))):
            outs = [torch.zeros_like(made["query"]) for _ in range(2)]
            layer = BoundedPages(rows, VotedBounds(bounds, "sum", 8.0))
            for out, impl in zip(outs, ("torch", "numba"), strict=True):
                attend_bounded(made["query"], out, layer, pages, count, 0.1, impl=impl)
            torch.testing.assert_close(*outs, rtol=2e-2, atol=2e-2)
            assert outs[0].any()


@pytest.mark.parametrize("group", [5, 8, 12])
@pytest.mark.parametrize(("size", "block", "page", "unit"), [(64, 128, 16, 16), (128, 96, 48, 96)])
def test_groups_of_many_query_heads(
    group: int, size: int, block: int, page: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than vectors or tiles serve at a time."""
    made = case(torch.bfloat16, size, block, page, unit)
    cache, query = packed(made["keys"], made["values"], "pairs"), torch.randn(5, H * group, size).to(torch.bfloat16)
    outs = []
    for impl, tiles in (("torch", False), ("numba", True), ("numba", False)):
        if not tiles:
            monkeypatch.setattr(cpu_part, "tiles", lambda: False)
        pages = StepPages(page, unit, *(made[name] for name in ("table", "always", "tails", "tokens")))
        outs.append(torch.zeros_like(query))
        attend_blocks(query, outs[-1], cache, pages, made["scores"], 3, 0.1, impl=impl)
    for out in outs[1:]:
        torch.testing.assert_close(out.float(), outs[0].float(), rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize(
    ("dtype", "packing"), [(torch.float32, "columns"), (torch.bfloat16, "columns"), (torch.bfloat16, "pairs")]
)
@pytest.mark.parametrize(("size", "block", "page"), [(64, 128, 32), (80, 48, 16)])
def test_bounds_are_the_least_and_largest_keys_of_pages(
    dtype: torch.dtype, packing: str, size: int, block: int, page: int, impl: str
) -> None:
    torch.manual_seed(size)
    keys = torch.randn(4, H, block, size).to(dtype)
    plain = keys.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)  # [places,H,page,D]
    low, high = torch.full((2, H, len(plain), size), 7.0, dtype=dtype).transpose(1, 2)
    places = torch.randperm(len(plain))[:5]
    per = block // page
    keys[places[0] // per, 1, places[0] % per * page + 3, 5] = torch.nan  # what is no number is both bounds
    plain = keys.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    write_bounds(packed(keys, keys, packing), PageBounds(low, high), places, page, impl)
    expected = torch.full_like(low, 7.0), torch.full_like(high, 7.0)
    expected[0][places], expected[1][places] = plain[places].amin(2), plain[places].amax(2)
    for bound, wanted in zip((low, high), expected, strict=True):
        torch.testing.assert_close(bound, wanted, rtol=0, atol=0, equal_nan=True)
        assert bound[places[0], 1, 5].isnan()
    with pytest.raises(ValueError, match="a page is a multiple of 16 rows that divides a block of"):
        write_bounds(packed(keys, keys, packing), PageBounds(low, high), places, 8, impl)


@pytest.mark.parametrize("packing", PACKINGS)
@BYTE_FLOATS
def test_bounds_of_8_bit_floats_are_those_of_the_numbers_that_they_stand_for(dtype: torch.dtype, packing: str) -> None:
    keys = torch.randn(4, H, 64, 80).to(dtype)
    cache = replace(packed(keys, keys, packing), dtype=torch.bfloat16, key_scale=1.3)
    low, high = torch.zeros(2, 8, H, 80, dtype=torch.bfloat16)
    write_bounds(cache, PageBounds(low, high), torch.arange(8), 32, "numba")
    rows = cache.keys(torch.arange(8), 32)
    assert torch.equal(low, rows.amin(2))
    assert torch.equal(high, rows.amax(2))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_every_8_bit_float_is_read_as_it_is_for_bounds(dtype: torch.dtype, packing: str) -> None:
    """Of a page whose rows are alike. All kernels read as this one does, which is compiled the fastest."""
    row = every_number(dtype).expand(1, 1, 32, 256)
    low, high = torch.full((2, 1, 1, 256), 7.0, dtype=torch.bfloat16)
    cache = replace(packed(row, row, packing), dtype=torch.bfloat16)
    write_bounds(cache, PageBounds(low, high), torch.arange(1), 32, "numba")
    for bound in (low, high):
        torch.testing.assert_close(bound[0, 0].float(), row[0, 0, 0].float(), rtol=0, atol=0)


class Tight(Quest):
    """Keeps bounds that are none."""

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {name: part / 2 for name, part in super().entries(keys).items()}


@pytest.mark.parametrize(
    ("selector", "packing"),
    [(Quest(16), "pairs"), (Tight(16), "pairs"), (Mean(16), "pairs"), (Quest(1), "columns")],
    ids=repr,
)
def test_an_index_is_made_from_a_cache_as_from_its_keys(selector: PageSelector, packing: str) -> None:
    made, unit = case(torch.bfloat16, 64, 64, 16, 16), selector.unit
    cache, places = packed(made["keys"].nan_to_num(), made["values"], packing), torch.arange(0, 24 * 64 // unit, 3)
    given = 24 * 64 // unit, H, 64, torch.bfloat16, torch.device("cpu")
    one, other = (Store(selector.for_layer(LayerContext(0)), *given) for _ in range(2))
    one.update_from(cache, places, places * unit)
    other.update(places, cache.keys(places, unit))
    assert all(torch.equal(one.entries[name], other.entries[name]) for name in other.entries)


class Recent(Quest):
    """Prefers late pages, which bounds do not say."""

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        return super().scores_at(query, store, table) + 1e3 * torch.arange(table.shape[1])


class Wide(Quest):
    """Keeps bounds of another dtype than its rows'."""

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {name: part.float() for name, part in super().entries(keys).items()}


@pytest.mark.parametrize(
    ("selector", "bounded"),
    [(Quest(16), True), (Quest(16, "softmax"), False), (Recent(16), False), (Wide(16), False), (Mean(16), False)],
    ids=repr,
)
def test_only_quests_own_scores_are_taken_for_bounds(selector: PageSelector, bounded: bool) -> None:
    """What else a method says by `scores_at` is followed."""
    made = case(torch.bfloat16, 64, 64, 16, 16)
    cache = packed(made.pop("keys").nan_to_num(), made.pop("values").nan_to_num(), "columns")
    store = Store(selector.for_layer(LayerContext(0)), 24 * 4, H, 64, torch.bfloat16, torch.device("cpu"))
    store.update(torch.arange(24 * 4), cache.keys(torch.arange(24 * 4), 16))
    assert (store.voted is not None) == bounded
    pages = StepPages(16, 16, *(made[name] for name in ("table", "always", "tails", "tokens")))
    out, expected = torch.zeros_like(made["query"]), torch.zeros_like(made["query"])
    store.attend(made["query"], out, cache, pages, 2, 0.1)
    scores = store.scores(made["query"][made["tokens"]].unflatten(1, (H, G)), pages.table)
    attend_blocks(made["query"], expected, cache, pages, scores, 2, 0.1)
    assert torch.equal(out, expected)
