"""The best rows by their scores, compiled by numba for the CPU: by histogram, of the rows that can be among them."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import FLOAT, FLOATS, LANES, WORD, every, place_in, splat


@intrinsic
def _fold(typing, numbers, at, many, out, o):
    """`out[o:o + 16]`: the largest of each lane of `many` registers from `numbers[at]` on, or of those behind the last
    NaN, or this: no more than the largest number."""

    def code(context, builder, signature, arguments):
        numbers_, at_, many_, out_, o_ = arguments
        top = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, -math.inf), top)
        with cgutils.for_range(builder, many_) as loop:
            place = builder.add(at_, builder.mul(loop.index, ir.Constant(at_.type, LANES)))
            x = builder.load(place_in(context, builder, numbers, numbers_, place, FLOATS), align=4)
            before = builder.load(top)
            builder.store(builder.select(builder.fcmp_ordered("<=", x, before), before, x), top)
        builder.store(builder.load(top), place_in(context, builder, out, out_, o_, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, out, types.intp), code


@intrinsic
def _reaching(typing, numbers, at, least):
    """Return a bit for each of the 16 `numbers[at:]` that is not below `least`, and not -inf."""

    def code(context, builder, signature, arguments):
        numbers_, at_, least_ = arguments
        x = builder.load(place_in(context, builder, numbers, numbers_, at_, FLOATS), align=4)
        reaches = builder.fcmp_unordered(">=", x, splat(builder, least_, FLOATS))
        reaches = builder.and_(reaches, builder.fcmp_unordered("!=", x, every(FLOATS, -math.inf)))
        return builder.zext(builder.bitcast(reaches, ir.IntType(LANES)), WORD)

    return types.uint32(numbers, types.intp, types.float32), code


@intrinsic
def first_bit(typing, bits):
    """Return the place of the lowest bit of an unsigned number that is not 0."""

    def code(context, builder, signature, arguments):
        place, wide = builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1)), ir.IntType(64)
        return place if place.type == wide else builder.zext(place, wide)

    return types.intp(bits), code


@intrinsic
def _key(typing, number):
    """Return an integer that is the larger the larger a float32 is."""

    def code(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], WORD)
        sign = builder.ashr(bits, ir.Constant(WORD, 31))
        return builder.xor(bits, builder.or_(sign, ir.Constant(WORD, 1 << 31)))

    return types.uint32(types.float32), code


@intrinsic
def _number(typing, key):
    """Return the float32 of a `_key`."""

    def code(context, builder, signature, arguments):
        sign = builder.ashr(arguments[0], ir.Constant(WORD, 31))
        flip = builder.or_(builder.not_(sign), ir.Constant(WORD, 1 << 31))
        return builder.bitcast(builder.xor(arguments[0], flip), FLOAT)

    return types.float32(types.uint32), code


@njit
def _nth(keys, many, count, spare):
    """Return the `count`-th largest of `keys[:many]` and how many equal to it are among the `count` largest.

    By a histogram of the leading 11 bits, then of the next 11 in the bin where the count is reached, then of the last;
    of few keys by 8 bits at a time, as clearing the bins would take longest.
    """
    digit = 8 if many < 2048 else 11
    bins = np.empty(1 << digit, np.int32)
    left, shift, mask = keys, 32 - digit, (1 << digit) - 1
    while True:
        bins[:] = 0
        for i in range(many):
            bins[np.intp(left[i] >> np.uint32(shift)) & mask] += 1
        edge = mask
        while bins[edge] < count:
            count -= bins[edge]
            edge -= 1
        inside = 0
        for i in range(many):  # `spare` may be what is read: it is written no farther than read
            key = left[i]
            if np.intp(key >> np.uint32(shift)) & mask == edge:
                spare[inside] = key
                inside += 1
        left, many = spare, inside
        if shift == 0 or many == 1:
            return spare[0], count
        shift = max(shift - digit, 0)


@njit
def best(scores, ids):
    """Return the largest of `scores` that are not -inf, in no order, as `ids` `[count]`, -1 where there are fewer."""
    total, count = scores.shape[0], ids.shape[0]
    if count == 0:
        return
    keys, spare, places = np.empty(total, np.uint32), np.empty(total, np.uint32), np.empty(total, np.int32)
    fold = 16
    while fold > 1 and total // (fold * LANES) * LANES < 2 * count:
        fold //= 4
    blocks = total // (fold * LANES)
    least = np.float32(-np.inf)
    if fold > 1:
        # Each of so many sets of rows has a row that is its largest: the count-th largest of these is no larger than
        # the count-th largest row, and nearly as large where the best rows are scattered.
        tops = np.empty(blocks * LANES, np.float32)
        for block in range(blocks):
            _fold(scores, block * fold * LANES, fold, tops, block * LANES)
        for i in range(blocks * LANES):
            keys[i] = _key(tops[i])
        least = _number(_nth(keys, blocks * LANES, count, spare)[0])
    taken = 0
    if fold == 1:  # most rows are among the best, or there are few
        for row in range(total):
            places[taken], keys[taken] = row, _key(scores[row])
            taken += scores[row] != -np.inf
    else:
        for n in range(0, total - LANES + 1, LANES):
            marks = _reaching(scores, n, least)
            while marks:
                row = n + first_bit(marks)
                marks &= marks - np.uint32(1)
                places[taken], keys[taken] = row, _key(scores[row])
                taken += 1
        for row in range(total & -LANES, total):
            if not scores[row] < least and scores[row] != -np.inf:
                places[taken], keys[taken] = row, _key(scores[row])
                taken += 1
    if taken <= count:
        for i in range(count):
            ids[i] = places[i] if i < taken else -1
        return
    edge, equal = _nth(keys, taken, count, spare)
    filled = 0
    for i in range(taken):
        if keys[i] < edge or (keys[i] == edge and equal == 0):
            continue
        equal -= keys[i] == edge
        ids[filled] = places[i]
        filled += 1


@entry(parallel=True, cache=True, nogil=True)
def _best_rows(scores, ids):
    for which in prange(len(scores)):
        best(scores[which], ids[which])


def best_rows(scores: Tensor, count: int) -> Tensor:
    """As `dispatch.best_rows`, of float32."""
    batch, chosen, total = scores.shape
    ids = torch.empty(batch, chosen, min(count, total), dtype=torch.int32)
    if not ids.numel():
        return ids
    with ONE_AT_A_TIME:
        use_threads(2 * scores.numel())
        _best_rows(scores.contiguous().numpy().reshape(-1, total), ids.numpy().reshape(-1, ids.shape[2]))
    return ids


@entry(cache=True, nogil=True)
def list_best_pages(scores_at, sizes, page, out_at):
    """scores_at: where `[lists,P]` of float32 lies; sizes: lists, P, S; out_at: where start and length `[2,lists,S]` of
    int32 lie."""
    lists, pages, count = sizes
    scores, out = array_at(np.float32, scores_at, lists * pages), array_at(np.int32, out_at, 2 * lists * count)
    for which in range(lists):
        ids = out[which * count : (which + 1) * count]
        best(scores[which * pages : (which + 1) * pages], ids)
        for s in range(count):
            out[(lists + which) * count + s] = page if ids[s] >= 0 else 0
            ids[s] = max(ids[s], 0) * page


def best_pages(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_pages`, of float32, the pages in their order."""
    batch, chosen, total = scores.shape
    scores, out = scores.contiguous(), torch.empty(2, batch, chosen, min(count, total), dtype=torch.int32)
    if out.numel():
        list_best_pages(scores.data_ptr(), (batch * chosen, total, out.shape[3]), page, out.data_ptr())
    return out[0], out[1]
