"""Sums of table entries by product codes of 64 rows at a time, in registers: what the compiled kernel is made of.

A table of 16 numbers of 32 bits is one register of 64 bytes, or two of 32, and a shuffle looks up 16 rows at once. A
number of 32 bits is a float32, or two sums of 16 bits, of two query heads. https://arxiv.org/abs/1704.07355 keeps
tables in registers like this, of 8 bits.
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_vectors import BYTE, FLOATS, LANES, WORD, WORDS, call, every, place_in

BLOCK = 64  # rows
TILES = BLOCK // LANES
BYTES, SHORTS = ir.VectorType(BYTE, LANES), ir.VectorType(ir.IntType(16), 2 * LANES)
EIGHT = ir.VectorType(WORD, 8)
FEATURES = llvm.get_host_cpu_features()
SHUFFLES = 512 if FEATURES.get("avx512f") else 256 if FEATURES.get("avx2") else 0  # bits of a register, 0: none


def _half(builder, vector, first):
    return builder.shuffle_vector(vector, vector, ir.Constant(EIGHT, list(range(first, first + 8))))


def _looked_up(builder, table, index):
    """`table[index & 15]`, vectors of 16 numbers of 32 bits."""
    if SHUFFLES == 512:
        return call(builder, "llvm.x86.avx512.permvar.si.512", WORDS, table, index)
    halves = []
    for first in (0, 8):
        few = _half(builder, index, first)  # of which a shuffle of 8 numbers looks at 3 bits
        low, high = (call(builder, "llvm.x86.avx2.permd", EIGHT, _half(builder, table, at), few) for at in (0, 8))
        above = builder.trunc(builder.lshr(few, every(EIGHT, 3)), ir.VectorType(ir.IntType(1), 8))
        halves.append(builder.select(above, high, low))
    return builder.shuffle_vector(*halves, ir.Constant(WORDS, list(range(LANES))))


@intrinsic
def shuffled_sums(typing, codes, at, step, count, tables, t, out, o):
    """`out[o:o + 64]`: of 64 rows the sums of `tables[t + 16 m + code]` over both codes of `count` bytes, those of byte
    r at `codes[at + r * step:]`. Tables and sums are uint32 or float32."""
    floats = tables.dtype == types.float32

    def code(context, builder, signature, arguments):
        codes_, at_, step_, count_, tables_, t_, out_, o_ = arguments
        kind = FLOATS if floats else WORDS
        totals = [cgutils.alloca_once(builder, kind) for _ in range(TILES)]
        for total in totals:
            builder.store(every(kind, 0.0 if floats else 0), total)
        with cgutils.for_range(builder, count_) as loop:
            first = builder.add(at_, builder.mul(loop.index, step_))
            table_at = builder.add(t_, builder.mul(loop.index, ir.Constant(t_.type, 2 * LANES)))
            pair = []
            for m in range(2):
                place = builder.add(table_at, ir.Constant(t_.type, m * LANES))
                pair.append(builder.load(place_in(context, builder, tables, tables_, place, WORDS), align=4))
            for tile, total in enumerate(totals):
                place = builder.add(first, ir.Constant(at_.type, tile * LANES))
                both = builder.load(place_in(context, builder, codes, codes_, place, BYTES), align=1)
                index = builder.zext(both, WORDS)
                for m, table in enumerate(pair):
                    found = _looked_up(builder, table, builder.lshr(index, every(WORDS, 4)) if m else index)
                    held = builder.load(total)
                    if floats:
                        builder.store(builder.fadd(held, builder.bitcast(found, FLOATS)), total)
                    else:
                        builder.store(builder.add(held, found), total)
        for tile, total in enumerate(totals):
            place = builder.add(o_, ir.Constant(o_.type, tile * LANES))
            builder.store(builder.load(total), place_in(context, builder, out, out_, place, kind), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(codes, place, place, place, tables, place, out, place), code


def _marks(context, builder, valid, value, place):
    """Which of 16 rows are valid, from their bytes."""
    marks = builder.load(place_in(context, builder, valid, value, place, BYTES), align=1)
    return builder.icmp_unsigned("!=", marks, every(BYTES, 0))


def _larger(builder, a, b, signed):
    compare = builder.icmp_signed if signed else builder.icmp_unsigned
    a, b = (builder.bitcast(x, SHORTS) for x in (a, b))
    return builder.bitcast(builder.select(compare(">", a, b), a, b), WORDS)


@intrinsic
def raise_tops(typing, sums, s, valid, v, tops, t):
    """Raise the sums of 16 bits in the register `tops[t:t + 16]` to the largest of those of 64 rows, two a number of
    `sums[s:s + 64]`, whose byte of `valid[v:]` is not 0."""

    def code(context, builder, signature, arguments):
        sums_, s_, valid_, v_, tops_, t_ = arguments
        where = place_in(context, builder, tops, tops_, t_, WORDS)
        top = builder.load(where, align=4)
        for tile in range(TILES):
            at, mark = (builder.add(x, ir.Constant(s_.type, tile * LANES)) for x in (s_, v_))
            x = builder.load(place_in(context, builder, sums, sums_, at, WORDS), align=4)
            x = builder.select(_marks(context, builder, valid, valid_, mark), x, every(WORDS, 0))
            top = _larger(builder, x, top, signed=False)
        builder.store(top, where, align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(sums, place, valid, place, tops, place), code


@intrinsic
def below_tops(typing, sums, s, pairs, tops, t, valid, v, out, o):
    """`out[o:o + 64]` float32: of 64 rows the largest over `pairs` of `sums[s + 64 p:]` less `tops[t + p]`, two sums of
    16 bits each; -inf where a byte of `valid[v:]` is 0."""

    def code(context, builder, signature, arguments):
        sums_, s_, pairs_, tops_, t_, valid_, v_, out_, o_ = arguments
        sixteen = every(WORDS, 16)
        for tile in range(TILES):
            nearest = cgutils.alloca_once(builder, WORDS)
            builder.store(every(WORDS, 0x80008000), nearest)
            with cgutils.for_range(builder, pairs_) as loop:
                block = builder.mul(loop.index, ir.Constant(s_.type, BLOCK))
                at = builder.add(builder.add(s_, block), ir.Constant(s_.type, tile * LANES))
                x = builder.load(place_in(context, builder, sums, sums_, at, WORDS), align=4)
                top = builder.load(place_in(context, builder, tops, tops_, builder.add(t_, loop.index)))
                none = ir.Constant(WORDS, ir.Undefined)
                wide = builder.insert_element(none, top, ir.Constant(WORD, 0))
                wide = builder.shuffle_vector(wide, none, every(WORDS, 0))
                less = builder.sub(builder.bitcast(x, SHORTS), builder.bitcast(wide, SHORTS))
                builder.store(_larger(builder, builder.load(nearest), less, signed=True), nearest)
            both = builder.load(nearest)
            high, low = builder.ashr(both, sixteen), builder.ashr(builder.shl(both, sixteen), sixteen)
            row = builder.sitofp(builder.select(builder.icmp_signed(">", low, high), low, high), FLOATS)
            mark = _marks(context, builder, valid, valid_, builder.add(v_, ir.Constant(v_.type, tile * LANES)))
            row = builder.select(mark, row, every(FLOATS, float("-inf")))
            place = builder.add(o_, ir.Constant(o_.type, tile * LANES))
            builder.store(row, place_in(context, builder, out, out_, place, FLOATS), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(sums, place, place, tops, place, valid, place, out, place), code
