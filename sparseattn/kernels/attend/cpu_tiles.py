"""The online softmax by matrix tiles, for many queries of one KV head: a check of drafts, or wide query groups.

Keys are multiplied as they lie where rows are adjacent, and else from a copy; of values two rows are interleaved. The
weights are float32; each is multiplied as the sum of two bfloat16 numbers, within 2^-16 of it.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import array_at, exp2
from sparseattn.kernels.numba_softmax import exponentials, peak_of
from sparseattn.kernels.numba_tiles import (
    CHANNELS,
    PAIR,
    TILE_QUERIES,
    TILE_ROWS,
    TILE_SHAPES,
    begin,
    halved,
    loaded,
    multiplied,
    released,
    shaped,
    stored,
    sums_grown,
    sums_stored,
    sums_zeroed,
    tiles,
    zeroed,
)
from sparseattn.kernels.numba_vectors import FLOATS, LANES, WORDS, place_in, splat, times_plus

ROWS = 4 * PAIR  # whose logits are known before their values are read
FEWEST = 8  # queries from which on tiles pay: 14 ms, by vectors 20; for 4 queries 14 and 15 (the log, 2026-11-28)


def fit(dtype: torch.dtype, size: int) -> bool:
    """Return whether tiles multiply rows of a dtype and size here."""
    return dtype == torch.bfloat16 and size % CHANNELS == 0 and tiles()


@intrinsic
def _line(typing, array, at, source, place):
    """Copy 32 numbers of 16 bits from `source[place:]` to `array[at:]`."""

    def code(context, builder, signature, arguments):
        array_, at_, source_, place_ = arguments
        line = ir.VectorType(ir.IntType(16), PAIR)
        x = builder.load(place_in(context, builder, source, source_, place_, line), align=2)
        builder.store(x, place_in(context, builder, array, array_, at_, line), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, source, types.intp), code


@intrinsic
def _interleaved(typing, array, at, step, source, first, second):
    """Put 32 numbers of 16 bits of two rows at `array[at:]` in turns, the last 16 of each `step` behind."""

    def code(context, builder, signature, arguments):
        array_, at_, step_, source_, first_, second_ = arguments
        line, word = ir.VectorType(ir.IntType(16), PAIR), ir.IntType(32)
        rows = [
            builder.load(place_in(context, builder, source, source_, place, line), align=2)
            for place in (first_, second_)
        ]
        for half in range(2):
            lanes = [half * TILE_ROWS + n // 2 + (n % 2) * PAIR for n in range(PAIR)]
            x = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(word, PAIR), lanes))
            place = at_ if half == 0 else builder.add(at_, step_)
            builder.store(x, place_in(context, builder, array, array_, place, line), align=2)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, source, types.intp, types.intp), code


@intrinsic
def _turned(typing, sums, first, out, at, step, scale):
    """Put 16 rows of 16 numbers from `sums[first:]` on, times `scale`, at `out[at:]` as columns, `step` apart."""

    def code(context, builder, signature, arguments):
        sums_, first_, out_, at_, step_, scale_ = arguments
        lines = []
        for row in range(LANES):
            place = builder.add(first_, ir.Constant(at_.type, row * LANES))
            lines.append(builder.load(place_in(context, builder, sums, sums_, place, FLOATS), align=4))
        for bit in (1, 2, 4, 8):  # numbers change places with those across the diagonal, in ever larger squares
            upper = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
            lower = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
            for row in (row for row in range(LANES) if not row & bit):
                pair = lines[row], lines[row | bit]
                lines[row], lines[row | bit] = (
                    builder.shuffle_vector(*pair, ir.Constant(WORDS, lanes)) for lanes in (upper, lower)
                )
        factor = splat(builder, scale_, FLOATS)
        for column, line in enumerate(lines):
            place = builder.add(at_, builder.mul(step_, ir.Constant(at_.type, column)))
            to = place_in(context, builder, out, out_, place, FLOATS)
            builder.store(builder.fmul(line, factor), to, align=4)
        return context.get_dummy_value()

    return types.void(sums, types.intp, out, types.intp, types.intp, types.float32), code


@njit
def room_for(share, size):
    """Return how many bytes `add_rows` works in."""
    tiles_of, groups = (share + TILE_ROWS - 1) // TILE_ROWS, (share + TILE_QUERIES - 1) // TILE_QUERIES
    numbers = tiles_of * TILE_ROWS * ROWS + TILE_ROWS * CHANNELS + groups * TILE_QUERIES
    shorts = (tiles_of + 1) * TILE_ROWS * size + ROWS * size + 2 * groups * TILE_QUERIES * ROWS
    return 4 * numbers + 2 * shorts + TILE_SHAPES


@njit
def _views(room, share, size):
    """Return what there is in the room: weights, sums of values, what sums weigh less once a larger logit is found, the
    queries as tiles, a copy of rows, interleaved values, halves of weights, and the shapes of tiles. Of one array, as
    making one takes longer than a view: parts by vectors have an empty room."""
    tiles_of, groups = (share + TILE_ROWS - 1) // TILE_ROWS, (share + TILE_QUERIES - 1) // TILE_QUERIES
    at = room.ctypes.data
    weights = array_at(np.float32, at, tiles_of * TILE_ROWS * ROWS)
    at += 4 * weights.shape[0]
    parts = array_at(np.float32, at, TILE_ROWS * CHANNELS)
    at += 4 * parts.shape[0]
    shrinks = array_at(np.float32, at, groups * TILE_QUERIES)
    at += 4 * shrinks.shape[0]
    tiled = array_at(np.uint16, at, tiles_of * TILE_ROWS * size)
    at += 2 * tiled.shape[0]
    held = array_at(np.uint16, at, TILE_ROWS * size)
    at += 2 * held.shape[0]
    pairs = array_at(np.uint16, at, ROWS * size)
    at += 2 * pairs.shape[0]
    halves = array_at(np.uint16, at, 2 * groups * TILE_QUERIES * ROWS)
    at += 2 * halves.shape[0]
    return weights, parts, shrinks, tiled, held, pairs, halves, array_at(np.uint8, at, TILE_SHAPES)


@njit
def prepare(room, query, share, size):
    """Put a group's queries, flat as they are stored, into the room as tiles: 32 channels of 16 queries, two to a
    word; and the shapes of tiles."""
    _, _, _, tiled, _, _, _, shapes = _views(room, share, size)
    shapes[:] = 0
    for tile in range(8):
        shaped(shapes, tile, TILE_ROWS, 2 * PAIR)
    tiled[:] = 0
    for g in range(share):
        base = g // TILE_ROWS * TILE_ROWS * size + g % TILE_ROWS * 2
        for d in range(size):
            tiled[base + d // 2 * PAIR + d % 2] = query[g * size + d]


@njit
def _adjacent(at, first, stop):
    """Return whether rows lie one after the other, all as far apart."""
    step, same = at[first + 1] - at[first], True
    for r in range(first + 1, stop):
        same = same and at[r] - at[r - 1] == step
    return same


@njit
def _logits(asked, keys, count, held, sums, weights):
    """Logits of up to `ROWS` rows, rounded up to whole tiles, `[share,ROWS]`."""
    (tiled, share, size, scale), (rows, at) = asked, keys
    turned = TILE_ROWS * TILE_ROWS
    t = 0
    while t < count:
        if t + 4 * TILE_ROWS <= count and _adjacent(at, t, t + 4 * TILE_ROWS):
            step = at[t + 1] - at[t]
            for first in range(0, share, TILE_ROWS):
                sums_zeroed()
                for d in range(0, size, PAIR):
                    place = at[t] + d
                    loaded(4, tiled, first * size + d * TILE_ROWS, PAIR)
                    loaded(5, rows, place, step)
                    multiplied(0, 5, 4)
                    loaded(6, rows, place + TILE_ROWS * step, step)
                    multiplied(1, 6, 4)
                    loaded(5, rows, place + 2 * TILE_ROWS * step, step)
                    multiplied(2, 5, 4)
                    loaded(6, rows, place + 3 * TILE_ROWS * step, step)
                    multiplied(3, 6, 4)
                sums_stored(sums, turned, TILE_ROWS)
                for n in range(4):
                    _turned(sums, n * turned, weights, first * ROWS + t + n * TILE_ROWS, ROWS, scale)
            t += 4 * TILE_ROWS
            continue
        whole = t + TILE_ROWS <= count and _adjacent(at, t, t + TILE_ROWS)
        if not whole:
            for r in range(t, min(t + TILE_ROWS, count)):
                for d in range(0, size, PAIR):
                    _line(held, (r - t) * size + d, rows, at[r] + d)
        for first in range(0, share, TILE_ROWS):
            zeroed(0)
            for d in range(0, size, PAIR):
                if whole:
                    loaded(5, rows, at[t] + d, at[t + 1] - at[t])
                else:
                    loaded(5, held, d, size)
                loaded(4, tiled, first * size + d * TILE_ROWS, PAIR)
                multiplied(0, 5, 4)
            stored(0, sums, 0, TILE_ROWS)
            _turned(sums, 0, weights, first * ROWS + t, ROWS, scale)
        t += TILE_ROWS


@njit
def logits(asked, keys, count, out):
    """Logits `[share,ROWS]`, flat, of up to `ROWS` rows, rounded up to whole tiles; asked and keys as of `add_rows`."""
    (room, share, size, scale), (rows, at) = asked, keys
    _, parts, _, tiled, held, _, _, shapes = _views(room, share, size)
    begin(shapes)
    _logits((tiled, share, size, scale), (rows, at), count, held, parts, out)
    released()


@njit  # not fastmath, under which `powers` may not be reordered
def _softmax(weights, w, biased, more, count, whole, peak, total, g):
    """Make weights of the logits of `whole` rows, of which `count` are there, `more` added to them if they are biased;
    return the factor of what was summed before."""
    if biased:
        for t in range(count):
            weights[w + t] += more[t]
    for t in range(count, whole):
        weights[w + t] = -np.inf
    highest = max(peak[g], peak_of(weights, w, whole))
    if highest == -np.inf:  # so far logits of -inf alone, or what is no number and stays so
        total[g] += exponentials(weights, w, whole, np.float32(0))
        return np.float32(1)
    shrink = exp2(peak[g] - highest) if peak[g] > -np.inf else np.float32(0)
    total[g] = total[g] * shrink + exponentials(weights, w, whole, highest)
    peak[g] = highest
    return shrink


@intrinsic
def _added(typing, acc, a, shrink, sums, first, second):
    """Shrink 64 numbers from `acc[a:]` on, and add those from `sums[first:]` and `sums[second:]` on."""

    def code(context, builder, signature, arguments):
        acc_, a_, shrink_, sums_, first_, second_ = arguments
        factor = splat(builder, shrink_, FLOATS)
        for n in range(0, CHANNELS, LANES):
            lane = ir.Constant(a_.type, n)
            to = place_in(context, builder, acc, acc_, builder.add(a_, lane), FLOATS)
            one, other = (
                builder.load(place_in(context, builder, sums, sums_, builder.add(at, lane), FLOATS), align=4)
                for at in (first_, second_)
            )
            total = times_plus(builder, builder.load(to, align=4), factor, builder.fadd(one, other))
            builder.store(total, to, align=4)
        return context.get_dummy_value()

    return types.void(acc, types.intp, types.float32, sums, types.intp, types.intp), code


@njit
def add_rows(asked, keys, values, added, sums):
    """As `cpu_softmax.add_rows`; asked: the room (`prepare`), share, size and the factor of logits; added: what comes
    to logits, whether anything does, and how many rows there are."""
    (room, share, size, scale), (keys, key_at), (values, value_at) = asked, keys, values
    (more, biased, count), (peak, total, acc) = added, sums
    if count == 0:
        return
    weights, parts, shrinks, tiled, held, pairs, halves, shapes = _views(room, share, size)
    groups = (share + TILE_QUERIES - 1) // TILE_QUERIES
    for first in range(0, count, ROWS):
        many = min(ROWS, count - first)
        whole = (many + PAIR - 1) // PAIR * PAIR
        begin(shapes)
        _logits((tiled, share, size, scale), (keys, key_at[first:]), many, held, parts, weights)
        released()
        for g in range(share):
            shrinks[g] = _softmax(weights, g * ROWS, biased, more[first:], many, whole, peak, total, g)
        for g in range(groups * TILE_QUERIES):  # those beyond the last query are summed for nobody
            to = (g // TILE_QUERIES * TILE_ROWS + g % TILE_QUERIES) * ROWS
            halved(weights, g * ROWS, whole, halves, to, to + TILE_QUERIES * ROWS)
        step = PAIR // 2 * PAIR
        for t in range(0, whole, 2):
            one = value_at[first + t] if t < many else value_at[first]
            other = value_at[first + t + 1] if t + 1 < many else value_at[first]
            to = t // PAIR * PAIR * size + t % PAIR // 2 * PAIR
            for d in range(0, size, PAIR):
                _interleaved(pairs, to + d // TILE_ROWS * step, step, values, one + d, other + d)
        begin(shapes)
        for group in range(groups):
            for d in range(0, size, CHANNELS):
                sums_zeroed()
                for t in range(0, whole, PAIR):
                    at = t * size + d // TILE_ROWS * step
                    sums_grown(halves, group * TILE_ROWS * ROWS + t, ROWS, pairs, at, step)
                sums_stored(parts, TILE_ROWS, CHANNELS)
                for k in range(min(TILE_QUERIES, share - group * TILE_QUERIES)):
                    g = group * TILE_QUERIES + k
                    _added(acc, g * size + d, shrinks[g], parts, k * CHANNELS, (TILE_QUERIES + k) * CHANNELS)
        released()
