"""Names of the nearest of 16 centroids, compiled by numba for the CPU: the distances of a key's part are a register."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, call, place_in, splat, times_plus

PART = 4096  # rows that a thread names at a time


@intrinsic
def _nearest(typing, keys, at, books, first, halves, half, size):
    """Return the number n that makes `halves[half + n]`, less the product of `keys[at:at + size]` with a centroid,
    smallest. Channel d of 16 centroids is `books[first + 16 d:]`."""

    def code(context, builder, signature, arguments):
        keys_, at_, books_, first_, halves_, half_, size_ = arguments
        start = builder.load(place_in(context, builder, halves, halves_, half_, FLOATS), align=4)
        total = cgutils.alloca_once_value(builder, start)
        with cgutils.for_range(builder, size_) as loop:
            x = builder.load(place_in(context, builder, keys, keys_, builder.add(at_, loop.index)))
            place = builder.add(first_, builder.mul(loop.index, ir.Constant(first_.type, LANES)))
            channel = builder.load(place_in(context, builder, books, books_, place, FLOATS), align=4)
            less = splat(builder, builder.fneg(x), FLOATS)
            builder.store(times_plus(builder, less, channel, builder.load(total)), total)
        lanes = builder.load(total)
        least = call(builder, "llvm.vector.reduce.fmin.v16f32", FLOAT, lanes, flags=("nnan",))
        marks = builder.bitcast(builder.fcmp_ordered("==", lanes, splat(builder, least, FLOATS)), ir.IntType(LANES))
        return builder.zext(builder.cttz(marks, ir.Constant(ir.IntType(1), 0)), ir.IntType(64))

    place = types.intp
    return types.intp(keys, place, books, place, halves, place, place), code


@entry(parallel=True, cache=True, nogil=True)
def _paired(keys, books, halves, rows, subspaces, size, out):
    """keys: `[L*n*S*d]`; books: `[L*S*d*16]`; halves: `[L*S*16]`, of the centroids' squared lengths; out: `[L,n,R]`."""
    lists, _, count = out.shape
    parts = (rows + PART - 1) // PART
    for work in prange(lists * parts):
        which, begin = work // parts, work % parts * PART
        for n in range(begin, min(begin + PART, rows)):
            at = (which * rows + n) * subspaces * size
            for r in range(count):
                code = 0
                for s in range(2 * r, min(2 * r + 2, subspaces)):
                    book = which * subspaces + s
                    name = _nearest(keys, at + s * size, books, book * size * 16, halves, book * 16, size)
                    code |= (name & 15) << 4 * (s - 2 * r)
                out[which, n, r] = code


def paired_names(keys: Tensor, books: Tensor) -> Tensor:
    """As `dispatch.paired_names`."""
    batch, heads, rows, wide = keys.shape
    subspaces, _, size = books.shape[2:]
    centres = books.float()
    halves = centres.square().sum(-1) / 2
    out = torch.empty(batch, heads, rows, -(-subspaces // 2), dtype=torch.uint8)
    flat = (part.contiguous().numpy().reshape(-1) for part in (keys.float(), centres.mT, halves))
    with ONE_AT_A_TIME:
        use_threads(batch * heads * rows * wide * 4)
        _paired(*flat, rows, subspaces, size, out.flatten(0, 1).numpy())
    return out
