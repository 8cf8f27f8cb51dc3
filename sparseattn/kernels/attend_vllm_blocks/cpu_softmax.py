"""Softmax over packed logits, and the joining of a list's parts, in compiled code."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, exp2
from sparseattn.kernels.numba_softmax import exponentials, peak_of
from sparseattn.kernels.numba_vectors import WORD, place_in


@intrinsic
def _store(typing, array, place, number):
    """`array[place] = number`, rounded to what the array holds: float32, or 16-bit floats as their bits."""

    def code(context, builder, signature, arguments):
        array_, place_, number_ = arguments
        if array.dtype == types.uint16:
            bits = builder.bitcast(number_, WORD)
            odd = builder.and_(builder.lshr(bits, ir.Constant(WORD, 16)), ir.Constant(WORD, 1))
            rounded = builder.add(bits, builder.add(odd, ir.Constant(WORD, 0x7FFF)))
            is_nan = builder.fcmp_unordered("uno", number_, number_)
            rounded = builder.select(is_nan, ir.Constant(WORD, 0x7FC00000), rounded)
            number_ = builder.trunc(builder.lshr(rounded, ir.Constant(WORD, 16)), ir.IntType(16))
        elif array.dtype == types.int16:
            number_ = builder.bitcast(builder.fptrunc(number_, ir.HalfType()), ir.IntType(16))
        builder.store(number_, place_in(context, builder, array, array_, place_))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), code


@njit  # not fastmath, under which `powers` may not be reordered
def weigh(weights, served, rows, page, peaks, totals):
    """Make weights of the logits of pages, `[served,count*page]` flat, of which `rows` `[count]` rows are there; write
    each query's largest logit and sum."""
    count = rows.shape[0]
    wide = count * page
    for i in range(count):
        for k in range(served):
            for r in range(rows[i], page):
                weights[k * wide + i * page + r] = -np.inf
    for k in range(served):
        peaks[k] = peak_of(weights, k * wide, wide)
        totals[k] = exponentials(weights, k * wide, wide, peaks[k])


@njit(fastmath=set(FAST))
def join(acc, peak, total, k, size, factor, out, o):
    """Join the parts of query head k, acc `[splits,share*D]`, times a factor into `out[o:]`; 0 where there is no
    row."""
    splits = acc.shape[0]
    highest, whole = np.float32(-np.inf), np.float32(0)
    for split in range(splits):
        highest = max(highest, peak[split, k])
    sums = np.zeros(size, np.float32)
    for split in range(splits):
        if total[split, k] != 0:
            shrink = exp2(peak[split, k] - highest)
            whole += total[split, k] * shrink
            for d in range(size):
                sums[d] += shrink * acc[split, k * size + d]
    by = factor / whole if whole != 0 else np.float32(0)
    for d in range(size):
        _store(out, o + d, sums[d] * by)


@njit
def joined(sums, tokens, chosen, size, out, out_step, factor):
    """Join the parts of all lists, `chosen` of each token, see `join`, in the rows `tokens` `[R]` of `out`, which are
    `out_step` apart."""
    acc, peak, total = sums
    lists, share = total.shape[0], total.shape[2]
    for which in range(lists):
        r, s = which // chosen, which % chosen
        for k in range(share):
            to = tokens[r] * out_step + (s * share + k) * size
            join(acc[which], peak[which], total[which], k, size, factor, out, to)
