"""Products by matrix tiles (AMX), for many queries of one KV head.

Keys are multiplied as they lie where rows are adjacent, and else from a copy; of values two rows are interleaved. The
weights are float32; each is multiplied as the sum of two bfloat16 numbers, within 2^-16 of it.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparseattn.kernels.attend.cpu_sixteens import ROWS, adjacent, copied_line, turned
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_tiles import (
    CHANNELS,
    PAIR,
    TILE_QUERIES,
    TILE_ROWS,
    begin,
    halved,
    loaded,
    multiplied,
    released,
    stored,
    sums_grown,
    sums_stored,
    sums_zeroed,
    zeroed,
)
from sparseattn.kernels.numba_vectors import FLOATS, LANES, place_in, splat, times_plus


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


@njit
def logits_by_tiles(asked, keys, count, room, weights):
    """Logits of up to `ROWS` rows, rounded up to whole tiles, `[share,ROWS]`; room: see `cpu_many`."""
    (tiled, share, size, scale), (rows, at), (sums, held, shapes) = asked, keys, room
    begin(shapes)
    square = TILE_ROWS * TILE_ROWS
    t = 0
    while t < count:
        if t + 4 * TILE_ROWS <= count and adjacent(at, t, t + 4 * TILE_ROWS):
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
                sums_stored(sums, square, TILE_ROWS)
                for n in range(4):
                    turned(sums, n * square, weights, first * ROWS + t + n * TILE_ROWS, ROWS, scale)
            t += 4 * TILE_ROWS
            continue
        whole = t + TILE_ROWS <= count and adjacent(at, t, t + TILE_ROWS)
        if not whole:
            for r in range(t, min(t + TILE_ROWS, count)):
                for d in range(0, size, PAIR):
                    copied_line(held, (r - t) * size + d, rows, at[r] + d)
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
            turned(sums, 0, weights, first * ROWS + t, ROWS, scale)
        t += TILE_ROWS
    released()


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
def values_by_tiles(weights, shrinks, values, count, room, share, size, acc):
    """Shrink the sums `acc` `[share*size]` by `shrinks`, and add the values of up to `ROWS` rows times `weights`, which
    are 0 for rows behind the last up to a whole pair; room: see `cpu_many`."""
    (values, value_at), (parts, pairs, halves, shapes) = values, room
    groups, whole = (share + TILE_QUERIES - 1) // TILE_QUERIES, (count + PAIR - 1) // PAIR * PAIR
    for g in range(groups * TILE_QUERIES):  # those beyond the last query are summed for nobody
        to = (g // TILE_QUERIES * TILE_ROWS + g % TILE_QUERIES) * ROWS
        halved(weights, g * ROWS, whole, halves, to, to + TILE_QUERIES * ROWS)
    step = PAIR // 2 * PAIR
    for t in range(0, whole, 2):
        one = value_at[t] if t < count else value_at[0]
        other = value_at[t + 1] if t + 1 < count else value_at[0]
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
