"""Attention over single rows of a serving engine's cache, compiled by numba for the CPU: they are read where they
lie in its blocks, those of a tile in one visit.

A key's numbers lie apart, beside those of its neighbours (`cpu_products`): a line of memory that is read for one row
has the same channel of 16 or 32. So logits are taken of whole tiles, of which rows that are not read count for nothing,
and values of the rows that are.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import factors, flat
from sparseattn.kernels.attend_vllm_blocks.cpu_means import groups_of, means_of, means_part
from sparseattn.kernels.attend_vllm_blocks.cpu_part import PART_ROWS, PARTS
from sparseattn.kernels.attend_vllm_blocks.cpu_products import (
    SERVED,
    _ask_for_keys,
    _ask_for_values,
    _page_logits,
    _page_values,
)
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import joined
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, read, storage_of
from sparseattn.kernels.numba_softmax import exponentials, peak_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.numba_vectors import LANES

MOST = 32  # rows of a tile: which of them are read fits a word


@njit
def _listed(ids, form, reads, marks, places, masks):
    """List the tiles of which rows are read, and which rows of each; returns how many.

    ids: chosen rows of the table, -1 for none; form: rows of a tile and tiles of an entry; reads: see
    `cpu_part.page_part`; marks: `[E*per]` of zeros, to be filled; places, masks: to be filled.
    """
    (tile, per), (always, tail, table) = form, reads
    bit, whole, count = np.uint64(1), (np.uint64(1) << np.uint64(tile)) - np.uint64(1), 0
    for i in range(always.shape[0]):
        if always[i] >= 0:
            places[count], masks[count] = always[i], whole
            count += 1
    if count:
        masks[count - 1] = (bit << np.uint64(tail)) - bit  # the sequence's last, of which `tail` rows are there
    for i in range(ids.shape[0]):
        if ids[i] >= 0:
            marks[ids[i] // tile] |= bit << np.uint64(ids[i] % tile)
    for at in range(marks.shape[0]):
        if marks[at]:
            places[count], masks[count] = np.int64(table[at // per]) * per + at % per, marks[at]
            count += 1
    return count


@njit
def _runs(paired, values, weighed, sums, mask, tile):
    """Add the weighted values of a tile's rows in `mask`: of runs of rows, or where most are read of all between the
    first and the last, the others of which weigh nothing."""
    (cache, value, block), (weights, w, wide), (acc, size, served) = values, weighed, sums
    bit, count, first, last = np.uint64(1), 0, tile, 0
    for r in range(tile):
        if mask >> np.uint64(r) & bit:
            count += 1
            first, last = min(first, r), r + 1
    dense = 2 * count >= last - first
    r = first
    while r < last:
        stop = r + 1
        if dense:
            stop = last
        else:
            while stop < last and mask >> np.uint64(stop) & bit:
                stop += 1
        begin = r & -2 if paired else r  # rows lie in pairs
        step = LANES if paired else size
        _page_values(
            paired, (cache, value + begin * step, block, stop - begin), (weights, w + begin, wide), (acc, size, served)
        )
        r = stop
        while r < last and not mask >> np.uint64(r) & bit:
            r += 1


@njit  # not fastmath, under which `powers` may not be reordered
def _rows_part(paired, queries, blocks, form, listed, sums):
    """Attention of a list's query heads over some of its tiles.

    queries, blocks, sums: see `cpu_part.page_part`; form: rows of a block and of a tile; listed: places and masks.
    """
    (query, q, share, size, scale), (cache, block_step, base), (block, tile) = queries, blocks, form
    (places, masks), (acc, peak, total) = listed, sums
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    many, in_block, bit = places.shape[0], block // tile, np.uint64(1)
    if many == 0:
        return
    wide = many * tile
    weights, scaled = np.empty(SERVED * wide, np.float32), np.empty(SERVED * size, np.float32)
    for first in range(0, share, SERVED):
        served = min(SERVED, share - first)
        for d in range(served * size):
            scaled[d] = read(query, q + first * size + d) * scale
        for i in range(many):
            if i + 1 < many and first == 0:
                at = places[i + 1] // in_block * block_step + base
                row = places[i + 1] % in_block * tile
                _ask_for_keys(paired, cache, at + (row * size if paired else row), block, size, tile)
            at = places[i] // in_block * block_step + base
            row = places[i] % in_block * tile
            key = at + (row * size if paired else row)
            _page_logits(paired, (cache, key, block, tile), (scaled, size, served), (weights, i * tile, wide))
            for r in range(tile):
                if not masks[i] >> np.uint64(r) & bit:
                    for k in range(served):
                        weights[k * wide + i * tile + r] = -np.inf
        for k in range(served):
            highest = peak_of(weights, k * wide, wide)
            peak[first + k] = highest
            total[first + k] = exponentials(weights, k * wide, wide, highest)
        for i in range(many):
            if i + 1 < many and first == 0:
                at = places[i + 1] // in_block * block_step + base + block * size
                row = places[i + 1] % in_block * tile
                _ask_for_values(paired, cache, at + row * (LANES if paired else size), block, size, tile)
            at = places[i] // in_block * block_step + base + block * size
            row = places[i] % in_block * tile
            value = at + row * (LANES if paired else size)
            weighed = weights, i * tile, wide
            _runs(paired, (cache, value, block), weighed, (acc[first * size :], size, served), masks[i], tile)


@entry(parallel=True, cache=True, nogil=True)
def _attend_rows(queries, blocks, form, paired, tables, ids, listed, means, mean_parts, sums, outs):
    """Attend to rows of blocks; queries, blocks, outs: see `cpu._attend`; form: rows of a block and of a tile, and
    tiles of an entry; tables: always, tails, table and tokens; ids: `[R*Hs,S]`; listed: marks `[R*Hs,E*per]` of zeros,
    places and masks `[R*Hs,T]` and counts `[R*Hs]`, to be filled; means, mean_parts, sums: see
    `cpu._attend`."""
    (query, query_step, share, size, scale), (cache, block_step, head_step, heads) = queries, blocks
    out, out_step, factor = outs
    (always, tails, table, tokens), (acc, peak, total), (marks, places, masks, counts) = tables, sums, listed
    block, tile, per = form
    lists, splits = total.shape[:2]
    chosen = lists // tokens.shape[0]
    for which in prange(lists):
        r = which // chosen
        reads = always[r], tails[r], table[r]
        counts[which] = _listed(ids[which], (tile, per), reads, marks[which], places[which], masks[which])
    parts = splits - mean_parts
    units = lists * splits
    for unit in prange(units):
        which, split = unit // splits, unit % splits
        r, s = which // chosen, which % chosen
        own = query, tokens[r] * query_step + s * share * size, share, size, scale
        part, head = (acc[which, split], peak[which, split], total[which, split]), s * heads // chosen
        if split >= parts:
            means_part(own, means, head, (table[r], ids[which]), (split - parts, mean_parts), part)
        else:
            begin, stop = counts[which] * split // parts, counts[which] * (split + 1) // parts
            _rows_part(
                paired, own, (cache, block_step, head * head_step), (block, tile),
                (places[which, begin:stop], masks[which, begin:stop]), part,
            )  # fmt: skip
    joined(sums, tokens, chosen, size, out, out_step, factor)


def attend_rows(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    ids: Tensor,
    scale: float,
    means: MeanRows | None = None,
) -> None:
    """As `dispatch.attend_rows`."""
    served, chosen, count = ids.shape
    heads, size, tile, packed = cache.packed.shape[1], cache.size, pages.page, cache.packed
    share, lists, per = query.shape[1] // chosen, served * chosen, pages.unit // tile
    tiles, (of_keys, of_values) = pages.table.shape[1] * per, factors(cache)
    most, groups = pages.always.shape[1] + min(count, tiles), groups_of(means, pages)
    if tile > MOST:
        raise ValueError(f"a tile is {MOST} rows or less, got {tile}")
    with ONE_AT_A_TIME:
        threads = use_threads(4 * (most * tile + groups) * lists * share * size, STEP)
        mean_parts = -(-groups // PART_ROWS)
        splits = max(1, min(-(-PARTS * threads // lists), most * tile // PART_ROWS)) + mean_parts
        acc: Any = np.empty((lists, splits, share * size), np.float32)
        peak_total: Any = np.empty((2, lists, splits, share), np.float32)
        listed: Any = (
            np.zeros((lists, tiles), np.uint64), np.empty((lists, most), np.int64), np.empty((lists, most), np.uint64),
            np.empty(lists, np.int64),
        )  # fmt: skip
        _attend_rows(
            (storage_of(query), query.stride(0), share, size, np.float32(scale) * LOG2E * of_keys),
            (flat(packed), packed.stride(0), packed.stride(1), heads),
            (cache.block, tile, per), cache.packing == "pairs",
            (pages.always.numpy(), pages.tails.numpy(), pages.table.numpy(), pages.tokens.numpy()),
            ids.contiguous().numpy().reshape(lists, count), listed,
            means_of(means, cache, pages, 1), mean_parts, (acc, peak_total[0], peak_total[1]),
            (storage_of(out), out.stride(0), of_values),
        )  # fmt: skip
