"""A step's tables in compiled code: made, rounded, and as what each code takes from the highest sum there can be."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, dot, dot4
from sparseattn.kernels.product_codes.codes import LEVELS

FULL = 254  # the largest sum of 8 bits that is told from 255, where sums stop


@njit(fastmath=set(FAST))
def make_tables(query, turn, turn_at, centroids, centroids_at, shape, turned, out):
    """`out` `[G,M,K]` float32: what codes add to the logits of a KV head's queries `[G*D]` float32.

    turn, centroids: flat, stored as `numba_rows` has them, from these places on; shape: G, M, K, d and D, d = D where
    each centroid is of all channels; turned: `[G*D]`, which is written.
    """
    share, subspaces, entries, size, wide = shape
    step = size if size < wide else 0
    for d in range(wide):
        g = 0
        while share - g >= 4:
            first = g * wide
            (
                turned[first + d], turned[first + wide + d], turned[first + 2 * wide + d], turned[first + 3 * wide + d]
            ) = dot4(query, first, turn, turn_at + d * wide, wide)  # fmt: skip
            g += 4
        while g < share:
            turned[g * wide + d] = dot(query, g * wide, turn, turn_at + d * wide, wide)
            g += 1
    for m in range(subspaces):
        for k in range(entries):
            at = centroids_at + (m * entries + k) * size
            for g in range(share):
                out[g, m, k] = dot(turned, g * wide + m * step, centroids, at, size)


@njit
def round_tables(tables, names, shortest):
    """Round the tables `[G,M,K]` float32 of a KV head to `names` `[G,M or M + 1,K]` uint8, and return the step,
    `shortest` or more."""
    share, subspaces, entries = tables.shape
    step = np.float32(shortest)
    least = np.empty((share, subspaces), np.float32)
    for g in range(share):
        for m in range(subspaces):
            low, high = tables[g, m, 0], tables[g, m, 0]
            for k in range(entries):
                low, high = min(low, tables[g, m, k]), max(high, tables[g, m, k])
            least[g, m] = low
            step = max(step, (high - low) / np.float32(LEVELS))
    scale = step if step > 0 else np.float32(1)
    names[:] = 0
    for g in range(share):
        for m in range(subspaces):
            for k in range(entries):
                names[g, m, k] = np.uint8(min(np.rint((tables[g, m, k] - least[g, m]) / scale), np.float32(LEVELS)))
    return step


@njit
def make_losses(names, tops, highest, shape, limit, losses, scales, firsts):
    """Write how far codes are below the best code of their subspace, `losses` uint8, and what their sums begin with,
    `firsts` `[G]` uint8, so that sums reach 255 for no row that is `limit` at most below `tops` `[G]` int16.

    names: as losses flat of `[G,M,K]` uint8; highest: `[G]` int16, no less than what is added to any row's sum; shape:
    G, M, K. A row that is not farther below has a sum of losses of `far` at most, with how far what is added to it is
    below the highest. Where that is more than 254, losses are taken times 254 / far and rounded down, which makes no
    sum of them larger than 254. So is what is added, times `scales` `[G]` uint16, fractions of 16 bits.
    """
    share, subspaces, entries = shape
    for g in range(share):
        far, first = limit - np.int64(tops[g]) + np.int64(highest[g]), g * subspaces * entries
        for m in range(subspaces):
            at = first + m * entries
            far += names[at : at + entries].max()
        firsts[g] = 255 if far < 0 else max(FULL - far, 0)
        # A little less than the ratio, as float32 may round a product up.
        by = np.float32(FULL / far * (1 - 1e-6)) if far > FULL else np.float32(1)
        scales[g] = np.uint16(by * np.float32(65_535))
        for m in range(subspaces):
            at = first + m * entries
            top = np.int32(names[at : at + entries].max())
            for k in range(at, at + entries):
                losses[k] = np.uint8(np.int32(np.float32(top - np.int32(names[k])) * by))
