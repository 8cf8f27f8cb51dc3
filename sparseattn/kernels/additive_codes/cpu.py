"""Names of the centroids whose sum is nearest to a key, compiled by numba for the CPU."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_centroids import OUTPUTS, VECTORS, lay_out, multiply
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import array_at, rows_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import FLOATS, LANES, place_in, splat

PART = 16 * VECTORS  # keys that a thread names at a time


@intrinsic
def _add_up(typing, alone, first, start, grams, names, mine, codes, entries, every, last, each):
    """Write, of `LANES` centroids from `first` on, half the squared distances of a beam's sum with one more, to `each`;
    return a bit for each of them that is below `last`.

    alone: `[M*K]` and grams `[M*K*M*K]` float32, see `_search`; start: the beam's own; names: int64, from place `mine`
    on of the centroids of the beam, so many as `codes`; every: M * K.
    """

    index_ = ir.IntType(64)

    def code(context, builder, signature, arguments):
        alone_, first_, start_, grams_, names_, mine_, codes_, entries_, every_, last_, each_ = arguments
        own = builder.load(place_in(context, builder, alone, alone_, first_, FLOATS), align=4)
        total = cgutils.alloca_once_value(builder, builder.fadd(own, splat(builder, start_, FLOATS)))
        with cgutils.for_range(builder, codes_) as loop:
            name = builder.load(place_in(context, builder, names, names_, builder.add(mine_, loop.index)))
            row = builder.mul(builder.add(builder.mul(loop.index, entries_), name), every_)
            at = place_in(context, builder, grams, grams_, builder.add(row, first_), FLOATS)
            builder.store(builder.fadd(builder.load(total), builder.load(at, align=4)), total)
        found = builder.load(total)
        zero = ir.Constant(first_.type, 0)
        builder.store(found, place_in(context, builder, each, each_, zero, FLOATS), align=4)
        below = builder.fcmp_ordered("<", found, splat(builder, last_, FLOATS))
        return builder.zext(builder.bitcast(below, ir.IntType(LANES)), index_)

    index, number = types.intp, types.float32
    return types.int64(alone, index, number, grams, names, index, index, index, index, number, each), code


@intrinsic
def _lowest(typing, bits):
    """Return the place of the lowest bit that is set; one is."""

    def code(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


@njit
def _search(alone, grams, codes, entries, beams, far, names, parent, name, each):
    """Search the beams of one key and return where the names of the nearest one begin in `names`.

    alone: `[M*K]`, half a squared distance of each centroid by itself; grams: `[M*K*M*K]`; far, names: `[2*b]` and
    `[2*b*M]`, of beams and of the next ones; parent, name: `[b]`; each: `[LANES]`.
    """
    held, now, then, every = 1, 0, beams, codes * entries
    far[0] = np.float32(0)
    names[:] = 0  # of a key that is not finite no sum is near
    for m in range(codes):
        count, first, last = 0, m * entries, np.float32(np.inf)
        for b in range(held):
            start, mine = far[now + b], (now + b) * codes
            for k in range(0, entries, LANES):
                below = _add_up(alone, first + k, start, grams, names, mine, m, entries, every, last, each)
                while below:
                    i = _lowest(below)
                    below &= below - 1
                    if each[i] < last:
                        place = min(count, beams - 1)  # of one more: behind those that are as near
                        while place > 0 and far[then + place - 1] > each[i]:
                            far[then + place] = far[then + place - 1]
                            parent[place], name[place] = parent[place - 1], name[place - 1]
                            place -= 1
                        far[then + place], parent[place], name[place] = each[i], b, k + i
                        count = min(count + 1, beams)
                        if count == beams:
                            last = far[then + beams - 1]
        for b in range(count):
            mine, theirs = (then + b) * codes, (now + parent[b]) * codes
            for j in range(m):
                names[mine + j] = names[theirs + j]
            names[mine + m] = name[b]
        held, now, then = count, then, now
    return now * codes


@entry(parallel=True, cache=True, nogil=True)
def _name(keys, extent, shape, less, halves, grams, out):
    """keys: where `[B,H,n,D]` lies, and its steps of b, h and n; extent: of its storage; shape: B*H, H, n, D, M, K and
    beams; less `[L,M*K*D]`, halves `[L,M*K]`, grams `[L,M*K*M*K]`: see `reference.sums`; out: `[L,M,n]`."""
    (kind, keys_at, (step_b, step_h, step_n)), (lists, heads, rows, wide, codes, entries, beams) = keys, shape
    stored = array_at(kind, keys_at, extent)
    parts, outputs = (rows + PART - 1) // PART, codes * entries
    for work in prange(lists * parts):
        which, begin = work // parts, work % parts * PART
        at = which // heads * step_b + which % heads * step_h
        laid, products = np.empty(wide * VECTORS, np.float32), np.empty(outputs * VECTORS, np.float32)
        alone, each = np.empty(outputs, np.float32), np.empty(LANES, np.float32)
        far, names = np.empty(2 * beams, np.float32), np.empty(2 * beams * codes, np.int64)
        parent, name = np.empty(beams, np.int64), np.empty(beams, np.int64)
        for n in range(begin, min(begin + PART, rows), VECTORS):
            left = min(VECTORS, rows - n)
            lay_out(stored, at + n * step_n, step_n, left, wide, laid)
            multiply(less[which], halves[which], outputs // OUTPUTS, laid, wide, products)
            for i in range(left):
                for o in range(outputs):
                    alone[o] = products[o * VECTORS + i]
                best = _search(alone, grams[which], codes, entries, beams, far, names, parent, name, each)
                for m in range(codes):
                    out[which, m, n + i] = names[best + m]


def sums(keys: Tensor, less: Tensor, halves: Tensor, grams: Tensor, codes: int, beams: int) -> Tensor:
    """As `reference.sums`."""
    batch, heads, rows, wide = keys.shape
    entries = less.shape[2] // codes
    out = torch.empty(batch, heads, codes, rows, dtype=torch.uint8)
    if not out.numel():
        return out
    if entries % LANES:
        raise ValueError(f"the compiled kernel takes {LANES} centroids of a codebook at once, got {entries}")
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    extent = sum((n - 1) * step for n, step in zip(keys.shape, keys.stride(), strict=True)) + 1
    shape = (batch * heads, heads, rows, wide, codes, entries, beams)
    with ONE_AT_A_TIME:
        use_threads(batch * heads * rows * codes * entries * (wide + codes * beams / 2) / 16)
        _name(
            rows_at(keys), extent, shape, less.flatten(0, 1).flatten(1).numpy(), halves.flatten(0, 1).numpy(),
            grams.flatten(0, 1).flatten(1).numpy(), out.flatten(0, 1).numpy(),
        )  # fmt: skip
    return out
