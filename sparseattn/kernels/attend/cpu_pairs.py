"""Products whose sums stay in registers, for several queries of one KV head, where there are no matrix tiles.

Logits are products of pairs of bfloat16 (AVX-512 BF16): a pair of a row's channels with those of 16 queries. Values
are widened and summed in float32, 64 channels of up to 6 queries at a time. Memory is kept busy throughout: while keys
are multiplied their values are asked for, and while values are summed the next keys.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.attend.cpu_sixteens import LINE, ROWS, adjacent, copied_line, turned
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_pairs import pairs_added
from sparseattn.kernels.numba_tiles import CHANNELS
from sparseattn.kernels.numba_vectors import (
    FLOAT,
    FLOATS,
    LANES,
    WORD,
    WORDS,
    ask_for,
    every,
    place_in,
    splat,
    times_plus,
)

AT_ONCE = 8  # rows whose products with 16 queries stay in registers
SERVED = 6  # queries whose sums of `CHANNELS` channels stay in registers
VECTORS = CHANNELS // LANES


@intrinsic(prefer_literal=True)
def _products(typing, lanes, asked, q, rows, at, step, size, sums, s, coming, c):
    """Put the products of 8 rows from `rows[at:]` on, `step` apart, with 8 or 16 (`lanes`) queries into `sums[s:]`,
    `[8,16]`. Queries lie at `asked[q:]`, pair by pair of the channels of 16 of them. Meanwhile memory is asked for as
    many adjacent rows from `coming[c:]` on."""
    if not isinstance(lanes, types.IntegerLiteral):
        return None

    def code(context, builder, signature, arguments):
        _, asked_, q_, rows_, at_, step_, size_, sums_, s_, coming_, c_ = arguments
        floats = ir.VectorType(FLOAT, lanes.literal_value)
        words = ir.VectorType(WORD, lanes.literal_value)

        def number(n):
            return ir.Constant(at_.type, n)

        totals = [cgutils.alloca_once(builder, floats) for _ in range(AT_ONCE)]
        for total in totals:
            builder.store(every(floats, 0.0), total)
        with cgutils.for_range(builder, builder.lshr(size_, number(1))) as loop:
            place = builder.add(c_, builder.mul(loop.index, number(LINE // 2)))
            ask_for(builder, place_in(context, builder, coming, coming_, place))
            place = builder.add(q_, builder.mul(loop.index, number(LINE)))
            queries = builder.load(place_in(context, builder, asked, asked_, place, words), align=2)
            first = builder.add(at_, builder.mul(loop.index, number(2)))
            for r, total in enumerate(totals):
                place = builder.add(first, builder.mul(step_, number(r)))
                pair = builder.load(place_in(context, builder, rows, rows_, place, WORD), align=2)
                summed = pairs_added(builder, builder.load(total), queries, splat(builder, pair, words))
                builder.store(summed, total)
        for r, total in enumerate(totals):
            to = place_in(context, builder, sums, sums_, builder.add(s_, number(r * LANES)), floats)
            builder.store(builder.load(total), to, align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(lanes, asked, place, rows, place, place, place, sums, place, coming, place), code


@njit
def logits_by_pairs(asked, keys, count, coming, room, weights):
    """Logits of up to `ROWS` rows, rounded up to whole 16s, `[share,ROWS]`; coming: as many rows that are read next;
    room: see `cpu_many`."""
    (tiled, share, size, scale), (rows, at), (sums, held, _) = asked, keys, room
    others, other_at = coming
    for t in range(0, count, LANES):
        many = min(LANES, count - t)
        whole = many == LANES and adjacent(at, t, t + LANES)
        if not whole:
            for r in range(many):
                for d in range(0, size, LINE):
                    copied_line(held, r * size + d, rows, at[t + r] + d)
        for first in range(0, share, LANES):
            q = first * size
            for half in range(0, LANES, AT_ONCE):
                place, step = (at[t + half], at[t + 1] - at[t]) if whole else (half * size, size)
                other, s = other_at[min(t + half, count - 1)], half * LANES
                if whole and share - first <= LANES // 2:
                    _products(8, tiled, q, rows, place, step, size, sums, s, others, other)
                elif whole:
                    _products(16, tiled, q, rows, place, step, size, sums, s, others, other)
                elif share - first <= LANES // 2:
                    _products(8, tiled, q, held, place, step, size, sums, s, others, other)
                else:
                    _products(16, tiled, q, held, place, step, size, sums, s, others, other)
            turned(sums, 0, weights, first * ROWS + t, ROWS, scale)


@intrinsic
def _summed(typing, served, weights, w, shrinks, g, values, value_at, count, d, acc, a, size, keys, key_at, ahead):
    """Shrink 64 sums of each of `served` (1 to 6) queries, `acc[a + k * size:]`, by `shrinks[g + k]`, and add 64
    channels from the `d`-th on of `count` rows of values times `weights[w + k * ROWS:]`. Meanwhile memory is asked for
    these channels of keys `ahead` of `key_at`."""

    def code(context, builder, signature, arguments):
        served_, weights_, w_, shrinks_, g_, values_, value_at_, count_, d_ = arguments[:9]
        acc_, a_, size_, keys_, key_at_, ahead_ = arguments[9:]
        shorts = ir.VectorType(ir.IntType(16), LANES)

        def number(n):
            return ir.Constant(w_.type, n)

        def loaded(array, value, place):
            return builder.load(place_in(context, builder, array, value, place))

        def sums_of(k, v):
            place = builder.add(builder.add(a_, builder.mul(size_, number(k))), number(v * LANES))
            return place_in(context, builder, acc, acc_, place, FLOATS)

        def body(many):
            sums = [[cgutils.alloca_once(builder, FLOATS) for _ in range(VECTORS)] for _ in range(many)]
            for k in range(many):
                factor = splat(builder, loaded(shrinks, shrinks_, builder.add(g_, number(k))), FLOATS)
                for v in range(VECTORS):
                    builder.store(builder.fmul(builder.load(sums_of(k, v), align=4), factor), sums[k][v])
            with cgutils.for_range(builder, count_) as loop:
                at, row = builder.add(loaded(value_at, value_at_, loop.index), d_), []
                next_at = builder.add(builder.add(loaded(key_at, key_at_, loop.index), ahead_), d_)
                for line in (0, LINE):
                    ask_for(builder, place_in(context, builder, keys, keys_, builder.add(next_at, number(line))))
                for v in range(VECTORS):
                    place = place_in(context, builder, values, values_, builder.add(at, number(v * LANES)), shorts)
                    bits = builder.shl(builder.zext(builder.load(place, align=2), WORDS), every(WORDS, 16))
                    row.append(builder.bitcast(bits, FLOATS))
                for k in range(many):
                    place = builder.add(builder.add(w_, number(k * ROWS)), loop.index)
                    weight = splat(builder, loaded(weights, weights_, place), FLOATS)
                    for v in range(VECTORS):
                        builder.store(times_plus(builder, row[v], weight, builder.load(sums[k][v])), sums[k][v])
            for k in range(many):
                for v in range(VECTORS):
                    builder.store(builder.load(sums[k][v]), sums_of(k, v), align=4)

        for many in range(1, SERVED + 1 if values.dtype == types.uint16 else 1):  # nobody calls it for others
            with builder.if_then(builder.icmp_signed("==", served_, number(many))):
                body(many)
        return context.get_dummy_value()

    place = types.intp
    return types.void(
        place, weights, place, shrinks, place, values, value_at, place, place, acc, place, place, keys, key_at, place
    ), code


@njit
def values_in_registers(weights, shrinks, values, count, share, size, acc, coming):
    """Shrink the sums `acc` `[share*size]` by `shrinks`, and add the values of up to `ROWS` rows times `weights`;
    coming: the keys that are read next, their places and what is added to these."""
    (values, value_at), (keys, key_at, ahead) = values, coming
    for d in range(0, size, CHANNELS):
        for g in range(0, share, SERVED):
            _summed(min(SERVED, share - g), weights, g * ROWS, shrinks, g, values, value_at, count, d,
                    acc, g * size + d, size, keys, key_at, ahead)  # fmt: skip
