"""Attention of one list of pages over a part of them, in compiled code."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.kernels.attend_vllm_blocks.cpu_products import (
    SERVED,
    _ask_for_keys,
    _ask_for_values,
    _page_logits,
    _page_values,
)
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import weigh
from sparseattn.kernels.attend_vllm_blocks.cpu_tiles import tile_part
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import read
from sparseattn.kernels.numba_tiles import CHANNELS, tiles
from sparseattn.kernels.numba_vectors import LANES
from sparseattn.kernels.topk.cpu import best

COLUMNS, PAIRS, TILES = 0, 1, 2  # how rows are packed; the last: in pairs, and tiles multiply them
PART_ROWS = 256  # of a list for which a part of its own pays
PARTS = 4  # parts in all for each thread, at least, where there are rows for them


@njit  # not fastmath, under which `powers` may not be reordered
def page_part(packing, queries, blocks, form, pages_read, part, sums):
    """Attention of a list's query heads over one part of its pages.

    packing: see `packed_as`; queries: flat, the place of the first, how many, their size and the factor of logits;
    blocks: the cache flat, the step from block to block, and the head's place in one; form: rows of a block and of a
    page, and pages of an entry; pages_read: those always read, rows of the last of them, the table, and entries
    chosen; part: its number, and how many there are; sums: acc `[share*D]`, peak and total `[share]`, which are
    written.
    """
    (query, q, share, size, scale), (cache, block_step, base), (block, page, per) = queries, blocks, form
    (always, tail, table, ids), (split, splits), (acc, peak, total) = pages_read, part, sums
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    pages = 0
    for i in range(always.shape[0]):
        pages += always[i] >= 0
    late = pages - 1  # the last of them is the sequence's last, of which `tail` rows are there
    for i in range(ids.shape[0]):
        pages += ids[i] >= 0
    begin, stop = pages * split // splits, pages * (split + 1) // splits
    count = stop - begin
    if count == 0:
        return
    places, rows = np.empty(count, np.int64), np.empty(count, np.int64)
    n, filled = 0, 0
    for i in range(always.shape[0]):
        if always[i] >= 0:
            if begin <= n < stop:
                places[filled], rows[filled] = always[i], tail if n == late else page
                filled += 1
            n += 1
    for i in range(ids.shape[0]):
        if ids[i] >= 0:
            if begin <= n < stop:
                places[filled] = np.int64(table[ids[i] // per]) * per + ids[i] % per
                rows[filled] = page
                filled += 1
            n += 1
    if packing == TILES and size % CHANNELS == 0:
        tile_part(
            (query, q, share, size, scale), (cache, block_step, base), (block, page), (places, rows),
            (acc, peak, total),
        )  # fmt: skip
        return
    paired, in_block = packing != COLUMNS, block // page
    wide = count * page
    weights, scaled = np.empty(SERVED * wide, np.float32), np.empty(SERVED * size, np.float32)
    for first in range(0, share, SERVED):
        served = min(SERVED, share - first)
        for d in range(served * size):
            scaled[d] = read(query, q + first * size + d) * scale
        for i in range(count):
            if i + 1 < count and first == 0:
                at = places[i + 1] // in_block * block_step + base
                row = places[i + 1] % in_block * page
                _ask_for_keys(paired, cache, at + (row * size if paired else row), block, size, page)
            at = places[i] // in_block * block_step + base
            row = places[i] % in_block * page
            key = at + (row * size if paired else row)
            _page_logits(paired, (cache, key, block, page), (scaled, size, served), (weights, i * page, wide))
        weigh(weights, served, rows, page, peak[first:], total[first:])
        for i in range(count):
            if i + 1 < count and first == 0:
                at = places[i + 1] // in_block * block_step + base + block * size
                row = places[i + 1] % in_block * page
                _ask_for_values(paired, cache, at + row * (LANES if paired else size), block, size, page)
            at = places[i] // in_block * block_step + base + block * size
            row = places[i] % in_block * page
            value = at + row * (LANES if paired else size)
            weighed = weights, i * page, wide
            _page_values(paired, (cache, value, block, rows[i]), weighed, (acc[first * size :], size, served))


def packed_as(cache: BlockCache) -> int:
    """Return what compiled code is told of a cache's packing."""
    if cache.packing == "columns":
        return COLUMNS
    return TILES if cache.packed.dtype == torch.bfloat16 and tiles() else PAIRS


@njit
def best_within(scores, ids, most):
    """Return the best `most` of a list, and behind them -1."""
    ids[most:] = -1
    best(scores, ids[:most])
