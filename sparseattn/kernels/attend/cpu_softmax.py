"""The online softmax in compiled code: rows join a query group's sums a tile at a time, parts are joined at the end."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, LN2, add_to, dot, dot4, exp2, fetch, read

TILE = 32  # rows whose logits are known before their values are read
BATCH = 16 * TILE  # rows of which the first line is asked for before any is summed (the log, 2026-11-26)
AHEAD = 16  # rows between one that is summed and one whose lines are asked for


@njit(fastmath=set(FAST))
def _sum4(acc, a, rows, at, t, weights, w, size):
    """Add four weighted rows to the sums of one query head."""
    first, second, third, fourth = at[t], at[t + 1], at[t + 2], at[t + 3]
    w0, w1, w2, w3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    for d in range(size):
        x, y = w0 * read(rows, first + d), w1 * read(rows, second + d)
        z, u = w2 * read(rows, third + d), w3 * read(rows, fourth + d)
        add_to(acc, a + d, (x + y) + (z + u))


@njit(fastmath=set(FAST))
def _sum4x4(acc, a, rows, at, t, weights, w, size):
    """Add four weighted rows to the sums of four query heads: each row is widened once, each sum stored once."""
    first, second, third, fourth = at[t], at[t + 1], at[t + 2], at[t + 3]
    a0, a1, a2, a3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    b0, b1, b2, b3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    c0, c1, c2, c3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    w += TILE
    e0, e1, e2, e3 = weights[w], weights[w + 1], weights[w + 2], weights[w + 3]
    for d in range(size):
        x, y = read(rows, first + d), read(rows, second + d)
        z, u = read(rows, third + d), read(rows, fourth + d)
        add_to(acc, a + d, (a0 * x + a1 * y) + (a2 * z + a3 * u))
        add_to(acc, a + size + d, (b0 * x + b1 * y) + (b2 * z + b3 * u))
        add_to(acc, a + 2 * size + d, (c0 * x + c1 * y) + (c2 * z + c3 * u))
        add_to(acc, a + 3 * size + d, (e0 * x + e1 * y) + (e2 * z + e3 * u))


@njit(fastmath=set(FAST))
def add_tile(queries, keys, values, added, weights, sums):
    """One step of the online softmax: rows join the sums `peak`, `total` `[share]` and `acc` `[share*size]`.

    queries: `[share*size]` flat, share and size; keys, values: flat, with the places of the tile's rows; added: what
    comes to the logits of each row, `[TILE]`, how many rows there are, and for how many of these the row `AHEAD` places
    behind is asked for; weights: `[share*TILE]`, to work in.
    """
    (scaled, share, size), (keys, key_at), (values, value_at) = queries, keys, values
    (more, count, coming), (peak, total, acc) = added, sums
    fours = share & ~3
    for t in range(count):
        if t < coming:
            fetch(keys, key_at[t + AHEAD], size)
        for g in range(0, fours, 4):
            a, b, c, e = dot4(scaled, g * size, keys, key_at[t], size)
            at = g * TILE + t
            weights[at], weights[at + TILE], weights[at + 2 * TILE], weights[at + 3 * TILE] = a, b, c, e
        for g in range(fours, share):
            weights[g * TILE + t] = dot(scaled, g * size, keys, key_at[t], size)
    whole = (count + 3) & ~3
    for t in range(count, whole):  # a row to make up four weighs nothing
        value_at[t] = value_at[0]
    for g in range(share):
        w, highest = g * TILE, peak[g]
        for t in range(count):  # always: where the sum depended on a flag, bfloat16 took 2 % longer
            weights[w + t] += more[t]
        for t in range(count):
            highest = max(highest, weights[w + t])
        if highest == -np.inf:  # so far logits of -inf alone, which weigh nothing; -inf - -inf would be NaN
            for t in range(whole):  # but what is NaN stays
                weights[w + t] = weights[w + t] if t < count and weights[w + t] != -np.inf else np.float32(0)
                total[g] += weights[w + t]
            continue
        shrink = exp2(peak[g] - highest) if peak[g] > -np.inf else np.float32(0)
        added = np.float32(0)
        for t in range(count):
            weight = exp2(weights[w + t] - highest)
            weights[w + t] = weight
            added += weight
        for t in range(count, whole):
            weights[w + t] = 0
        if shrink != 1:
            for d in range(size):
                acc[g * size + d] *= shrink
        peak[g], total[g] = highest, total[g] * shrink + added
    for t in range(0, count, 4):
        for row in range(t, min(t + 4, coming)):
            fetch(values, value_at[row + AHEAD], size)
        for g in range(0, fours, 4):
            _sum4x4(acc, g * size, values, value_at, t, weights, g * TILE + t, size)
        for g in range(fours, share):
            _sum4(acc, g * size, values, value_at, t, weights, g * TILE + t, size)


@njit
def add_rows(queries, keys, values, added, weights, sums):
    """`add_tile` for all tiles of a batch: `added` says how many rows there are, and all places are known.

    All of a row's lines are asked for a few rows before their use, between the sums. On a row's first line a processor
    waits for where that lies, so these were asked for in one go.
    """
    (keys, key_at), (values, value_at), (more, count) = keys, values, added
    size = queries[2]
    for t in range(min(AHEAD, count)):
        fetch(keys, key_at[t], size)
        fetch(values, value_at[t], size)
    for first in range(0, count, TILE):
        added = more[first:], min(TILE, count - first), count - first - AHEAD
        add_tile(queries, (keys, key_at[first:]), (values, value_at[first:]), added, weights, sums)


@njit(fastmath=set(FAST))
def join_parts(acc, peak, total, g, out, lse):
    """Join the parts `acc` `[splits,share*D]` of query head g into `out` `[share,D]` and `lse` `[share]`."""
    splits, size = acc.shape[0], out.shape[1]
    highest, whole = np.float32(-np.inf), np.float32(0)
    for split in range(splits):
        highest = max(highest, peak[split, g])
    for d in range(size):
        out[g, d] = 0
    for split in range(splits):
        if total[split, g] != 0:
            shrink = exp2(peak[split, g] - highest)
            whole += total[split, g] * shrink
            for d in range(size):
                out[g, d] += shrink * acc[split, g * size + d]
    lse[g] = highest
    if whole != 0:
        lse[g] = (highest + np.log2(whole)) * LN2
        for d in range(size):
            out[g, d] /= whole
