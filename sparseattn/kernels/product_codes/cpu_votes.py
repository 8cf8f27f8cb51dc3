"""The vote "softmax" of a query group among listed rows by their sums of 16 bits, and the rows that it chooses."""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, WORD, WORDS, call, every, powers, splat, times_plus
from sparseattn.kernels.product_codes.cpu_lists import keep_rows
from sparseattn.kernels.product_codes.cpu_registers import SHORT, load, long, store

FEW = ir.VectorType(SHORT, LANES)
place = types.intp


def _weights(kept):
    """Return the intrinsic `weights` that keeps them, or one that only adds them up."""

    @intrinsic
    def weights(typing, sums, gap, last, unit, top, count, out):
        def code(context, builder, signature, arguments):
            sums_, gap_, last_, unit_, top_, count_, out_ = arguments
            total, by = cgutils.alloca_once(builder, FLOATS), splat(builder, unit_, FLOATS)
            builder.store(every(FLOATS, 0.0), total)
            most = splat(builder, builder.sext(last_, WORD), WORDS)
            highest = splat(builder, builder.trunc(top_, WORD), WORDS)
            with cgutils.for_range_slice(builder, long(0), count_, long(LANES), intp=count_.type) as (n, _):
                at = builder.shl(n, long(1))
                own = builder.sext(load(builder, builder.add(sums_, at), FEW), WORDS)
                apart = builder.sext(load(builder, builder.add(gap_, at), FEW), WORDS)
                x = builder.fmul(builder.sitofp(builder.sub(own, highest), FLOATS), by)
                there = builder.icmp_signed("<=", apart, most)
                power = builder.select(there, powers(builder, x), every(FLOATS, 0.0))
                if kept:
                    store(builder, power, builder.add(out_, builder.shl(n, long(2))))
                builder.store(builder.fadd(power, builder.load(total)), total)
            start = ir.Constant(FLOAT, 0.0)
            return call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)

        return types.float32(place, place, types.int16, types.float32, place, place, place), code

    return weights


# 2 to the power of `unit` times a sum less `top`, of `count` int16 sums, a multiple of 64, at the address `sums`: at
# `out`, float32, 0 where the number at `gap` exceeds `last`; returns their sum. `added_up` leaves `out` as it is.
weights, added_up = _weights(True), _weights(False)


@intrinsic
def mixed(typing, weights, step, share, factors, count, out):
    """At `out`, float32: the sum over `share` query heads, `step` bytes apart, of `weights` times the head's factor, of
    `count` rows, a multiple of 64. `out` may be `weights`. All are addresses."""

    def code(context, builder, signature, arguments):
        weights_, step_, share_, factors_, count_, out_ = arguments
        with cgutils.for_range_slice(builder, long(0), count_, long(LANES), intp=count_.type) as (n, _):
            at, total = builder.shl(n, long(2)), cgutils.alloca_once(builder, FLOATS)
            builder.store(every(FLOATS, 0.0), total)
            with cgutils.for_range(builder, share_) as loop:
                own = builder.add(builder.add(weights_, at), builder.mul(loop.index, step_))
                by = load(builder, builder.add(factors_, builder.shl(loop.index, long(2))), FLOAT)
                x = load(builder, own, FLOATS)
                builder.store(times_plus(builder, x, splat(builder, by, FLOATS), builder.load(total)), total)
            store(builder, builder.load(total), builder.add(out_, at))
        return context.get_dummy_value()

    return types.void(*[place] * 6), code


@intrinsic
def _count_from(typing, votes, count, least):
    """How many of `count` float32 at `votes`, a multiple of 64 and none below 0, have bits of `least` at least."""

    def code(context, builder, signature, arguments):
        votes_, count_, least_ = arguments
        total, bits = cgutils.alloca_once(builder, WORDS), splat(builder, least_, WORDS)
        builder.store(every(WORDS, 0), total)
        with cgutils.for_range_slice(builder, long(0), count_, long(LANES), intp=count_.type) as (n, _):
            x = load(builder, builder.add(votes_, builder.shl(n, long(2))), WORDS)
            hits = builder.sext(builder.icmp_signed(">=", x, bits), WORDS)
            builder.store(builder.sub(builder.load(total), hits), total)
        kind = ir.FunctionType(WORD, [WORDS])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.add.v16i32")
        return builder.zext(builder.call(function, [builder.load(total)]), count_.type)

    return place(place, place, types.int32), code


@intrinsic
def _compared(typing, votes, least):
    """Return a bit for each of 16 float32 at `votes` whose bits exceed `least`, and above these one for each that has
    them."""

    def code(context, builder, signature, arguments):
        x, bits = load(builder, arguments[0], WORDS), splat(builder, arguments[1], WORDS)
        both = [builder.icmp_signed(how, x, bits) for how in (">", "==")]
        more, equal = (builder.zext(builder.bitcast(marks, ir.IntType(LANES)), ir.IntType(64)) for marks in both)
        return builder.or_(more, builder.shl(equal, long(LANES)))

    return types.uint64(place, types.int32), code


@intrinsic
def _ones(typing, bits):
    def code(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return place(types.uint64), code


@intrinsic
def vote_of(typing, bits):
    """Return the float32 of which these are the bits, int32."""

    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], FLOAT)

    return types.float32(types.int32), code


@njit
def least_of_best(votes, count, wanted):
    """Return the bits, int32, of the `wanted`-th largest of `count` votes, and at least 1: the least number above 0;
    see `choose`."""
    least = np.int32(0)
    for bit in range(30, -1, -1):
        higher = least | np.int32(1 << bit)
        if _count_from(votes, count, higher) >= wanted:
            least = higher
    return np.int32(max(least, np.int32(1)))


@njit
def choose(votes, rows, count, wanted):
    """Move the `wanted` rows of the largest votes that are not 0 to the front of the names at `rows`, int32, and return
    how many there are. votes: float32, none below 0, of `count` rows, a multiple of 64. Both are addresses."""
    least = least_of_best(votes, count, wanted)
    equal, taken, low = wanted - _count_from(votes, count, least + np.int32(1)), 0, (1 << LANES) - 1
    for n in range(0, count, LANES):
        marks = _compared(votes + 4 * n, least)
        alike = marks >> np.uint64(LANES)
        while _ones(alike) > equal:
            alike &= alike - np.uint64(1)
        equal -= _ones(alike)
        taken += keep_rows(rows + 4 * n, (marks & np.uint64(low)) | alike, rows + 4 * taken)
    return taken
