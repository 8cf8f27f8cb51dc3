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

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.cpu_bounded import attend_bounded as attend_bounded
from sparseattn.kernels.attend_vllm_blocks.cpu_bounds import write_bounds as write_bounds
from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import factors, flat
from sparseattn.kernels.attend_vllm_blocks.cpu_means import groups_of, means_of, means_part
from sparseattn.kernels.attend_vllm_blocks.cpu_part import PART_ROWS, PARTS, best_within, packed_as, page_part
from sparseattn.kernels.attend_vllm_blocks.cpu_rows import attend_rows as attend_rows
from sparseattn.kernels.attend_vllm_blocks.cpu_softmax import joined
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads

FEW = 1 << 14  # scores of which one thread finds the best in less time than it takes to wake another


@entry(parallel=True, cache=True, nogil=True)
def _attend(queries, blocks, form, packing, tables, scores, limits, ids, means, mean_parts, sums, outs):
    """Attend to blocks; queries: flat, with the step from token to token, how many share a list, their size and the
    factor of logits; blocks: flat, with the steps of block and head, and how many KV heads there are; form: see
    `page_part`; tables: always `[R,F]`, tails `[R]`, table `[R,E]` and tokens `[R]`; scores `[R*Hs,P]`; limits `[R]`,
    pages chosen of each token's lists; ids `[R*Hs,S]`, to be filled; means: see `means_of`; mean_parts: the last
    splits, which are of means; sums: acc `[R*Hs,splits,share*D]`, peak and total `[..,share]`; outs: flat, with the
    step from token to token and the factor of values."""
    (query, query_step, share, size, scale), (cache, block_step, head_step, heads) = queries, blocks
    out, out_step, factor = outs
    (always, tails, table, tokens), (acc, peak, total) = tables, sums
    lists, splits = total.shape[:2]
    chosen = lists // tokens.shape[0]
    if scores.size < FEW:
        for which in range(lists):
            best_within(scores[which], ids[which], limits[which // chosen])
    else:
        for which in prange(lists):
            best_within(scores[which], ids[which], limits[which // chosen])
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
            page_part(
                packing, own, (cache, block_step, head * head_step), form, (always[r], tails[r], table[r], ids[which]),
                (split, parts), part,
            )  # fmt: skip
    joined(sums, tokens, chosen, size, out, out_step, factor)


def attend(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    scores: Tensor,
    count: Any,
    scale: float,
    means: MeanRows | None = None,
) -> None:
    """As `dispatch.attend_blocks`."""
    served, chosen, listed = scores.shape
    heads, size, page, packed = cache.packed.shape[1], cache.size, pages.page, cache.packed
    share, always, (of_keys, of_values) = query.shape[1] // chosen, pages.always, factors(cache)
    limits = np.minimum(np.broadcast_to(np.asarray(count, np.int64), served), listed).copy()
    lists, count = served * chosen, int(limits.max(initial=0))
    rows, groups = (count + always.shape[1]) * page, groups_of(means, pages)
    with ONE_AT_A_TIME:
        threads = use_threads(4 * (rows + groups) * lists * share * size, STEP)
        mean_parts = -(-groups // PART_ROWS)
        splits = max(1, min(-(-PARTS * threads // lists), rows // PART_ROWS)) + mean_parts
        acc: Any = np.empty((lists, splits, share * size), np.float32)
        peak_total: Any = np.empty((2, lists, splits, share), np.float32)
        ids: Any = np.empty((lists, count), np.int32)
        _attend(
            (storage_of(query), query.stride(0), share, size, np.float32(scale) * LOG2E * of_keys),
            (flat(packed), packed.stride(0), packed.stride(1), heads),
            (cache.block, page, pages.unit // page), packed_as(cache),
            (always.numpy(), pages.tails.numpy(), pages.table.numpy(), pages.tokens.numpy()),
            scores.numpy().reshape(lists, listed), limits, ids,
            means_of(means, cache, pages, page), mean_parts, (acc, peak_total[0], peak_total[1]),
            (storage_of(out), out.stride(0), of_values),
        )  # fmt: skip
