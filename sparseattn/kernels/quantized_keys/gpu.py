"""Scores of rows by their keys of few bits as fused Triton kernels, which unpack the codes in registers.

`score_rows` reads every row's codes once: a group's steps are multiplied into the query, so that a row costs its
unpacking and one product of small matrices, and the query's product with the lowest levels is added. The mass of a page
of rows and the group's vote follow in the same launch, "softmax" in a second one (`group_vote.gpu`).
The rows of listed pages alone are `gpu_listed`'s.
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
from sparseattn.kernels.quantized_keys import packing
from sparseattn.kernels.quantized_keys.gpu_codes import check, codes_of_plane, down_by, lows, place, steps
from sparseattn.kernels.quantized_keys.gpu_listed import best_listed as best_listed
from sparseattn.kernels.quantized_keys.gpu_listed import listed_logits as listed_logits
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows


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
    queries = tl.load(query + g[:, None] * D + d, mask=(g < G)[:, None] & (d < D), other=0.0).to(tl.float32)
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
        base = lows(low + group * low_step_n + d, d < size, grid, head, d, d < size, D)
        base = tl.sum(queries * base[None, :], 1)  # [BLOCK_G]
        if kind == tl.float16:  # a query times a step might overflow, or fall below what float16 holds
            wide = steps(step + group * step_step_n + d, d < size, grid, head, d, d < size, D)
            largest = tl.max(tl.abs(queries * wide[None, :]), 1)
            largest = tl.where(largest > 0.0, largest, 1.0)  # [BLOCK_G]
        codes = tl.load(
            packed + group * packed_step_n + place(row % ROWS + r[:, None], j[None, :], WIDE, TILE),
            mask=known[:, None] & (j < WIDE)[None, :],
            other=0,
        )  # [PART,BLOCK_W]
        scores = tl.zeros([PART, BLOCK_G], tl.float32)
        for plane in tl.static_range(8 // BITS):
            at = plane * WIDE + j  # channels
            here = (j < WIDE) & (at < size)
            stretch = steps(step + group * step_step_n + at, here, grid, head, at, here, D)
            q = tl.load(query + g[None, :] * D + at[:, None], mask=here[:, None] & (g < G)[None, :], other=0.0)
            # Codes are left where they lie in a byte, as numbers so many times as large.
            q = q.to(tl.float32) * (stretch * 0.5 ** (BITS * plane - down_by(BITS, plane)))[:, None]
            if kind == tl.float16:
                q = q / largest[None, :]
            scores = tl.dot(codes_of_plane(codes, BITS, plane, kind), q.to(kind), scores, input_precision="ieee")
        if kind == tl.float16:
            scores = scores * largest[None, :]
        scores = (scores + base[None, :]) * scale
        scores = tl.where(known[:, None], scores, float("-inf"))  # [PART,BLOCK_G]
        if PAGE > 1:
            by_page = tl.reshape(scores, [pages, PAGE, BLOCK_G])
            top = tl.max(by_page, 1)
            top = tl.where(top == float("-inf"), 0.0, top)
            scores = top + log_or_inf(tl.sum(tl.exp(by_page - top[:, None, :]), 1))  # [pages,BLOCK_G]
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


# NOT MEASURED on a GPU yet: from the compiler's reports, without spills (docs/lab/kernels.md).
PART = {
    2: 64,
    4: 16,
}  # rows of one product by bytes of a query's number: those of a warp group, and what does not spill
PROGRAM = 256  # rows of a program of `score_rows`
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
    check(query, keys)
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
