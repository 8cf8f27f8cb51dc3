"""Sums of table entries by product codes of 64 rows at a time, of 16 bits, in registers, and what is read off sums."""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_vectors import WORD, every
from sparseattn.kernels.product_codes.codes import BLOCK
from sparseattn.kernels.product_codes.cpu_registers import (
    BYTES,
    NONE,
    SHORT,
    SHORTS,
    WIDTH,
    CodesAt,
    both_codes,
    for_groups,
    load,
    long,
    looked_up,
    mask_of,
    moved,
    shorts_of,
    store,
    table_at,
)

HALF = WIDTH // 2  # numbers of 16 bits in a register
IN_ORDER = [lane // 2 + WIDTH // 2 * (lane % 2) for lane in range(WIDTH)]  # of even and odd rows' sums, of all
place = types.intp


def _halves(builder, even, odd):
    """Return the sums of a register's rows in their order, in two registers."""
    for first in (0, HALF):
        lanes = ir.Constant(ir.VectorType(WORD, HALF), IN_ORDER[first : first + HALF])
        yield builder.shuffle_vector(even, odd, lanes)


def _sums_of_heads(builder, heads, g, codes, tables, size, out, head_step, valid):
    for tile in range(BLOCK // WIDTH):
        lows, highs = ([cgutils.alloca_once(builder, SHORTS) for _ in range(heads)] for _ in range(2))
        for total in lows + highs:
            builder.store(every(SHORTS, 0), total)
        first = builder.add(tables, builder.mul(g, size))
        with cgutils.for_range(builder, codes.count) as loop:
            at = builder.add(codes.at, builder.mul(loop.index, codes.step))
            names = both_codes(builder, moved(builder, at, tile * WIDTH))
            own = builder.add(first, builder.shl(loop.index, long(5)))
            for head in range(heads):
                for half, index in enumerate(names):
                    entries = looked_up(builder, table_at(builder, moved(builder, own, 16 * half)), index)
                    entries = builder.bitcast(entries, SHORTS)
                    # The sum of the even rows' bytes, and 256 times the odd ones', less what does not fit.
                    builder.store(builder.add(builder.load(lows[head]), entries), lows[head])
                    odd = builder.lshr(entries, every(SHORTS, 8))
                    builder.store(builder.add(builder.load(highs[head]), odd), highs[head])
                own = builder.add(own, size)
        there = builder.icmp_unsigned("!=", load(builder, moved(builder, valid, tile * WIDTH), BYTES), every(BYTES, 0))
        for head in range(heads):
            odd = builder.load(highs[head])
            even = builder.sub(builder.load(lows[head]), builder.shl(odd, every(SHORTS, 8)))
            at = builder.add(out, builder.mul(builder.add(g, long(head)), head_step))
            for half, total in enumerate(_halves(builder, even, odd)):
                lanes = ir.Constant(ir.VectorType(WORD, HALF), list(range(half * HALF, (half + 1) * HALF)))
                total = builder.select(builder.shuffle_vector(there, there, lanes), total, every(SHORTS, -1))
                store(builder, total, moved(builder, at, 2 * (tile * WIDTH + half * HALF)))


@intrinsic
def sum_block(typing, codes, step, count, tables, size, share, out, head_step, valid):
    """At `out`, int16, the sums of 64 rows, for `share` query heads `head_step` bytes apart: of 8-bit tables of 4-bit
    codes, 16 numbers for each subspace and `size` bytes for each query head. -1 where `valid`, 64 bytes, is 0.

    codes, tables, out, valid: addresses; step: bytes from the codes of 64 rows' byte r to those of the next, `count` of
    these.
    """

    def code(context, builder, signature, arguments):
        codes_, step_, count_, tables_, size_, share_, *rest = arguments

        def sums(heads, g):
            _sums_of_heads(builder, heads, g, CodesAt(codes_, step_, count_), tables_, size_, *rest)

        for_groups(builder, share_, sums)
        return context.get_dummy_value()

    return types.void(*[place] * 9), code


@intrinsic
def nearest(typing, sums, head_step, share, tops, gap, count):
    """At `gap`, int16: how far the sums of `count` rows, a multiple of 64, are below `tops`, int16 of each query head,
    at the head where that is least; `NONE` where a sum is below 0. All are addresses."""

    def code(context, builder, signature, arguments):
        sums_, step_, share_, tops_, gap_, count_ = arguments
        with cgutils.for_range_slice(builder, long(0), count_, long(HALF), intp=count_.type) as (n, _):
            at = builder.shl(n, long(1))
            least = cgutils.alloca_once(builder, SHORTS)
            builder.store(every(SHORTS, NONE), least)
            with cgutils.for_range(builder, share_) as loop:
                own = builder.add(builder.add(sums_, at), builder.mul(loop.index, step_))
                total = load(builder, own, SHORTS)
                top = load(builder, builder.add(tops_, builder.shl(loop.index, long(1))), SHORT)
                less = builder.sub(shorts_of(builder, top), total)
                less = builder.select(builder.icmp_signed("<", total, every(SHORTS, 0)), every(SHORTS, NONE), less)
                before = builder.load(least)
                builder.store(builder.select(builder.icmp_signed("<", less, before), less, before), least)
            store(builder, builder.load(least), builder.add(gap_, at))
        return context.get_dummy_value()

    return types.void(*[place] * 6), code


@intrinsic
def count_within(typing, gap, count, limit):
    """How many of `count` int16 numbers at `gap`, a multiple of 64 and below 2^15 times a register's, are `limit` at
    most."""

    def code(context, builder, signature, arguments):
        gap_, count_, limit_ = arguments
        most, total = shorts_of(builder, limit_), cgutils.alloca_once(builder, SHORTS)
        builder.store(every(SHORTS, 0), total)
        with cgutils.for_range_slice(builder, long(0), count_, long(HALF), intp=count_.type) as (n, _):
            x = load(builder, builder.add(gap_, builder.shl(n, long(1))), SHORTS)
            within = builder.sext(builder.icmp_signed("<=", x, most), SHORTS)
            builder.store(builder.sub(builder.load(total), within), total)
        wide = ir.VectorType(WORD, HALF)
        name = f"llvm.vector.reduce.add.v{HALF}i32"
        kind = ir.FunctionType(WORD, [wide])
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.zext(builder.call(function, [builder.zext(builder.load(total), wide)]), count_.type)

    return place(place, place, types.int16), code


@intrinsic
def within(typing, gap, limit):
    """Return a bit for each of 64 rows whose int16 number at `gap` is `limit` at most."""

    def code(context, builder, signature, arguments):
        gap_, limit_ = arguments
        bits, most = long(0), shorts_of(builder, limit_)
        for first in range(0, BLOCK, HALF):
            hits = builder.icmp_signed("<=", load(builder, moved(builder, gap_, 2 * first), SHORTS), most)
            bits = builder.or_(bits, builder.shl(mask_of(builder, hits), long(first)))
        return bits

    return types.uint64(place, types.int16), code


@intrinsic
def highest_sum(typing, sums, gap, last, count):
    """Return the largest of `count` int16 sums, a multiple of 64, whose number at `gap` is `last` at most; -1:
    none."""

    def code(context, builder, signature, arguments):
        sums_, gap_, last_, count_ = arguments
        most, top = shorts_of(builder, last_), cgutils.alloca_once(builder, SHORTS)
        builder.store(every(SHORTS, -1), top)
        with cgutils.for_range_slice(builder, long(0), count_, long(HALF), intp=count_.type) as (n, _):
            at = builder.shl(n, long(1))
            x, before = load(builder, builder.add(sums_, at), SHORTS), builder.load(top)
            there = builder.icmp_signed("<=", load(builder, builder.add(gap_, at), SHORTS), most)
            larger = builder.and_(there, builder.icmp_signed(">", x, before))
            builder.store(builder.select(larger, x, before), top)
        kind = ir.FunctionType(SHORT, [SHORTS])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.smax.v{HALF}i16")
        return builder.sext(builder.call(function, [builder.load(top)]), count_.type)

    return place(place, place, types.int16, place), code
