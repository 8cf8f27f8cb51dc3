"""Centroids in compiled code: products of a few vectors with a matrix, the nearest centroids, sums by centroid.

A register holds one channel of 16 vectors, so that a centroid's distance to 16 vectors is one register too: which
centroid is nearest shows without looking across a register.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import read
from sparseattn.kernels.numba_vectors import (
    FEATURES,
    FLOAT,
    FLOATS,
    LANES,
    WORDS,
    every,
    place_in,
    splat,
    times_plus,
)

# Sums that are held at once, of so many outputs with so many registers of vectors: 24 of the 32 registers of AVX-512, 8
# halves of the 16 of AVX2 (a register of 16 numbers is two of those).
STRIPES, OUTPUTS = (3, 8) if "+avx512f" in FEATURES else (1, 4)
VECTORS = STRIPES * LANES  # that are worked on at once
FEW = 4  # numbers that are added at once: subspaces have few channels
FOUR = ir.VectorType(FLOAT, FEW)


def _sums(context, builder, outputs, first, vectors, size):
    """Return the registers `[OUTPUTS][STRIPES]` of `outputs`' biases plus their products with vectors.

    outputs: the matrix and its biases, arrays of numba with their values, and the number of the first output; first:
    where the vectors' first channel lies in `vectors`, `[D,VECTORS]`; size: channels.
    """
    (matrix, matrix_), (biases, biases_), output = outputs
    array, array_ = vectors
    index = output.type
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in range(STRIPES)] for _ in range(OUTPUTS)]
    rows = []
    for j in range(OUTPUTS):
        mine = builder.add(output, ir.Constant(index, j))
        bias = splat(builder, builder.load(place_in(context, builder, biases, biases_, mine)), FLOATS)
        rows.append(place_in(context, builder, matrix, matrix_, builder.mul(mine, size)))
        for total in totals[j]:
            builder.store(bias, total)
    with cgutils.for_range(builder, size) as loop:
        start = builder.add(first, builder.mul(loop.index, ir.Constant(index, VECTORS)))
        channel = []
        for stripe in range(STRIPES):
            at = builder.add(start, ir.Constant(index, stripe * LANES))
            channel.append(builder.load(place_in(context, builder, array, array_, at, FLOATS), align=4))
        for row, mine in zip(rows, totals, strict=True):
            x = splat(builder, builder.load(builder.gep(row, [loop.index])), FLOATS)
            for part, total in zip(channel, mine, strict=True):
                builder.store(times_plus(builder, x, part, builder.load(total)), total)
    return [[builder.load(total) for total in mine] for mine in totals]


@intrinsic
def multiply(typing, matrix, biases, blocks, vectors, size, out):
    """Write `biases` plus the products of a matrix with `VECTORS` vectors to `out` `[OUTPUTS * blocks,VECTORS]`.

    matrix: `[OUTPUTS * blocks,D]`; biases: `[OUTPUTS * blocks]`; vectors: `[D,VECTORS]`; size: D.
    All are flat and float32.
    """

    def code(context, builder, signature, arguments):
        matrix_, biases_, blocks_, vectors_, size_, out_ = arguments
        with cgutils.for_range(builder, blocks_) as block:
            output = builder.mul(block.index, ir.Constant(block.index.type, OUTPUTS))
            given = (matrix, matrix_), (biases, biases_), output
            found = _sums(context, builder, given, ir.Constant(size_.type, 0), (vectors, vectors_), size_)
            for j, mine in enumerate(found):
                for stripe, total in enumerate(mine):
                    at = builder.add(output, ir.Constant(output.type, j))
                    at = builder.mul(at, ir.Constant(output.type, VECTORS))
                    at = builder.add(at, ir.Constant(output.type, stripe * LANES))
                    builder.store(total, place_in(context, builder, out, out_, at, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(matrix, biases, types.intp, vectors, types.intp, out), code


@intrinsic
def nearest_centroids(typing, less, halves, begin, blocks, vectors, first, size, out, apart):
    """Write which centroid is nearest to each of `VECTORS` vectors, of several the first, to `out` int32, and half of
    its squared distance less that of the vector from 0 to `apart` float32.

    less: centroids taken from 0, `[K,D]` flat; halves: half of their squared lengths; begin: the number of the first
    centroid among them; blocks: `OUTPUTS` centroids each; vectors: `[D,VECTORS]` from place `first` on; size: D.
    """

    def code(context, builder, signature, arguments):
        less_, halves_, begin_, blocks_, vectors_, first_, size_, out_, apart_ = arguments
        least = [cgutils.alloca_once_value(builder, every(FLOATS, float("inf"))) for _ in range(STRIPES)]
        place = [cgutils.alloca_once_value(builder, every(WORDS, 0)) for _ in range(STRIPES)]
        with cgutils.for_range(builder, blocks_) as block:
            number = builder.mul(block.index, ir.Constant(block.index.type, OUTPUTS))
            given = (less, less_), (halves, halves_), builder.add(begin_, number)
            found = _sums(context, builder, given, first_, (vectors, vectors_), size_)
            for j, mine in enumerate(found):
                name = builder.trunc(builder.add(number, ir.Constant(number.type, j)), ir.IntType(32))
                name = splat(builder, name, WORDS)
                for stripe, total in enumerate(mine):
                    nearer = builder.fcmp_ordered("<", total, builder.load(least[stripe]))
                    builder.store(builder.select(nearer, total, builder.load(least[stripe])), least[stripe])
                    builder.store(builder.select(nearer, name, builder.load(place[stripe])), place[stripe])
        for stripe in range(STRIPES):
            at = ir.Constant(begin_.type, stripe * LANES)
            builder.store(builder.load(place[stripe]), place_in(context, builder, out, out_, at, WORDS), align=4)
            builder.store(builder.load(least[stripe]), place_in(context, builder, apart, apart_, at, FLOATS), align=4)
        return context.get_dummy_value()

    index = types.intp
    return types.void(less, halves, index, index, vectors, index, index, out, apart), code


@njit
def lay_out(rows, at, step, left, size, out):
    """Write the `size` channels of the vectors `at`, `at + step`, ... of `rows` to `out` `[size,VECTORS]`, of which
    `left` are there, 1 or more; the last one stands for those that are not."""
    for i in range(VECTORS):
        row = at + min(i, left - 1) * step
        for c in range(size):
            out[c * VECTORS + i] = read(rows, row + c)


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
