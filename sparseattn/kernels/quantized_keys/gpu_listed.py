"""Scores of the rows of listed pages by their keys of few bits, as a Triton kernel.

These pages may be of few rows, so levels are applied to the keys.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.kernels.page_bounds.gpu import adjacent
from sparseattn.kernels.quantized_keys import packing, reference
from sparseattn.kernels.quantized_keys.gpu_codes import check, lows, place, steps
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys


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
    at_byte = place((row % ROWS).to(tl.int32)[:, None], j[None, :], WIDE, TILE)
    codes = tl.load(
        packed + (group * packed_step_n)[:, None] + at_byte, mask=known[:, None] & (j < WIDE)[None, :], other=0
    )  # [BLOCK,BLOCK_W]
    scores = tl.zeros([BLOCK, BLOCK_G], tl.float32)
    for plane in tl.static_range(8 // BITS):
        at = plane * WIDE + j
        fits = (j < WIDE) & (at < D)
        mask = known[:, None] & fits[None, :]
        channel, there = at[None, :], fits[None, :]
        stretch = steps(step + (group * step_step_n)[:, None] + channel, mask, grid, head, channel, there, D)
        least = lows(low + (group * low_step_n)[:, None] + channel, mask, grid, head, channel, there, D)
        code = ((codes >> (BITS * plane)) & ((1 << BITS) - 1)).to(tl.float32)
        q = tl.load(query + g[None, :] * D + at[:, None], mask=fits[:, None] & (g < G)[None, :], other=0.0)
        scores = tl.dot((least + stretch * code).to(kind), q, scores, input_precision="ieee")
    scores = tl.where(known[:, None], scores * scale, float("-inf"))  # [BLOCK,BLOCK_G]
    many = listed * page
    tl.store(out + (list_at * G + g)[None, :] * many + slot[:, None], scores, mask=(g < G)[None, :] & here[:, None])


# NOT MEASURED on a GPU yet: from the compiler's reports, without spills (docs/lab/kernels.md).
LISTED = {2: 64, 4: 32}  # rows of a program of `score_listed_rows` by bytes of a query's number


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


def listed_logits(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int) -> Tensor:
    """As `dispatch.listed_logits`; see `scores`. In 16 bits a key is rounded as a model's own keys are."""
    check(query, keys)
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
