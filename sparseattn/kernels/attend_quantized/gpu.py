"""`attend_coded` as a fused Triton kernel: codes are read in place and read back in registers.

Work is divided as in `attend.gpu`, whose splits, merging and online softmax these are; there are no dense zones. A tile
of BLOCK rows takes the levels of each row's group: rows of a page share them, so that all but the first row's come from
the cache. What is read back is rounded to the query's dtype, in which it is multiplied, as a model's own rows are.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.gpu import LOG2E, Outputs, Tile, _splits, _used
from sparseattn.kernels.attend.gpu_softmax import softmax_end, softmax_step
from sparseattn.kernels.attend_quantized.reference import CHANNELS, CodedRows, width


@triton.jit
def _spread(packed, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, BITS: tl.constexpr):
    """Codes `[BLOCK,BLOCK_D]` of bytes `[BLOCK,BLOCK_W]`: the channels of the lowest bits first, then the others."""
    if BITS == 8:
        return packed
    shift = (tl.arange(0, 8 // BITS) * BITS).to(tl.uint8)
    planes = (packed[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)
    return tl.reshape(planes, [BLOCK, 8 // BITS * BLOCK_W])


@triton.jit
def _read_back(codes, low, step, kind: tl.constexpr):
    """Numbers of a float type of codes."""
    return (codes.to(tl.float32) * step.to(tl.float32) + low.to(tl.float32)).to(kind)


# These are not specialised: a new budget or a row more must not compile a new kernel.
@triton.jit(do_not_specialize=["slots", "stored"])
def attend_codes(
    query,  # [B,H,G,D]
    keys,  # [B,H,N,W] uint8, any strides but the last
    key_levels,  # [B,H,N/GROUP,2,D] of 16 bits, any strides but the last two
    values,  # as keys
    value_levels,  # [B,H,N,2,C], likewise
    start,  # [B,Hs,S]
    length,  # [B,Hs,S]
    bias,  # [B,Hs,S]; None where no row has one
    out,  # [B,H,G,splits,D]
    lse,  # [B,H,G,splits]
    slots,
    stored,  # N
    scale_log2,
    key_step_b,
    key_step_h,
    key_step_n,
    key_level_step_b,
    key_level_step_h,
    key_level_step_n,
    value_step_b,
    value_step_h,
    value_step_n,
    value_level_step_b,
    value_level_step_h,
    value_level_step_n,
    G: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one selection head: G or 1
    D: tl.constexpr,
    WIDE: tl.constexpr,  # W
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr,  # C
    CHANNELS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chosen, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    selection_head = b.to(tl.int64) * tl.num_programs(0) + chosen  # of B*Hs
    kv_head = (chosen * SHARE // G).to(tl.int64)
    kind = query.dtype.element_ty

    BLOCK_D: tl.constexpr = 8 // BITS * BLOCK_W
    j = tl.arange(0, BLOCK_W)  # bytes of a row's codes
    # Channels by the bits of their bytes; those beyond a row's bytes or beyond D are none.
    place = tl.arange(0, BLOCK_D)
    d = place // BLOCK_W * WIDE + place % BLOCK_W
    real = (place % BLOCK_W < WIDE) & (d < D)
    g = tl.arange(0, BLOCK_G)
    query_row = selection_head * SHARE + g  # [BLOCK_G]
    served = g < SHARE
    start += selection_head * slots
    length += selection_head * slots
    if bias is not None:
        bias += selection_head * slots
    places = _used(length, slots) * SPAN
    tiles = tl.cdiv(places, BLOCK)
    begin, stop = tiles * split // splits * BLOCK, tiles * (split + 1) // splits * BLOCK
    keys += b.to(tl.int64) * key_step_b + kv_head * key_step_h
    values += b.to(tl.int64) * value_step_b + kv_head * value_step_h
    key_levels += b.to(tl.int64) * key_level_step_b + kv_head * key_level_step_h
    value_levels += b.to(tl.int64) * value_level_step_b + kv_head * value_level_step_h

    mine = served[:, None] & real
    q = tl.load(query + query_row[:, None] * D + d, mask=mine, other=0.0)  # [BLOCK_G,BLOCK_D]
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        slot, offset = at // SPAN, at % SPAN
        here = at < places
        row = tl.load(start + slot, mask=here, other=0) + offset
        reads = here & (offset < tl.load(length + slot, mask=here, other=0)) & (row >= 0) & (row < stored)  # [BLOCK]
        row = row.to(tl.int64)
        # What is not read becomes zeros: storage may hold anything.
        mask, bytes_read = reads[:, None] & real, reads[:, None] & (j < WIDE)
        packed = tl.load(keys + row[:, None] * key_step_n + j, mask=bytes_read, other=0)  # [BLOCK,BLOCK_W]
        held_values = tl.load(values + row[:, None] * value_step_n + j, mask=bytes_read, other=0)
        of_key = key_levels + (row // GROUP)[:, None] * key_level_step_n
        low = tl.load(of_key + d, mask=mask, other=0.0)
        step = tl.load(of_key + D + d, mask=mask, other=0.0)
        k = _read_back(_spread(packed, BLOCK, BLOCK_W, BITS), low, step, kind)  # [BLOCK,BLOCK_D]
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_G,BLOCK]
        if bias is not None:
            logits += tl.load(bias + slot, mask=reads, other=0.0) * 1.4426950408889634  # log2 e
        logits = tl.where(reads, logits, float("-inf"))
        weights, shrink, peak, total = softmax_step(logits, peak, total)
        of_value = value_levels + row[:, None] * value_level_step_n
        low = tl.load(of_value + d // CHANNELS, mask=mask, other=0.0)
        step = tl.load(of_value + PARTS + d // CHANNELS, mask=mask, other=0.0)
        v = _read_back(_spread(held_values, BLOCK, BLOCK_W, BITS), low, step, kind)
        acc = tl.dot(weights.to(kind), v, acc * shrink[:, None], input_precision="ieee")

    # A split without places still writes 0 and -inf: the partials are not initialised.
    part = query_row * splits + split
    acc, split_lse = softmax_end(acc, peak, total)
    tl.store(out + part[:, None] * D + d, acc.to(out.dtype.element_ty), mask=mine)
    tl.store(lse + part, split_lse, mask=served)


# By (bytes of a number of the query, padded head size), as `attend.gpu.TILES`, and NOT MEASURED on a GPU either: chosen
# from what the compiler reports, so that nothing spills and, but for float32 of D = 256, two programs fit a
# multiprocessor. float32 of D = 128 and more spills where tiles overlap.
TILES = {
    (2, 16): Tile(64, 4, 3),
    (2, 32): Tile(64, 4, 3),
    (2, 64): Tile(32, 4, 3),
    (2, 128): Tile(32, 4, 3),
    (2, 256): Tile(16, 4, 3),
    (4, 16): Tile(16, 4, 3),
    (4, 32): Tile(16, 4, 3),
    (4, 64): Tile(16, 4, 3),
    (4, 128): Tile(16, 4, 1),
    (4, 256): Tile(16, 8, 1, resident=1),
}
# The same by bits of a number too, where codes that share a byte need more registers. float32 of D = 256 still spills
# with 2 bits.
TILES_OF_BITS = {
    (4, 128, 4): Tile(16, 8, 1),
    (4, 128, 2): Tile(16, 8, 1, resident=1),
    (4, 256, 4): Tile(16, 16, 1, resident=1),
    (4, 256, 2): Tile(16, 16, 1, resident=1),
}


def tile_of(itemsize: int, size: int, bits: int) -> Tile:
    """Return the tables' line for a query of `itemsize` bytes a number, a head size and the bits of codes."""
    padded = max(16, triton.next_power_of_2(size))
    return TILES_OF_BITS.get((itemsize, padded, bits)) or TILES[itemsize, padded]


def launch(
    itemsize: int, size: int, bits: int, rows: int, span: int, group: int, share: int
) -> tuple[dict[str, int], dict[str, Any]]:
    """Compile-time constants and options of `attend_codes`, for a launch and for compiling ahead alike.

    Args:
        itemsize: bytes of a number of the query.
        size, bits, rows: of the rows, and of a group of keys.
        span: of the selection.
        group, share: query heads of a KV head, and of one selection head.
    """
    tile = tile_of(itemsize, size, bits)
    constants = {
        "G": group,
        "SHARE": share,
        "D": size,
        "WIDE": width(size, bits),
        "BITS": bits,
        "GROUP": rows,
        "SPAN": span,
        "PARTS": -(-size // CHANNELS),
        "CHANNELS": CHANNELS,
        "BLOCK_G": max(16, triton.next_power_of_2(share)),
        "BLOCK_W": max(16, triton.next_power_of_2(width(size, bits))),
        "BLOCK": tile.rows,
    }
    return constants, {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


def attend(
    query: Tensor, rows: CodedRows, selection: Selection, scale: float, *, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend_coded`, accumulated in float32; rows are views of storage.

    `splits` overrides how many programs share each list of rows.

    Raises:
        ValueError: codes or levels whose elements of one row are not adjacent.
    """
    parts = rows.keys, rows.key_levels.flatten(3), rows.values, rows.value_levels.flatten(3)
    if any(part.stride(-1) != 1 for part in parts):
        raise ValueError(
            f"the Triton kernel reads codes and levels whose elements are adjacent: last strides are 1, got "
            f"{[part.stride(-1) for part in parts]}"
        )
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    share = heads * group // chosen
    constants, options = launch(query.element_size(), size, rows.bits, rows.group, selection.span, group, share)
    if splits is None:
        selected, tile = slots * selection.span, tile_of(query.element_size(), size, rows.bits)
        splits = _splits(batch * chosen, max(selected, 1), selected, tile, query.device)
    outputs = Outputs(query, splits)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_codes[chosen, splits, batch](
            query.contiguous(),
            *parts,
            selection.start.contiguous(),
            selection.length.contiguous(),
            None if selection.bias is None else selection.bias.contiguous(),
            *outputs.parts,
            slots,
            rows.keys.shape[2],
            scale * LOG2E,
            *(step for part in parts for step in part.stride()[:3]),
            **constants,
            **options,
        )
        return outputs.merged()
