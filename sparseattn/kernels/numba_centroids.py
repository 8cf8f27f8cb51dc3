"""Centroids in compiled code: the nearest to a vector, by 16 distances a register, and sums of vectors by centroid."""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, WORD, WORDS, call, every, place_in, splat, times_plus

FEW = 4  # numbers that are added at once: subspaces have few channels
FOUR = ir.VectorType(FLOAT, FEW)


@intrinsic
def nearest_centroid(typing, vectors, at, books, first, halves, half, size, blocks):
    """Return the number n that makes `halves[half + n]`, less the product of `vectors[at:at + size]` with centroid n,
    smallest; of several the first.

    Channel d of the 16 centroids of block b is `books[first + 16 (b size + d):]`; halves are of the squared lengths of
    `16 blocks` centroids.
    """

    def code(context, builder, signature, arguments):
        vectors_, at_, books_, first_, halves_, half_, size_, blocks_ = arguments
        sixteen = ir.Constant(first_.type, LANES)
        least = cgutils.alloca_once_value(builder, every(FLOATS, float("inf")))
        place = cgutils.alloca_once_value(builder, every(WORDS, 0))
        with cgutils.for_range(builder, blocks_) as block:
            start = builder.add(half_, builder.mul(block.index, sixteen))
            start = builder.load(place_in(context, builder, halves, halves_, start, FLOATS), align=4)
            total = cgutils.alloca_once_value(builder, every(FLOATS, 0.0))
            builder.store(start, total)
            channels = builder.add(first_, builder.mul(builder.mul(block.index, size_), sixteen))
            with cgutils.for_range(builder, size_) as loop:
                x = builder.load(place_in(context, builder, vectors, vectors_, builder.add(at_, loop.index)))
                channel = builder.add(channels, builder.mul(loop.index, sixteen))
                channel = builder.load(place_in(context, builder, books, books_, channel, FLOATS), align=4)
                less = splat(builder, builder.fneg(x), FLOATS)
                builder.store(times_plus(builder, less, channel, builder.load(total)), total)
            nearer = builder.fcmp_ordered("<", builder.load(total), builder.load(least))
            builder.store(builder.select(nearer, builder.load(total), builder.load(least)), least)
            number = splat(builder, builder.trunc(block.index, WORD), WORDS)
            builder.store(builder.select(nearer, number, builder.load(place)), place)
        lanes = builder.load(least)
        smallest = call(builder, "llvm.vector.reduce.fmin.v16f32", FLOAT, lanes, flags=("nnan",))
        ours = builder.fcmp_ordered("==", lanes, splat(builder, smallest, FLOATS))
        lane = ir.Constant(WORDS, list(range(LANES)))
        numbers = builder.add(builder.shl(builder.load(place), every(WORDS, 4)), lane)
        numbers = builder.select(ours, numbers, every(WORDS, 2**31 - 1))
        found = call(builder, "llvm.vector.reduce.umin.v16i32", WORD, numbers)
        return builder.zext(found, ir.IntType(64))

    place = types.intp
    return types.intp(vectors, place, books, place, halves, place, place, place), code


@intrinsic
def add_scaled(typing, totals, to, vectors, at, weight, fours):
    """Add `weight` times `vectors[at:at + 4 fours]` to `totals[to:to + 4 fours]`, all float32."""

    def code(context, builder, signature, arguments):
        totals_, to_, vectors_, at_, weight_, fours_ = arguments
        scale = splat(builder, weight_, FOUR)
        with cgutils.for_range(builder, fours_) as loop:
            moved = builder.mul(loop.index, ir.Constant(to_.type, FEW))
            place = place_in(context, builder, totals, totals_, builder.add(to_, moved), FOUR)
            x = builder.load(place_in(context, builder, vectors, vectors_, builder.add(at_, moved), FOUR), align=4)
            builder.store(times_plus(builder, scale, x, builder.load(place, align=4)), place, align=4)
        return context.get_dummy_value()

    index = types.intp
    return types.void(totals, index, vectors, index, types.float32, index), code
