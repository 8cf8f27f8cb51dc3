"""What a key that is turned to each row's position adds to rows' sums, in compiled code, see `codes.Turning`.

A rotation by a position is one by that of the middle of a block of positions and one by what is left, so that products
with a block's positions are sums of products with the same numbers (as in `Rope.products_below`). What cosines count
for is alike on both sides of the middle, and what sines count for is the opposite, so that each is summed for half a
block. Pairs that turn little within a block are taken together, see `cpu_angles`.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_centroids import OUTPUTS as ROWS
from sparseattn.kernels.numba_centroids import VECTORS, multiply
from sparseattn.kernels.numba_rows import FAST, array_at, dot, dot4
from sparseattn.kernels.numba_vectors import (
    FLOAT,
    FLOATS,
    LANES,
    WORDS,
    call,
    every,
    place_in,
    splat,
    times_plus,
)
from sparseattn.kernels.product_codes.cpu_angles import (
    AT_ONCE,
    COLUMNS,
    HALF,
    MISSED_AT,
    NUMBERS,
    OUTPUTS,
    STRIPES,
    TERMS,
    TOGETHER,
    WIDE,
)
from sparseattn.kernels.product_codes.missed_rows import HEADER, HIGHEST, MIDDLE, MULTIPLE

SHORTS = ir.VectorType(ir.IntType(16), LANES)
BACKWARDS = ir.Constant(WORDS, list(reversed(range(LANES))))
PADDED = 128  # rows that kernels may read behind the last
TOP = 32_767  # of 16 bits


def _places() -> Any:
    """Return where `multiply` writes the terms of `AT_ONCE` blocks, block by block, `[AT_ONCE * TERMS]` uint64: in
    tiles of `VECTORS` columns, each of all blocks together."""
    row, column = np.divmod(np.arange(AT_ONCE * TERMS, dtype=np.uint64), np.uint64(COLUMNS))
    return (column // VECTORS * TOGETHER + row) * VECTORS + column % VECTORS


PLACES: Any = _places()


def turning_room(share: int, rows: int, blocks: int) -> int:
    """Return the bytes that `round_turned` works in."""
    return 2 * share * (WIDE * blocks + PADDED + rows + PADDED)


@intrinsic
def _turn_block(typing, across, along, far, at, fast, few, slow, left, to):
    """Write what a block's numbers are multiplied by to `left` from `to` on: cosines and sines of the first list, then
    the terms of the other. across, along: `[F + S]`; far: from `at` on; fast, few: F and S; slow: `[TERMS * S]`. All
    are float32 and flat."""

    def code(context, builder, signature, arguments):
        across_, along_, far_, at_, fast_, few_, slow_, left_, to_ = arguments
        arrays = {"across": (across, across_), "along": (along, along_), "far": (far, far_)}
        arrays |= {"slow": (slow, slow_), "left": (left, left_)}

        def place(name, index, kind=FLOATS):
            return place_in(context, builder, *arrays[name], index, kind)

        def turned(index, cosine, sine):
            u, v = (builder.load(place(name, index), align=4) for name in ("across", "along"))
            return _turned(builder, u, v, *(builder.load(place("far", where), align=4) for where in (cosine, sine)))

        step = ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 0), fast_, step, intp=at_.type) as (i, _):
            cosine = builder.add(at_, i)
            both = turned(i, cosine, builder.add(cosine, fast_))
            first = builder.add(to_, i)
            builder.store(both[0], place("left", first), align=4)
            builder.store(both[1], place("left", builder.add(first, fast_)), align=4)
        totals = [cgutils.alloca_once_value(builder, every(FLOATS, 0.0)) for _ in range(TERMS)]
        for total in totals:
            builder.store(every(FLOATS, 0.0), total)
        begin = builder.add(at_, builder.shl(fast_, ir.Constant(at_.type, 1)))
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 0), few_, step, intp=at_.type) as (i, _):
            cosine = builder.add(begin, i)
            both = turned(builder.add(fast_, i), cosine, builder.add(cosine, few_))
            for term, total in enumerate(totals):
                where = builder.add(i, builder.mul(few_, ir.Constant(at_.type, term)))
                by = builder.load(place("slow", where), align=4)
                builder.store(times_plus(builder, both[term % 2], by, builder.load(total)), total)
        behind = builder.add(to_, builder.shl(fast_, ir.Constant(at_.type, 1)))
        for term, total in enumerate(totals):
            whole = call(builder, f"llvm.vector.reduce.fadd.v{LANES}f32", FLOAT, ir.Constant(FLOAT, 0.0),
                         builder.load(total), flags=FAST)  # fmt: skip
            builder.store(whole, place("left", builder.add(behind, ir.Constant(at_.type, term)), None))
        return context.get_dummy_value()

    index = types.intp
    return types.void(across, along, far, index, index, index, slow, left, index), code


@intrinsic
def _turn_pairs(typing, across, along, far, at, pairs, left, to, apart):
    """Write the pairs' numbers of a block, what cosines count for to `left` from `to` on and what sines do `apart`
    numbers on. across, along: `[pairs]`; far: cosines and sines from `at` on. All are float32."""

    def code(context, builder, signature, arguments):
        across_, along_, far_, at_, pairs_, left_, to_, apart_ = arguments
        arrays = {"across": (across, across_), "along": (along, along_), "far": (far, far_)}

        def read(name, index):
            return builder.load(place_in(context, builder, *arrays[name], index, FLOATS), align=4)

        step = ir.Constant(at_.type, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(at_.type, 0), pairs_, step, intp=at_.type) as (i, _):
            cosine, first = builder.add(at_, i), builder.add(to_, i)
            both = _turned(builder, read("across", i), read("along", i), read("far", cosine),
                           read("far", builder.add(cosine, pairs_)))  # fmt: skip
            for numbers, where in zip(both, (first, builder.add(first, apart_)), strict=True):
                builder.store(numbers, place_in(context, builder, left, left_, where, FLOATS), align=4)
        return context.get_dummy_value()

    index = types.intp
    return types.void(across, along, far, index, index, left, index, index), code


def _turned(builder, u, v, cos, sin):
    back = builder.fneg(builder.fmul(u, sin))
    return times_plus(builder, u, cos, builder.fmul(v, sin)), times_plus(builder, v, cos, back)


@intrinsic
def _add_blocks(typing, left, apart, blocks, near, size, bias, out, to):
    """Write the sums of blocks with `bias` added, 0 where they are less and rounded down, to `out`
    `[OUTPUTS * blocks,WIDE]` int16 from `to` on. Return the largest one.

    left: `[2,OUTPUTS * blocks,size]`, its second half from `apart` on; near: `[2,size,HALF]`: what is alike on both
    sides of a block's middle, and what is the opposite. All are float32.
    """

    def code(context, builder, signature, arguments):
        left_, apart_, blocks_, near_, size_, bias_, out_, to_ = arguments
        index = size_.type
        most = cgutils.alloca_once_value(builder, every(SHORTS, 0))
        begin = splat(builder, bias_, FLOATS)
        totals = [[[cgutils.alloca_once(builder, FLOATS) for _ in range(STRIPES)] for _ in range(2)]
                  for _ in range(OUTPUTS)]  # fmt: skip
        with cgutils.for_range(builder, blocks_) as block:
            output, rows = builder.mul(block.index, ir.Constant(index, OUTPUTS)), []
            for j, both in enumerate(totals):
                row = builder.mul(builder.add(output, ir.Constant(index, j)), size_)
                rows.append([place_in(context, builder, left, left_, at) for at in (row, builder.add(row, apart_))])
                for mine, first in zip(both, (begin, every(FLOATS, 0.0)), strict=True):
                    for total in mine:
                        builder.store(first, total)
            with cgutils.for_range(builder, size_) as loop:
                first = builder.mul(loop.index, ir.Constant(index, HALF))
                for side in range(2):
                    vectors = []
                    for stripe in range(STRIPES):
                        at = builder.add(first, ir.Constant(index, stripe * LANES))
                        if side:
                            at = builder.add(at, builder.mul(size_, ir.Constant(index, HALF)))
                        vectors.append(builder.load(place_in(context, builder, near, near_, at, FLOATS), align=4))
                    for row, both in zip(rows, totals, strict=True):
                        x = splat(builder, builder.load(builder.gep(row[side], [loop.index])), FLOATS)
                        for vector, total in zip(vectors, both[side], strict=True):
                            builder.store(times_plus(builder, x, vector, builder.load(total)), total)
            for j, (even, odd) in enumerate(totals):
                at = builder.mul(builder.add(output, ir.Constant(index, j)), ir.Constant(index, WIDE))
                at = builder.add(at, to_)
                for stripe in range(STRIPES):
                    x, y = builder.load(even[stripe]), builder.load(odd[stripe])
                    behind, ahead = HALF + stripe * LANES, HALF - (stripe + 1) * LANES
                    for steps, place in ((builder.fadd(x, y), behind), (builder.fsub(x, y), ahead)):
                        words = builder.fptosi(steps, WORDS)
                        for bound, beyond in ((every(WORDS, 0), "<"), (every(WORDS, TOP), ">")):
                            words = builder.select(builder.icmp_signed(beyond, words, bound), bound, words)
                        shorts, before = builder.trunc(words, SHORTS), builder.load(most)
                        above = builder.icmp_signed(">", shorts, before)
                        builder.store(builder.select(above, shorts, before), most)
                        if place == ahead:
                            shorts = builder.shuffle_vector(shorts, shorts, BACKWARDS)
                        where = builder.add(at, ir.Constant(index, place))
                        builder.store(shorts, place_in(context, builder, out, out_, where, SHORTS), align=2)
        top = call(builder, f"llvm.vector.reduce.smax.v{LANES}i16", ir.IntType(16), builder.load(most))
        return builder.sext(top, index)

    index = types.intp
    return types.intp(left, index, index, near, index, types.float32, out, index), code


@intrinsic
def _take_codes(typing, codes, half, out):
    """Write what `half` bytes at an address stand for, two codes each, to `out` `[2 half]` float32."""

    def code(context, builder, signature, arguments):
        codes_, half_, out_ = arguments
        names, kind = ir.VectorType(ir.IntType(8), MULTIPLE), ir.VectorType(FLOAT, MULTIPLE)
        step = ir.Constant(half_.type, MULTIPLE)
        with cgutils.for_range_slice(builder, ir.Constant(half_.type, 0), half_, step, intp=half_.type) as (i, _):
            both = builder.load(builder.inttoptr(builder.add(codes_, i), names.as_pointer()), align=1)
            low, high = builder.and_(both, every(names, HIGHEST)), builder.lshr(both, every(names, 4))
            for part, at in ((low, i), (high, builder.add(half_, i))):
                number = builder.uitofp(builder.zext(part, ir.VectorType(ir.IntType(32), MULTIPLE)), kind)
                place = place_in(context, builder, out, out_, at, kind)
                builder.store(builder.fsub(number, every(kind, MIDDLE)), place, align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, out), code


@njit
def meet_missed(numbers, which, turned, share, wide, more):
    """Write what codes miss of the logits of rows to `more` `[G,X]` float32, 0 where there is no row; turned: a KV
    head's queries `[G*D]` float32, as `make_tables` writes them."""
    records_at, apart, width, count = numbers[MISSED_AT:NUMBERS]
    if count == 0:
        return
    half, each = width - HEADER, np.empty(2 * (width - HEADER), np.float32)
    for i in range(count):
        at = records_at + which * apart + i * width
        if array_at(np.int32, at, 1)[0] < 0:
            for g in range(share):
                more[g * count + i] = 0
            continue
        scale = array_at(np.float32, at + 4, 1)[0]
        _take_codes(at + HEADER, half, each)
        g = 0
        while share - g >= 4:
            four = dot4(turned, g * wide, each, 0, wide)
            for k in range(4):
                more[(g + k) * count + i] = four[k] * scale
            g += 4
        while g < share:
            more[g * count + i] = dot(turned, g * wide, each, 0, wide) * scale
            g += 1


@njit
def meet_queries(numbers, which, query, share, more, met):
    """Write what cosine and sine of each pair's angle count for in the products of a KV head's queries `[G*D]` float32
    with its key to `met` `[2,G,F + M + S]`, and behind these, `[G]`, how far from 0 they can be, but for what does not
    turn. Return how far apart the least and the largest are, at the head where that is most; more: see `meet_missed`.
    """
    order_at, key_at, wide, interleaved, _, size = numbers[8:14]
    count = numbers[NUMBERS - 1]
    both = numbers[17] + numbers[18] + numbers[19]
    key = array_at(np.float32, key_at + 4 * which * size, size)
    order, half, most = array_at(np.int64, order_at, both), wide // 2, np.float32(0)
    met[:] = 0
    for g in range(share):
        reach = np.float32(0)
        for i in range(both):
            pair = order[i]
            if pair < 0:
                continue
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            a, b = query[g * size + first], query[g * size + second]
            c, d = key[first], key[second]
            across, along = a * c + b * d, b * c - a * d
            met[g * both + i], met[(share + g) * both + i] = across, along
            reach += np.sqrt(across * across + along * along)
        top = np.float32(0)
        for i in range(g * count, (g + 1) * count):
            top = max(top, abs(more[i]))
        reach += top
        met[2 * share * both + g] = reach
        most = max(most, 2 * reach)
    return most


@njit
def room_of_met(numbers, share):
    """Return how many numbers `meet_queries` writes."""
    return 2 * share * (numbers[17] + numbers[18] + numbers[19]) + share


@njit
def round_turned(numbers, which, share, met, more, step, arena, highest):
    """Write the products of a KV head's queries with its key, turned to each row's position, as int16 in whole steps
    from the least that they can be, and the largest of each query head to `highest` `[G]` int16; met, more: what
    `meet_queries`, which is divided by the step, and `meet_missed` have written. Return the address of the first row's,
    and how many numbers on the next query head's are."""
    (at_at, begins_at, far_at, near_at, wide_far_at, wide_near_at, slow_at, _, _, _, _, heads, _, rows, blocks, pairs,
     filled, middling, slowest, _, _, _, missed) = numbers[1:NUMBERS]  # fmt: skip
    both, few, inner, stride = filled + middling + slowest, TERMS // 2, 2 * middling + TERMS, blocks * WIDE + PADDED
    size, apart = pairs + few, AT_ONCE * (pairs + few) + LANES
    far, near = array_at(np.float32, far_at, blocks * 2 * filled), array_at(np.float32, near_at, 2 * size * HALF)
    wide_far = array_at(np.float32, wide_far_at, blocks // TOGETHER * 2 * (middling + slowest))
    slow, whole = array_at(np.float32, slow_at, TERMS * slowest), array_at(np.int16, arena, share * stride)
    wide_left, none = np.empty(TOGETHER * inner, np.float32), np.zeros(TOGETHER, np.float32)
    left, terms = np.empty(2 * apart, np.float32), np.empty(TOGETHER * COLUMNS, np.float32)
    met[:] *= np.float32(1) / step if step > 0 else np.float32(0)
    for g in range(share):
        u, v = met[g * both : (g + 1) * both], met[(share + g) * both : (share + g + 1) * both]
        slow_u, slow_v = u[filled:], v[filled:]
        reach, top = met[2 * share * both + g] + np.float32(0.5), 0
        for block in range(0, blocks, AT_ONCE):
            for n in range(TOGETHER):
                first = (block // TOGETHER + n) * 2 * (middling + slowest)
                _turn_block(slow_u, slow_v, wide_far, first, middling, slowest, slow, wide_left, n * inner)
            for part in range(COLUMNS // VECTORS):
                own = array_at(np.float32, wide_near_at + 4 * part * inner * VECTORS, inner * VECTORS)
                multiply(wide_left, none, TOGETHER // ROWS, own, inner, terms[part * TOGETHER * VECTORS :])
            for n in range(AT_ONCE):
                at = n * size
                _turn_pairs(u, v, far, (block + n) * 2 * filled, filled, left, at, apart)
                for i in range(few):
                    left[np.uint64(at + pairs + i)] = terms[PLACES[np.uint64(n * TERMS + i)]]
                    left[np.uint64(apart + at + pairs + i)] = terms[PLACES[np.uint64(n * TERMS + few + i)]]
            at = g * stride + block * WIDE
            top = max(top, _add_blocks(left, apart, AT_ONCE // OUTPUTS, near, size, reach, whole, at))
        highest[g] = np.int16(top)
        whole[(g + 1) * stride - PADDED : (g + 1) * stride] = 0
    sequence = which // heads
    begin = array_at(np.int64, begins_at + 8 * sequence, 1)[0]
    if begin >= 0:
        for g in range(share if missed else 0):
            own = array_at(np.int16, arena + 2 * (g * stride + begin), rows)
            highest[g] = add_missed(own, numbers, which, more[g * missed : (g + 1) * missed], step, highest[g])
        return arena + 2 * begin, stride
    places = array_at(np.int32, at_at + 4 * sequence * rows, rows)
    by_row, row_stride = array_at(np.int16, arena + 2 * share * stride, share * (rows + PADDED)), rows + PADDED
    for g in range(share):
        for n in range(rows):
            by_row[g * row_stride + n] = whole[g * stride + places[n]]
        by_row[g * row_stride + rows : (g + 1) * row_stride] = 0
        if missed:
            own = by_row[g * row_stride : g * row_stride + rows]
            highest[g] = add_missed(own, numbers, which, more[g * missed : (g + 1) * missed], step, highest[g])
    return arena + 2 * share * stride, row_stride


@njit
def add_missed(own, numbers, which, more, step, highest):
    """Add to what rows have, `own` `[N]` int16 in whole steps, what codes miss of some, `more` `[X]`, and return the
    largest number of them and `highest`."""
    records_at, apart, width, count = numbers[MISSED_AT:NUMBERS]
    top = np.int64(highest)
    for i in range(count if step > 0 else 0):
        row = array_at(np.int32, records_at + which * apart + i * width, 1)[0]
        if 0 <= row < len(own):
            found = max(np.int64(own[row]) + np.int64(np.floor(more[i] / step + np.float32(0.5))), 0)
            own[row], top = np.int16(found), max(top, found)
    return np.int16(top)


@njit
def add_to_sums(sums, head_step, share, added, stride, first, count):
    """Add what rows from `first` on have to their sums, int16 at the address `sums`, `head_step` bytes from a query
    head's to the next's; none to those below 0, which are not valid."""
    for g in range(share):
        own = array_at(np.int16, sums + g * head_step, count)
        more = array_at(np.int16, added + 2 * (g * stride + first), count)
        for lane in range(count):
            own[lane] = own[lane] + more[lane] if own[lane] >= 0 else own[lane]


@njit
def add_to_listed(sums, head_step, share, added, stride, names, count):
    """As `add_to_sums`, of the rows that `names`, int32 at an address, says."""
    rows = array_at(np.int32, names, count)
    for g in range(share):
        own, more = array_at(np.int16, sums + g * head_step, count), array_at(np.int16, added + 2 * g * stride, stride)
        for i in range(count):
            own[i] += more[rows[i]]
