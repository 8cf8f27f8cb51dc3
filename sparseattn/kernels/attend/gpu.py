"""`attend` as one fused Triton kernel: reads exactly the rows a selection names, in place, at decode time.

A program serves one selection head of one sequence (all query heads that share it) and one split of the list of places

    slots used * span places of the selection | sink rows | recent rows

of which lane i of a tile of BLOCK takes place `first + i`. Selection places come first so that a tile, which begins at
a multiple of BLOCK, never straddles two spans of BLOCK rows or more: its rows are then one run of memory.

Work is divided by the slots that a list uses, not by those that it has room for: selectors fill slots from the first
on, so a program looks for the last used one and the splits of a list differ by at most one tile, however long its
buckets are. Lists of unequal length are evened out by more, shorter programs than run at once (`Tile.waves`).

Everything that depends on data (zones, spans, shares of the splits) is computed inside the kernel; the grid and the
partials depend on capacities alone. So a launch never synchronises with the host and a CUDA graph may capture it.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend.gpu_softmax import softmax_end, softmax_step

LOG2E = math.log2(math.e)


@triton.jit
def _used(length, slots):
    """One past the last slot that holds a row, of lengths `[slots]`; 0 if there is none.

    Searched from the end: most lists are full, so that one load answers.
    """
    used = 0
    first = tl.cdiv(slots, 256) * 256 - 256
    while (first >= 0) & (used == 0):
        slot = first + tl.arange(0, 256)
        lengths = tl.load(length + slot, mask=slot < slots, other=0)
        used = tl.max(tl.where(lengths > 0, slot + 1, 0), 0)
        first -= 256
    return used


# These are not specialised: they only offset gathers, and a new budget or table must not compile a new kernel.
@triton.jit(do_not_specialize=["slots", "base", "table_step"])
def attend_split(
    query,  # [B,H,G,D]
    keys,  # [B,H,N,D], any strides but the last; paged [blocks,H,PAGE,D]
    values,  # likewise
    start,  # [B,Hs,S]
    length,  # [B,Hs,S]
    bias,  # [B,Hs,S]; None where no row has one
    sinks,  # [B]
    sealeds,  # [B]
    ends,  # [B]
    table,  # [B,blocks of a sequence], any first stride; None unless PAGE
    out,  # [B,H,G,splits,D]
    lse,  # [B,H,G,splits]
    slots,
    base,
    table_step,
    scale_log2,
    key_step_b,  # of a block where the store is paged
    key_step_h,
    key_step_n,
    value_step_b,
    value_step_h,
    value_step_n,
    G: tl.constexpr,
    SHARE: tl.constexpr,  # query heads of one selection head: G or 1
    D: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,  # rows of a block of the paged store; 0: rows lie in place
):
    chosen, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    selection_head = b.to(tl.int64) * tl.num_programs(0) + chosen  # of B*Hs
    kv_head = chosen * SHARE // G

    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    # Rows of `query`, `out` and `lse`. Padded lanes (g >= SHARE) carry a zero query: finite, never stored.
    query_row = selection_head * SHARE + g  # [BLOCK_G]
    served = g < SHARE

    sink, sealed, end = tl.load(sinks + b), tl.load(sealeds + b), tl.load(ends + b)
    start += selection_head * slots
    length += selection_head * slots
    if bias is not None:
        bias += selection_head * slots
    selected = _used(length, slots) * SPAN
    places = selected + sink + tl.maximum(end - sealed, 0)
    tiles = tl.cdiv(places, BLOCK)
    begin, stop = tiles * split // splits * BLOCK, tiles * (split + 1) // splits * BLOCK

    keys += kv_head.to(tl.int64) * key_step_h
    values += kv_head.to(tl.int64) * value_step_h
    if PAGE:
        table += b.to(tl.int64) * table_step
    else:
        keys += b.to(tl.int64) * key_step_b
        values += b.to(tl.int64) * value_step_b

    # Loaded behind the search for the last slot: held across it, float32 of D = 128 would spill.
    q = tl.load(query + query_row[:, None] * D + d, mask=served[:, None] & (d < D), other=0.0)  # [BLOCK_G,BLOCK_D]
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(begin, stop, BLOCK):
        place = first + tl.arange(0, BLOCK)
        slot, offset = place // SPAN, place % SPAN
        is_slot = place < selected
        chosen_row = base + tl.load(start + slot, mask=is_slot, other=0) + offset
        used = is_slot & (offset < tl.load(length + slot, mask=is_slot, other=0)) & (chosen_row < sealed)
        dense = place - selected
        dense_row = tl.where(dense < sink, dense, dense - sink + sealed)
        reads = used | ((dense >= 0) & (place < places))  # [BLOCK]
        row = tl.where(is_slot, chosen_row, dense_row).to(tl.int64)
        key_row, value_row = row * key_step_n, row * value_step_n
        if PAGE:
            page = tl.load(table + row // PAGE, mask=reads, other=0).to(tl.int64)
            key_row = page * key_step_b + row % PAGE * key_step_n
            value_row = page * value_step_b + row % PAGE * value_step_n

        # Rows that are not read become zeros, never what lies in storage: that may be NaN, and 0 * NaN is NaN.
        mask = reads[:, None] & (d < D)
        k = tl.load(keys + key_row[:, None] + d, mask=mask, other=0.0)  # [BLOCK,BLOCK_D]
        v = tl.load(values + value_row[:, None] + d, mask=mask, other=0.0)
        # "ieee": float32 inputs must not be rounded to tf32. It changes nothing for 16-bit inputs.
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_G,BLOCK] base 2
        if bias is not None:
            logits += tl.load(bias + slot, mask=used, other=0.0) * 1.4426950408889634  # log2 e
        logits = tl.where(reads, logits, float("-inf"))
        weights, shrink, peak, total = softmax_step(logits, peak, total)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")

    # A split without places still writes 0 and -inf: the partials are not initialised.
    acc, split_lse = softmax_end(acc, peak, total)
    part = query_row * splits + split
    tl.store(out + part[:, None] * D + d, acc.to(out.dtype.element_ty), mask=served[:, None] & (d < D))
    tl.store(lse + part, split_lse, mask=served)


@triton.jit(do_not_specialize=["splits"])
def merge_splits(
    parts,  # [B*H*G,splits,D] float32
    part_lse,  # [B*H*G,splits] float32
    out,  # [B*H*G,D]
    lse,  # [B*H*G]
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`merge` over the splits of one query head: an online softmax whose logits are the lse and values the outputs."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    for first in range(0, splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        real = split < splits
        part = head * splits + split
        logits = tl.load(part_lse + part, mask=real, other=float("-inf")) * 1.4426950408889634  # log2 e
        values = tl.load(parts + part[:, None] * D + d, mask=real[:, None] & (d < D), other=0.0)  # [CHUNK,BLOCK_D]
        weights, shrink, peak, total = softmax_step(logits[None, :], peak, total)
        acc = acc * shrink[:, None] + tl.sum(tl.trans(weights) * values, 0)[None, :]
    acc, merged = softmax_end(acc, peak, total)
    tl.store(out + head * D + d[None, :], acc.to(out.dtype.element_ty), mask=d[None, :] < D)
    tl.store(lse + head + tl.arange(0, 1), merged)


@dataclass(frozen=True)
class Tile:
    """How a launch is cut. Whatever stands here, the result is the same to the rounding of sums.

    Args:
        rows: of a tile, a power of two, 16 or more.
        warps, stages: of a program and of its pipeline, as Triton takes them.
        resident: programs that one multiprocessor runs at once.
        waves: programs made for each that can run at once, where lists are long enough: with one, all wait for the
            longest list; with more, multiprocessors that are done take further programs, and merging costs more.
    """

    rows: int
    warps: int
    stages: int
    resident: int = 2
    waves: int = 2


# By (bytes of an element, padded head size). NOT MEASURED on a GPU yet, for none was at hand. Chosen from what the
# compiler reports: nothing spills (docs/lab/kernels.md), and two programs fit an A100 multiprocessor's shared memory
# (164 KiB), three that of an H100 (228 KiB). Rows are reached through the spans, two loads deep, and Triton divides the
# stages between the two: 5 keep two tiles of rows in flight, 3 and 4 only one. float32 is multiplied without tensor
# cores and keeps its operands in registers: 32 rows of D = 128 would spill. `tuned` tries others.
TILES = {
    (2, 16): Tile(64, 4, 5),
    (2, 32): Tile(64, 4, 5),
    (2, 64): Tile(64, 4, 5),
    (2, 128): Tile(64, 4, 5),
    (2, 256): Tile(32, 4, 5),
    (4, 16): Tile(64, 4, 5),
    (4, 32): Tile(64, 4, 5),
    (4, 64): Tile(64, 4, 5),
    (4, 128): Tile(16, 4, 5),
    (4, 256): Tile(16, 4, 3),
}
LEAST = 4  # tiles of a program that is not needed to fill the device: fewer would not fill its pipeline
CHUNK = 16  # splits merged at once: [16,256] float32 is 32 registers a thread of 4 warps
MOST_SPLITS = 128


@contextmanager
def tuned(tile: Tile) -> Iterator[None]:
    """Within it every launch is cut as `tile` says, not as the table does: for measuring what should stand there."""
    before = dict(TILES)
    TILES.update(dict.fromkeys(TILES, tile))
    try:
        yield
    finally:
        TILES.update(before)


def tile_of(itemsize: int, size: int) -> Tile:
    """Return the table's line for elements of `itemsize` bytes and a head size."""
    return TILES[itemsize, _padded(size)]


def _padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # 16: the least that tl.dot multiplies


def launch(
    itemsize: int, size: int, span: int, group: int, share: int, page: int = 0
) -> tuple[dict[str, int], dict[str, Any]]:
    """Compile-time constants and options of `attend_split`, for a launch and for compiling ahead alike.

    `group` is G, `share` the query heads of one selection head, `page` the rows of a block of a paged store, 0 if there
    is none. Contracting a*b+c to one rounding is asked for by name because Triton 3.9 warns where its default decides.
    """
    tile = tile_of(itemsize, size)
    constants = {
        "G": group,
        "SHARE": share,
        "D": size,
        "SPAN": span,
        "BLOCK_G": max(16, triton.next_power_of_2(share)),
        "BLOCK_D": _padded(size),
        "BLOCK": tile.rows,
        "PAGE": page,
    }
    # A table is a third load on the way to a row: with two stages more, as many tiles are in flight as without one.
    stages = tile.stages + 2 if page else tile.stages
    return constants, {"num_warps": tile.warps, "num_stages": stages, "enable_fp_fusion": True}


def launch_merge(size: int) -> tuple[dict[str, int], dict[str, Any]]:
    """As `launch`, for `merge_splits`."""
    return {"D": size, "BLOCK_D": _padded(size), "CHUNK": CHUNK}, {"num_warps": 4, "enable_fp_fusion": True}


class Outputs:
    """What the splits of a launch write for a query `[B,H,G,D]`: the outputs themselves where there is one split, else
    parts of them in float32 that `merged` joins.

    Attributes:
        parts: out `[B,H,G,splits,D]` and lse `[B,H,G,splits]`, without the dimension of splits where there is one.
    """

    def __init__(self, query: Tensor, splits: int) -> None:
        heads, size = query.shape[:3], query.shape[3]
        self.whole = self.parts = query.new_empty(query.shape), query.new_empty(heads, dtype=torch.float32)
        if splits > 1:
            shape = (*heads, splits)
            self.parts = (
                query.new_empty(*shape, size, dtype=torch.float32),
                query.new_empty(shape, dtype=torch.float32),
            )
        self.splits = splits

    def merged(self) -> tuple[Tensor, Tensor]:
        """out `[B,H,G,D]` in the query's dtype, lse `[B,H,G]` float32."""
        if self.splits > 1:
            out, lse = self.whole
            constants, options = launch_merge(out.shape[3])
            merge_splits[lse.numel(),](*self.parts, out, lse, self.splits, **constants, **options)
        return self.whole


def _splits(lists: int, places: int, selected: int, tile: Tile, device: torch.device) -> int:
    """Programs that share each of `lists` lists, from capacities: of its `places`, `selected` are the selection's.

    First as many as let all programs run at once, rounded down, each with a tile to read when the list is as long as it
    can get. Then up to `tile.waves` times as many as can run at once, where the selection alone gives each `LEAST`
    tiles. Interpreted programs run one after the other, where splitting gains nothing.
    """
    if device.type != "cuda":
        return 1
    at_once = tile.resident * torch.cuda.get_device_properties(device).multi_processor_count
    filling = min(at_once // lists, triton.cdiv(places, tile.rows))
    whole = (wave * at_once // lists for wave in range(1, tile.waves + 1))  # part of a wave would be a tail
    evening = max((splits for splits in whole if splits * LEAST * tile.rows <= selected), default=1)
    return max(1, min(max(filling, evening), MOST_SPLITS))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
    *,
    splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend`, accumulated in float32; keys and values are views of any strides but the last.

    `splits` overrides how many programs share each list of rows.

    Raises:
        ValueError: keys or values whose elements of one row are not adjacent.
    """
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(
            f"the Triton kernel reads rows whose elements are adjacent: the last stride of keys and values must be 1, "
            f"got {keys.stride(-1)} and {values.stride(-1)}"
        )
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    page, capacity = 0, keys.shape[2]
    if block_table is not None:
        block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        page, capacity = keys.shape[2], block_table.shape[1] * keys.shape[2]
    constants, options = launch(query.element_size(), size, selection.span, group, heads * group // chosen, page)
    if splits is None:
        # The recent rows' capacity is not known apart from N, the rows that the storage holds.
        selected, tile = slots * selection.span, tile_of(query.element_size(), size)
        splits = _splits(batch * chosen, bounds.base + selected + capacity, selected, tile, query.device)

    outputs = Outputs(query, splits)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_split[chosen, splits, batch](
            query.contiguous(),
            keys,
            values,
            selection.start.contiguous(),
            selection.length.contiguous(),
            None if selection.bias is None else selection.bias.contiguous(),
            bounds.sink.contiguous(),
            bounds.sealed.contiguous(),
            bounds.rows.contiguous(),
            block_table,
            *outputs.parts,
            slots,
            bounds.base,
            0 if block_table is None else block_table.stride(0),
            scale * LOG2E,
            *keys.stride()[:3],
            *values.stride()[:3],
            **constants,
            **options,
        )
        return outputs.merged()
