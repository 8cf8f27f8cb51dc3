"""Attention over chosen pages of a serving engine's cache, compiled by numba for the CPU: the best pages by their
scores, read where they lie in its blocks (`cpu_products` says how they are packed).

The pages of a list are cut into parts, which are merged in their order: the result does not depend on how many threads
there are.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, StepPages
from sparseattn.kernels.attend_vllm_blocks.cpu_products import (
    SERVED,
    _ask_for_keys,
    _ask_for_values,
    _page_logits,
    _page_values,
)
from sparseattn.kernels.attend_vllm_blocks.cpu_rows import attend_rows as attend_rows
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import exponentials, join, peak_of
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, read, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.numba_vectors import LANES
from sparseattn.kernels.topk.cpu import best

PART_ROWS = 256  # of a list for which a part of its own pays
FEW = 1 << 14  # scores of which one thread finds the best in less time than it takes to wake another
PARTS = 4  # parts in all for each thread, at least, where there are rows for them


@njit  # not fastmath, under which `powers` may not be reordered
def _part(paired, queries, blocks, form, pages_read, part, sums):
    """Attention of a list's query heads over one part of its pages.

    queries: flat, the place of the first, how many, their size and the factor of logits; blocks: the cache flat, the
    step from block to block, and the head's place in one; form: rows of a block and of a page, and pages of an entry;
    pages_read: those always read, rows of the last of them, the table, and entries chosen; part: its number, and how
    many there are; sums: acc `[share*D]`, peak and total `[share]`, which are written.
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
    in_block = block // page
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
            for k in range(served):
                for r in range(rows[i], page):
                    weights[k * wide + i * page + r] = -np.inf
        for k in range(served):
            highest = peak_of(weights, k * wide, wide)
            peak[first + k] = highest
            total[first + k] = exponentials(weights, k * wide, wide, highest)
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


@njit
def _best_within(scores, ids, most):
    """Return the best `most` of a list, and behind them -1."""
    ids[most:] = -1
    best(scores, ids[:most])


@entry(parallel=True, cache=True, nogil=True)
def _attend(queries, blocks, form, paired, tables, scores, limits, ids, sums, outs):
    """Attend to blocks; queries: flat, with the step from token to token, how many share a list, their size and the
    factor of logits; blocks: flat, with the steps of block and head, and how many KV heads there are; form: see
    `_part`; tables: always `[R,F]`, tails `[R]`, table `[R,E]` and tokens `[R]`; scores `[R*Hs,P]`; limits `[R]`, pages
    chosen of each token's lists; ids `[R*Hs,S]`, to be filled; sums: acc `[R*Hs,splits,share*D]`, peak and total
    `[..,share]`; outs: flat, with the step from token to token."""
    (query, query_step, share, size, scale), (cache, block_step, head_step, heads), (out, out_step) = (
        queries,
        blocks,
        outs,
    )
    (always, tails, table, tokens), (acc, peak, total) = tables, sums
    lists, splits = total.shape[:2]
    chosen = lists // tokens.shape[0]
    if scores.size < FEW:
        for which in range(lists):
            _best_within(scores[which], ids[which], limits[which // chosen])
    else:
        for which in prange(lists):
            _best_within(scores[which], ids[which], limits[which // chosen])
    units = lists * splits
    for unit in prange(units):
        which, split = unit // splits, unit % splits
        r, s = which // chosen, which % chosen
        _part(
            paired, (query, tokens[r] * query_step + s * share * size, share, size, scale),
            (cache, block_step, s * heads // chosen * head_step), form, (always[r], tails[r], table[r], ids[which]),
            (split, splits), (acc[which, split], peak[which, split], total[which, split]),
        )  # fmt: skip
    for which in range(lists):
        r, s = which // chosen, which % chosen
        for k in range(share):
            join(acc[which], peak[which], total[which], k, size, out, tokens[r] * out_step + (s * share + k) * size)


def attend(
    query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, scores: Tensor, count: Any, scale: float
) -> None:
    """As `dispatch.attend_blocks`."""
    served, chosen, listed = scores.shape
    heads, size, page, packed = cache.packed.shape[1], cache.size, pages.page, cache.packed
    share, always = query.shape[1] // chosen, pages.always
    limits = np.minimum(np.broadcast_to(np.asarray(count, np.int64), served), listed).copy()
    lists, count = served * chosen, int(limits.max(initial=0))
    rows = (count + always.shape[1]) * page
    with ONE_AT_A_TIME:
        threads = use_threads(4 * rows * lists * share * size, STEP)
        splits = max(1, min(-(-PARTS * threads // lists), rows // PART_ROWS))
        acc: Any = np.empty((lists, splits, share * size), np.float32)
        peak_total: Any = np.empty((2, lists, splits, share), np.float32)
        ids: Any = np.empty((lists, count), np.int32)
        _attend(
            (storage_of(query), query.stride(0), share, size, np.float32(scale) * LOG2E),
            (storage_of(packed), packed.stride(0), packed.stride(1), heads),
            (cache.block, page, pages.unit // page), cache.packing == "pairs",
            (always.numpy(), pages.tails.numpy(), pages.table.numpy(), pages.tokens.numpy()),
            scores.numpy().reshape(lists, listed), limits, ids, (acc, peak_total[0], peak_total[1]),
            (storage_of(out), out.stride(0)),
        )  # fmt: skip
