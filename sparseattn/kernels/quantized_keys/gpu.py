"""Scores of rows by their keys of few bits as fused Triton kernels, which unpack the codes in registers.

`score_rows` reads every row's codes once: a group's steps are multiplied into the query, so that a row costs its
unpacking and one product of small matrices, and the query's product with the lowest levels is added. The mass of a page
of rows and the group's vote follow in the same launch, "softmax" in a second one (`group_vote.gpu`).
`score_listed_rows` scores the rows of listed pages alone: these may be of few rows, so levels are applied to the keys.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.kernels.group_vote.gpu import log_or_inf, vote_tiles
from sparseattn.kernels.group_vote.reference import vote
from sparseattn.kernels.page_bounds.gpu import adjacent
from sparseattn.kernels.quantized_keys import level_grid, packing, reference
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows


@triton.jit
def _place(row, j, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Where byte j of a group's row lies in the group: words of 4 bytes, those of TILE rows beside each other."""
    if TILE == 1:
        return row * WIDE + j
    return row // TILE * (WIDE * TILE) + j // 4 * (4 * TILE) + row % TILE * 4 + j % 4


@triton.constexpr_function
def _down(bits, plane):
    """By how much a plane's codes are shifted down: the highest bit of a byte is not one of bfloat16's mantissa."""
    return 1 if bits * plane + bits == 8 else 0


@triton.jit
def _plane(packed, BITS: tl.constexpr, plane: tl.constexpr, kind: tl.constexpr):
    """Codes of a plane times `2^(BITS * plane - down)`, of a float type.

    In 16 bits without a conversion, of which a multiprocessor does few: below the exponent of 128 (bfloat16) or 1,024
    the bits of an integer are a mantissa.
    """
    down: tl.constexpr = _down(BITS, plane)
    held = (packed >> down) & (((1 << BITS) - 1) << (BITS * plane - down))
    if kind == tl.bfloat16:
        return (held.to(tl.uint16) | 0x4300).to(kind, bitcast=True) - tl.full([1, 1], 128.0, kind)
    if kind == tl.float16:
        return (held.to(tl.uint16) | 0x6400).to(kind, bitcast=True) - tl.full([1, 1], 1024.0, kind)
    return held.to(kind)


@triton.jit
def _lows(low, mask, grid, head, d, here, D: tl.constexpr):
    """The lowest levels of channels d, where these are `here`, that `low` points at; where masked that of a 0."""
    levels = tl.load(low, mask=mask, other=0).to(tl.float32)
    if grid is not None:
        anchor = tl.load(grid + head * 3 * D + d, mask=here, other=0.0)
        levels = levels * tl.load(grid + head * 3 * D + D + d, mask=here, other=0.0) + anchor
    return levels


@triton.jit
def _steps(step, mask, grid, head, d, here, D: tl.constexpr):
    """The steps of channels d, where these are `here`, that `step` points at; 0 where masked."""
    wide = tl.load(step, mask=mask, other=0).to(tl.float32)
    if grid is not None:
        wide = wide * tl.load(grid + head * 3 * D + 2 * D + d, mask=here, other=0.0)
    return wide


# Specialised are strides alone: a group more must not compile a new kernel.
@triton.jit(do_not_specialize=["parts", "real_step_b"])
def score_rows(
    query,  # [B,H,G,D]
    packed,  # [B,H,N/ROWS,ROWS*WIDE] uint8, any strides but the last
    low,  # [B,H,N/ROWS,D] of 16 bits or int8, any strides but the last
    step,  # likewise, of 16 bits or uint8
    grid,  # [B,H,3,D] float32 for levels of 8 bits, else None
    real,  # [B,N]; None with a table
    table,  # [B,N/ROWS] int32, contiguous: where in a store that sequences share a group lies; None: in its own order
    out,  # [B,H,N/PAGE] or, for "each" and "softmax", [B,H,G,N/PAGE] float32
    tile_lse,  # [B,H,G,tiles] float32; None but for "softmax"
    parts,  # N / PART
    real_step_b,
    scale,
    packed_step_b,
    packed_step_h,
    packed_step_n,
    low_step_b,
    low_step_h,
    low_step_n,
    step_step_b,
    step_step_h,
    step_step_n,
    VOTE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,  # 4W, bytes of a row's codes
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PART: tl.constexpr,  # rows of one product, all of one group, whole pages
    EACH: tl.constexpr,  # parts of a program
):
    first, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + h  # of B*H
    kind = query.dtype.element_ty
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    j = tl.arange(0, BLOCK_W)
    r = tl.arange(0, PART)
    query += head * G * D
    packed += b.to(tl.int64) * packed_step_b + h.to(tl.int64) * packed_step_h
    low += b.to(tl.int64) * low_step_b + h.to(tl.int64) * low_step_h
    step += b.to(tl.int64) * step_step_b + h.to(tl.int64) * step_step_h
    if table is None:
        real += b.to(tl.int64) * real_step_b
    else:
        table += b.to(tl.int64) * (parts // (ROWS // PART))
    asked = tl.load(query + g[:, None] * D + d, mask=(g < G)[:, None] & (d < D), other=0.0).to(tl.float32)
    pages: tl.constexpr = PART // PAGE
    # Sums of exponentials of every place of a part, joined at the end: those of each part would cost as much as it.
    peak = tl.full([pages, BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([pages, BLOCK_G], tl.float32)
    for part in range(first * EACH, tl.minimum(first * EACH + EACH, parts)):
        row = part * PART
        if table is None:
            group = head * 0 + row // ROWS  # of 64 bits
            known = tl.load(real + row + r) != 0
        else:
            group = tl.load(table + row // ROWS).to(tl.int64)
            known = r * 0 + group >= 0
        size = tl.max(known.to(tl.int32), 0) * D  # what is not real is not read: spare capacity costs nothing
        base = _lows(low + group * low_step_n + d, d < size, grid, head, d, d < size, D)
        base = tl.sum(asked * base[None, :], 1)  # [BLOCK_G]
        if kind == tl.float16:  # a query times a step might overflow, or fall below what float16 holds
            wide = _steps(step + group * step_step_n + d, d < size, grid, head, d, d < size, D)
            largest = tl.max(tl.abs(asked * wide[None, :]), 1)
            largest = tl.where(largest > 0.0, largest, 1.0)  # [BLOCK_G]
        codes = tl.load(
            packed + group * packed_step_n + _place(row % ROWS + r[:, None], j[None, :], WIDE, TILE),
            mask=known[:, None] & (j < WIDE)[None, :],
            other=0,
        )  # [PART,BLOCK_W]
        scores = tl.zeros([PART, BLOCK_G], tl.float32)
        for plane in tl.static_range(8 // BITS):
            at = plane * WIDE + j  # channels
            here = (j < WIDE) & (at < size)
            stretch = _steps(step + group * step_step_n + at, here, grid, head, at, here, D)
            q = tl.load(query + g[None, :] * D + at[:, None], mask=here[:, None] & (g < G)[None, :], other=0.0)
            # Codes are left where they lie in a byte, as numbers so many times as large.
            q = q.to(tl.float32) * (stretch * 0.5 ** (BITS * plane - _down(BITS, plane)))[:, None]
            if kind == tl.float16:
                q = q / largest[None, :]
            scores = tl.dot(_plane(codes, BITS, plane, kind), q.to(kind), scores, input_precision="ieee")
        if kind == tl.float16:
            scores = scores * largest[None, :]
        scores = (scores + base[None, :]) * scale
        scores = tl.where(known[:, None], scores, float("-inf"))  # [PART,BLOCK_G]
        if PAGE > 1:
            held = tl.reshape(scores, [pages, PAGE, BLOCK_G])
            top = tl.max(held, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            scores = top + log_or_inf(tl.sum(tl.exp(held - top[:, None, :]), 1))  # [pages,BLOCK_G]
        page = part * pages + tl.arange(0, pages)
        there = parts * pages  # of a head
        if VOTE == "sum" or VOTE == "max":
            served = (g < G)[None, :]
            if VOTE == "sum":
                voted = tl.sum(tl.where(served, scores, 0.0), 1)
            else:
                voted = tl.max(tl.where(served, scores, float("-inf")), 1)
            tl.store(out + head * there + page, voted)
        else:
            at = (head * G + g)[None, :] * there + page[:, None]
            tl.store(out + at, scores, mask=(g < G)[None, :] & (page >= 0)[:, None])
            if VOTE == "softmax":
                most = tl.maximum(peak, scores)
                anchor = tl.where(most == float("-inf"), 0.0, most)
                total = total * tl.exp(peak - anchor) + tl.exp(scores - anchor)
                peak = most
    if VOTE == "softmax":
        most = tl.max(peak, 0)  # [BLOCK_G]
        anchor = tl.where(most == float("-inf"), 0.0, most)
        lse = anchor + log_or_inf(tl.sum(total * tl.exp(peak - anchor[None, :]), 0))
        tl.store(tile_lse + (head * G + g) * tl.num_programs(0) + first, lse, mask=g < G)


@triton.jit(do_not_specialize=["rows", "page", "listed", "real_step_b"])
def score_listed_rows(
    query,  # [B,H,G,D]
    packed,  # [B,H,N/ROWS,ROWS*WIDE] uint8, any strides but the last
    low,  # [B,H,N/ROWS,D] of 16 bits or int8, any strides but the last
    step,  # likewise, of 16 bits or uint8
    grid,  # [B,H,3,D] float32 for levels of 8 bits, else None
    real,  # [B,N]
    ids,  # [B,Hs,P]
    out,  # [B,H,G,P*page] float32
    rows,  # N
    page,
    listed,  # P
    real_step_b,
    scale,
    packed_step_b,
    packed_step_h,
    packed_step_n,
    low_step_b,
    low_step_h,
    low_step_n,
    step_step_b,
    step_step_h,
    step_step_n,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,  # lists of a KV head
    G: tl.constexpr,  # query heads of a list
    D: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chosen, b = tl.program_id(1), tl.program_id(2)
    list_at = b.to(tl.int64) * tl.num_programs(1) + chosen  # of B*Hs
    h = (chosen // EACH).to(tl.int64)
    head = list_at // EACH  # of B*H
    kind = query.dtype.element_ty
    g = tl.arange(0, BLOCK_G)
    j = tl.arange(0, BLOCK_W)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of P*page
    here = slot < listed * page
    named = tl.load(ids + list_at * listed + slot // page, mask=here, other=-1).to(tl.int64)
    row = named * page + slot % page
    known = (named >= 0) & (row < rows)
    known = known & (tl.load(real + b.to(tl.int64) * real_step_b + row, mask=known, other=0) != 0)
    group = row // ROWS
    packed += b.to(tl.int64) * packed_step_b + h * packed_step_h
    low += b.to(tl.int64) * low_step_b + h * low_step_h
    step += b.to(tl.int64) * step_step_b + h * step_step_h
    query += list_at * G * D
    place = _place((row % ROWS).to(tl.int32)[:, None], j[None, :], WIDE, TILE)
    codes = tl.load(
        packed + (group * packed_step_n)[:, None] + place, mask=known[:, None] & (j < WIDE)[None, :], other=0
    )  # [BLOCK,BLOCK_W]
    scores = tl.zeros([BLOCK, BLOCK_G], tl.float32)
    for plane in tl.static_range(8 // BITS):
        at = plane * WIDE + j
        fits = (j < WIDE) & (at < D)
        mask = known[:, None] & fits[None, :]
        channel, there = at[None, :], fits[None, :]
        stretch = _steps(step + (group * step_step_n)[:, None] + channel, mask, grid, head, channel, there, D)
        least = _lows(low + (group * low_step_n)[:, None] + channel, mask, grid, head, channel, there, D)
        code = ((codes >> (BITS * plane)) & ((1 << BITS) - 1)).to(tl.float32)
        q = tl.load(query + g[None, :] * D + at[:, None], mask=fits[:, None] & (g < G)[None, :], other=0.0)
        scores = tl.dot((least + stretch * code).to(kind), q, scores, input_precision="ieee")
    scores = tl.where(known[:, None], scores * scale, float("-inf"))  # [BLOCK,BLOCK_G]
    many = listed * page
    tl.store(out + (list_at * G + g)[None, :] * many + slot[:, None], scores, mask=(g < G)[None, :] & here[:, None])


# NOT MEASURED on a GPU yet: from the compiler's reports, without spills (docs/lab/kernels.md).
PART = {
    2: 64,
    4: 16,
}  # rows of one product by bytes of a query's number: those of a warp group, and what does not spill
PROGRAM = 256  # rows of a program of `score_rows`
LISTED = {2: 64, 4: 32}  # rows of a program of `score_listed_rows` by bytes of a query's number
VOTE_BLOCK = 512  # rows or pages that one program of `vote_softmax` votes on


def part_of(itemsize: int, rows: int) -> int:
    """Rows that are multiplied at once: a power of two that divides a group."""
    return min(rows & -rows, PART[itemsize])


def launch(
    itemsize: int, size: int, group: int, vote: str, bits: int, rows: int, page: int, tiled: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants and options of `score_rows`, for a launch and for compiling ahead alike."""
    wide, part = 4 * packing.words(size, bits), part_of(itemsize, rows)
    constants = {
        "VOTE": vote,
        "BITS": bits,
        "ROWS": rows,
        "PAGE": page,
        "TILE": tiled,
        "G": group,
        "D": size,
        "WIDE": wide,
        "BLOCK_G": max(8, triton.next_power_of_2(group)),  # 8: columns of the least product of a tensor core
        "BLOCK_D": triton.next_power_of_2(size),
        "BLOCK_W": max(16, triton.next_power_of_2(wide)),  # 16: the least depth of one
        "PART": part,
        "EACH": PROGRAM // part,
    }
    return constants, {
        "num_warps": 4 if part >= 32 or itemsize == 4 else part // 16,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def launch_listed(
    itemsize: int, size: int, group: int, each: int, bits: int, rows: int, tiled: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `launch`, for `score_listed_rows`: `group` query heads share a list, a KV head has `each`."""
    wide = 4 * packing.words(size, bits)
    constants = {
        "BITS": bits,
        "ROWS": rows,
        "TILE": tiled,
        "EACH": each,
        "G": group,
        "D": size,
        "WIDE": wide,
        "BLOCK_G": max(8, triton.next_power_of_2(group)),
        "BLOCK_W": max(16, triton.next_power_of_2(wide)),
        "BLOCK": LISTED[itemsize],
    }
    return constants, {"num_warps": 4 if itemsize == 2 else 8, "num_stages": 1, "enable_fp_fusion": True}


def _check(query: Tensor, keys: QuantizedKeys) -> None:
    """ValueError for what the kernels cannot read."""
    codes, low, step, grid = keys.codes, keys.low, keys.step, keys.grid
    if grid is None:
        fit, wanted = low.dtype == step.dtype and low.element_size() == 2, "levels of one 16-bit dtype"
    else:
        fit = (low.dtype, step.dtype) == (torch.int8, torch.uint8)
        wanted = "levels on a grid torch.int8 and torch.uint8"
        shape = *low.shape[:2], level_grid.NUMBERS, low.shape[3]
        if grid.dtype != torch.float32 or grid.shape != shape:
            raise ValueError(f"a grid is {list(shape)} in float32, got {list(grid.shape)} in {grid.dtype}")
    if not fit or codes.dtype != torch.uint8:
        raise ValueError(f"codes are torch.uint8 and {wanted}, got {codes.dtype}, {low.dtype} and {step.dtype}")
    strides = codes.stride(-1), low.stride(-1), step.stride(-1)
    if strides != (1, 1, 1):
        raise ValueError(f"codes and levels have adjacent elements, got last strides {strides}")
    if codes.shape[:3] != low.shape[:3] or low.shape != step.shape or low.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"a query [B,H,G,D], codes [B,H,N/rows,rows*4W] and levels [B,H,N/rows,D] agree in B, H and N/rows, got "
            f"{list(query.shape)}, {list(codes.shape)}, {list(low.shape)} and {list(step.shape)}"
        )


def logits(query: Tensor, keys: QuantizedKeys) -> Tensor:
    """As `dispatch.logits`. In 16 bits the query times a group's steps is rounded once more."""
    return scores(query, keys, "each", 1).unflatten(1, query.shape[1:3])


def scores(query: Tensor, keys: QuantizedKeys, group: str, page: int) -> Tensor:
    """As `dispatch.scores`, of float32 and 16-bit queries; see `logits`.

    Codes and levels have any strides but the last. Rows that are not valid may hold anything.

    Raises:
        ValueError: dtypes, shapes or strides that the kernels cannot read.
    """
    return _scores(query, keys, group, page)


def scores_at(query: Tensor, store: QuantizedKeys, table: Tensor, group: str, page: int) -> Tensor:
    """As `dispatch.scores_at`; see `scores`."""
    return _scores(query, store.shared_by(len(query)), group, page, table)


def _scores(query: Tensor, keys: QuantizedKeys, group: str, page: int, table: Tensor | None = None) -> Tensor:
    """Launch the kernels; with a table codes and levels `[B,H,entries,..]` are of a store."""
    _check(query, keys)
    batch, heads, share, size = query.shape
    rows = keys.group_rows
    stored = rows * (keys.groups if table is None else table.shape[1])
    if not stored:
        return query.new_empty(batch, heads * (share if group == "each" else 1), 0, dtype=torch.float32)
    part = part_of(query.element_size(), rows)
    if page > part:  # a page of more rows than are multiplied at once: first the masses of its parts
        masses = _scores(query, keys, "each", part, table).unflatten(-1, (-1, page // part))
        return vote(masses.logsumexp(-1).unflatten(1, (heads, share)), group)
    constants, options = launch(
        query.element_size(), size, share, group, keys.bits, rows, page, packing.tile(keys.codes.device)
    )
    parts = stored // part
    tiles = triton.cdiv(parts, constants["EACH"])
    number = stored // page
    shape = (batch, heads, share, number) if group in ("each", "softmax") else (batch, heads, number)
    out = query.new_empty(shape, dtype=torch.float32)
    tile_lse = None
    if group == "softmax":
        tile_lse = query.new_empty(batch, heads, share, tiles, dtype=torch.float32)
    valid = None if table is not None else adjacent(keys.mask)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        score_rows[tiles, heads, batch](
            query.contiguous(),
            keys.codes,
            keys.low,
            keys.step,
            None if keys.grid is None else keys.grid.contiguous(),
            valid,
            None if table is None else table.int().contiguous(),
            out,
            tile_lse,
            parts,
            0 if valid is None else valid.stride(0),
            size**-0.5,
            *keys.codes.stride()[:3],
            *keys.low.stride()[:3],
            *keys.step.stride()[:3],
            **constants,
            **options,
        )
    if tile_lse is not None:
        return vote_tiles(out, tile_lse, VOTE_BLOCK)
    return out.flatten(1, 2) if group == "each" else out


def best(query: Tensor, keys: QuantizedKeys, group: str, count: int, page: int) -> Tensor:
    """As `dispatch.best`; see `scores`."""
    return best_rows(scores(query, keys, group, page), count)


def listed_logits(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int) -> Tensor:
    """As `dispatch.listed_logits`; see `scores`. In 16 bits a key is rounded as a model's own keys are."""
    _check(query, keys)
    batch, heads, group, size = query.shape
    lists, number = pages.shape[1:]
    out = query.new_empty(batch, heads, group, number * page, dtype=torch.float32)
    if not keys.groups:
        return out.fill_(-torch.inf)
    if out.numel():
        each = lists // heads
        valid = adjacent(keys.mask)
        rows = valid.shape[1] // keys.groups
        constants, options = launch_listed(
            query.element_size(), size, group // each, each, keys.bits, rows, packing.tile(keys.codes.device)
        )
        with torch.cuda.device_of(query):
            score_listed_rows[triton.cdiv(number * page, constants["BLOCK"]), lists, batch](
                query.contiguous(),
                keys.codes,
                keys.low,
                keys.step,
                None if keys.grid is None else keys.grid.contiguous(),
                valid,
                pages.contiguous(),
                out,
                valid.shape[1],
                page,
                number,
                valid.stride(0),
                size**-0.5,
                *keys.codes.stride()[:3],
                *keys.low.stride()[:3],
                *keys.step.stride()[:3],
                **constants,
                **options,
            )
    return out


def best_listed(
    query: Tensor, keys: QuantizedKeys, group: str, pages: Tensor, page: int, count: int
) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_listed`; see `scores`."""
    return reference.best_of_listed(listed_logits(query, keys, pages, page), keys, group, pages, page, count)
