"""The vote of a query group by "softmax" in vectors of 16 numbers: one exponential a number, and one logarithm a row.

Weights are kept beside their largest: a vote is -inf where every query head weighs a row at less than 2^-126 of that. A
list may come in parts, each with a largest of its own.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, LN2
from sparseattn.kernels.numba_vectors import (
    FLOAT,
    FLOATS,
    LANES,
    LOWEST,
    call,
    every,
    larger,
    logarithms,
    place_in,
    powers,
    splat,
    times_plus,
)


@intrinsic
def highest(typing, numbers, at, count):
    """Return the largest of `numbers[at:at + count]`, `count` a multiple of 16."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_ = arguments
        top = cgutils.alloca_once_value(builder, every(FLOATS, -math.inf))
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            x = builder.load(place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS), align=4)
            builder.store(larger(builder, x, builder.load(top)), top)
        return call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(top), flags=("nnan",))

    return types.float32(numbers, types.intp, types.intp), code


@intrinsic
def weights(typing, numbers, at, count, highest, out, o):
    """`out[o:o + count]`, a multiple of 16: 2 to the power of `numbers[at:] - highest`, 0 for -inf; returns the sum."""

    def code(context, builder, signature, arguments):
        numbers_, at_, count_, highest_, out_, o_ = arguments
        total, less = cgutils.alloca_once(builder, FLOATS), splat(builder, highest_, FLOATS)
        builder.store(every(FLOATS, 0.0), total)
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            x = builder.load(place_in(context, builder, numbers, numbers_, builder.add(at_, n), FLOATS), align=4)
            there = builder.fcmp_unordered("!=", x, every(FLOATS, -math.inf))
            power = builder.select(there, powers(builder, builder.fsub(x, less)), every(FLOATS, 0.0))
            builder.store(power, place_in(context, builder, out, out_, builder.add(o_, n), FLOATS), align=4)
            builder.store(builder.fadd(power, builder.load(total)), total)
        start = ir.Constant(FLOAT, 0.0)
        return call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)

    place = types.intp
    return types.float32(numbers, place, place, types.float32, out, place), code


@intrinsic
def voted(typing, arrays, places, step, share, most, count):
    """`out[o:o + count]`, a multiple of 16: the natural logarithm of the sum over `share` query heads of
    `numbers[at + g * step:] * factor[w + g]`, times 2 to the power of `most`; -inf where the sum is 0.

    arrays: numbers, factor, out, all flat; places: at, w, o.
    """
    numbers, factor, out = arrays

    def code(context, builder, signature, arguments):
        arrays_, places_, step_, share_, most_, count_ = arguments
        numbers_, factor_, out_ = cgutils.unpack_tuple(builder, arrays_)
        at_, w_, o_ = cgutils.unpack_tuple(builder, places_)
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        total, plus = cgutils.alloca_once(builder, FLOATS), splat(builder, most_, FLOATS)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            builder.store(every(FLOATS, 0.0), total)
            with cgutils.for_range(builder, share_) as loop:
                place = builder.add(builder.add(at_, n), builder.mul(loop.index, step_))
                x = builder.load(place_in(context, builder, numbers, numbers_, place, FLOATS), align=4)
                by = builder.load(place_in(context, builder, factor, factor_, builder.add(w_, loop.index)))
                builder.store(times_plus(builder, x, splat(builder, by, FLOATS), builder.load(total)), total)
            whole = builder.load(total)
            vote = builder.fmul(builder.fadd(logarithms(builder, whole), plus), every(FLOATS, float(LN2)))
            there = builder.fcmp_unordered("!=", whole, every(FLOATS, 0.0))
            vote = builder.select(there, vote, every(FLOATS, -math.inf))
            builder.store(vote, place_in(context, builder, out, out_, builder.add(o_, n), FLOATS), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(arrays, types.UniTuple(place, 3), place, place, types.float32, place), code


@njit
def factors(peak, total, most):
    """Return what weights are multiplied with, in place of `total`; peak, total: `[parts,G]`; most: `[parts]`.

    The share of a query head's probability in a weight of a part is `2^(peak - norm)`, `norm` the logarithm of its
    total. Of that each part takes out the largest, as `most`: parts that weigh next to nothing still rank.
    """
    parts, share = peak.shape
    norm = np.empty(share, np.float32)
    for g in range(share):
        top, whole = np.float32(-np.inf), np.float32(0)
        for part in range(parts):
            top = max(top, peak[part, g])
        for part in range(parts):
            if peak[part, g] > -np.inf:
                whole += total[part, g] * np.exp2(peak[part, g] - top)
        norm[g] = top + np.log2(whole) if top > -np.inf else np.float32(0)
    for part in range(parts):
        most[part] = LOWEST
        for g in range(share):
            most[part] = max(most[part], peak[part, g] - norm[g])
        for g in range(share):
            total[part, g] = np.exp2(peak[part, g] - norm[g] - most[part]) if peak[part, g] > -np.inf else np.float32(0)


@njit
def vote_of_list(logits, at, count, share, room, to, out, o):
    """`out[o:o + count]`: the votes on a list of rows.

    logits: of `count` rows, a multiple of 16, in units of log 2, of `share` query heads behind each other from `at` on,
    -inf where there is none; held: for as many weights, from `to` on.
    """
    peak, total, most = np.empty((1, share), np.float32), np.empty((1, share), np.float32), np.empty(1, np.float32)
    for g in range(share):
        first, own = at + g * count, to + g * count
        peak[0, g], total[0, g] = highest(logits, first, count), 0
        if peak[0, g] > -np.inf:
            total[0, g] = weights(logits, first, count, peak[0, g], room, own)
        else:
            room[own : own + count] = 0
    factors(peak, total, most)
    voted((room, total.reshape(-1), out), (to, 0, o), count, share, most[0], count)
