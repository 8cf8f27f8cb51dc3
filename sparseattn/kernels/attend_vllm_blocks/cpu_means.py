"""Attention over the mean rows of groups that a list does not read, in compiled code: see `blocks.MeanRows`."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.cpu_byte_floats import factors
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import dot, read, storage_of
from sparseattn.kernels.numba_softmax import exponentials, peak_of
from sparseattn.kernels.numba_vectors import LANES

NONE: Any = np.empty(0, np.float32)


@njit  # not fastmath, under which exponentials may not be reordered
def means_part(queries, means, head, listed, part, sums):
    """Attention of a list's query heads over the means of one part of the groups of which it leaves rows out.

    queries, part, sums: see `cpu_part.page_part`; means: see `means_of`; head: KV head; listed: the table, and pages
    chosen.
    """
    (query, q, share, size, scale), (table, ids), (acc, peak, total) = queries, listed, sums
    (keys, values, step, of_keys, of_values, rows, unit, page), (split, splits) = means, part
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    per = unit // rows
    left = np.empty(table.shape[0] * per, np.int64)
    for group in range(left.shape[0]):
        left[group] = rows if table[group // per] >= 0 else 0
    for i in range(ids.shape[0]):
        if ids[i] >= 0:
            left[ids[i] * page // rows] -= page
    begin, stop, count = left.shape[0] * split // splits, left.shape[0] * (split + 1) // splits, 0
    for group in range(begin, stop):
        count += left[group] > 0
    if count == 0:
        return
    wide = (count + LANES - 1) // LANES * LANES
    places, weights = np.empty(count, np.int64), np.full(wide, -np.inf, np.float32)
    many, n = np.empty(count, np.float32), 0
    for group in range(begin, stop):
        if left[group] > 0:
            places[n] = head * step + (np.int64(table[group // per]) * per + group % per) * size
            many[n] = np.log2(np.float32(left[group]))
            n += 1
    for k in range(share):
        weights[count:] = -np.inf
        for i in range(count):
            weights[i] = dot(query, q + k * size, keys, places[i], size) * (scale / of_keys) + many[i]
        peak[k] = peak_of(weights, 0, wide)
        total[k] = exponentials(weights, 0, wide, peak[k])
        for i in range(count):
            weight = weights[i] / of_values
            for d in range(size):
                acc[k * size + d] += weight * read(values, places[i] + d)


def means_of(means: MeanRows | None, cache: BlockCache, pages: StepPages, page: int) -> Any:
    """Return what `means_part` takes of means: keys and values flat, the step from head to head, what logits and values
    are divided by, and rows of a group, of an entry and of a page.

    Args:
        means: None: there are none, which is a group of no rows.
        cache: whose numbers have factors.
        pages: that are chosen from.
        page: rows of what is chosen.

    Raises:
        ValueError: means that are not contiguous.
    """
    if means is None:
        return NONE, NONE, 0, np.float32(1), np.float32(1), 0, pages.unit, page
    if not (means.keys.is_contiguous() and means.values.is_contiguous()):
        raise ValueError("means of a head lie one after the other: keys and values are contiguous")
    return (
        storage_of(means.keys), storage_of(means.values), means.keys.stride(0), *factors(cache), means.rows, pages.unit,
        page,
    )  # fmt: skip


def groups_of(means: MeanRows | None, pages: StepPages) -> int:
    """Return how many means a list has at most."""
    return 0 if means is None else pages.table.shape[1] * (pages.unit // means.rows)
