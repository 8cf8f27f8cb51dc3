"""Sums of table entries by product codes of 64 rows at a time, in registers: what the compiled kernel is made of.

A table of 16 bytes lies in a register, and one shuffle looks up the codes of as many rows as the register has bytes.
Sums have 16 bits. Prior art: faiss' fast scan, https://arxiv.org/abs/1704.07355.

The sums of a block lie in the order that costs nothing: of each register's rows first the even ones, then the odd ones
(`ROW_AT`).
"""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import contextlib

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_vectors import BYTE, FLOATS, LANES, WORD, WORDS, every, place_in, splat
from sparseattn.kernels.product_codes.codes import BLOCK

FEATURES = llvm.get_host_cpu_features()
# Bytes of a register whose shuffle looks up bytes; 0: there is none.
SHUFFLES = 64 if FEATURES.get("avx512bw") else 32 if FEATURES.get("avx2") else 0
WIDTH = SHUFFLES or 32
SHUFFLE = {64: "llvm.x86.avx512.pshuf.b.512", 32: "llvm.x86.avx2.pshuf.b"}
ROW_AT = np.concatenate([first + np.arange(WIDTH).reshape(-1, 2).T.ravel() for first in range(0, BLOCK, WIDTH)])
SHORT, LONG = ir.IntType(16), ir.IntType(64)
BYTES, SHORTS, TABLE = ir.VectorType(BYTE, WIDTH), ir.VectorType(SHORT, WIDTH // 2), ir.VectorType(BYTE, 16)
SIXTEEN_OF = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [lane % 16 for lane in range(WIDTH)])
NONE = 0x7FFF  # how far below the best a row is that is not valid


def _moved(builder, at, number):
    return builder.add(at, ir.Constant(at.type, number))


def _looked_up(builder, table, index):
    kind = ir.FunctionType(BYTES, [BYTES, BYTES])
    found = cgutils.get_or_insert_function(builder.module, kind, SHUFFLE[WIDTH])
    return builder.bitcast(builder.call(found, [table, index]), SHORTS)


def _marks(context, builder, valid, value, at):
    """Of a register's rows, whether they are valid: the even ones' and the odd ones'."""
    bytes_ = builder.load(place_in(context, builder, valid, value, at, BYTES), align=1)
    shorts, zero = builder.bitcast(bytes_, SHORTS), every(SHORTS, 0)
    even, odd = builder.and_(shorts, every(SHORTS, 0xFF)), builder.lshr(shorts, every(SHORTS, 8))
    return [builder.icmp_unsigned("!=", half, zero) for half in (even, odd)]


@contextlib.contextmanager
def _while(builder, condition):
    """The instructions that are written inside run again while `condition`, which writes its own, holds."""
    ask, run, end = (builder.append_basic_block(name) for name in ("while", "while.body", "while.end"))
    builder.branch(ask)
    with builder.goto_block(ask):
        builder.cbranch(condition(), run, end)
    builder.position_at_end(run)
    yield
    builder.branch(ask)
    builder.position_at_end(end)


def _splat(builder, number):
    none, lanes = ir.Constant(SHORTS, ir.Undefined), ir.VectorType(ir.IntType(32), SHORTS.count)
    first = builder.insert_element(none, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, every(lanes, 0))


def _sums_of_heads(context, builder, heads, arrays, codes_at, step, count, size, g, o, head_step):
    """Of 64 rows the sums of query heads `g` to `g + heads`, for which codes are read once; see `sums_of_block`."""

    def place(name, at, kind=None):
        return place_in(context, builder, *arrays[name], at, kind)

    begins = builder.icmp_signed("==", g, ir.Constant(g.type, 0))
    for tile in range(BLOCK // WIDTH):
        lows, highs = ([cgutils.alloca_once(builder, SHORTS) for _ in range(heads)] for _ in range(2))
        for total in lows + highs:
            builder.store(every(SHORTS, 0), total)
        with cgutils.for_range(builder, count) as loop:
            at = _moved(builder, builder.add(codes_at, builder.mul(loop.index, step)), tile * WIDTH)
            both = builder.load(place("codes", at, BYTES), align=1)
            four, mask = every(SHORTS, 4), every(BYTES, 15)
            above = builder.bitcast(builder.lshr(builder.bitcast(both, SHORTS), four), BYTES)
            names = builder.and_(both, mask), builder.and_(above, mask)
            first = builder.add(builder.mul(g, size), builder.mul(loop.index, ir.Constant(g.type, 32)))
            for head in range(heads):
                own = builder.add(first, builder.mul(size, ir.Constant(g.type, head)))
                for half, index in enumerate(names):
                    held = builder.load(place("tables", _moved(builder, own, 16 * half), TABLE), align=1)
                    found = _looked_up(builder, builder.shuffle_vector(held, held, SIXTEEN_OF), index)
                    # The sum of the even rows' bytes, and 256 times the odd ones', less what does not fit.
                    builder.store(builder.add(builder.load(lows[head]), found), lows[head])
                    odd = builder.lshr(found, every(SHORTS, 8))
                    builder.store(builder.add(builder.load(highs[head]), odd), highs[head])
        halves = [_moved(builder, o, tile * WIDTH + half * WIDTH // 2) for half in range(2)]
        before = [builder.load(place("near", half, SHORTS), align=2) for half in halves]
        nearest = [builder.select(begins, every(SHORTS, NONE), x) for x in before]
        for head in range(heads):
            which = _moved(builder, g, head)
            top, odd = _splat(builder, builder.load(place("tops", which))), builder.load(highs[head])
            even = builder.sub(builder.load(lows[head]), builder.shl(odd, every(SHORTS, 8)))
            for half, total in enumerate((even, odd)):
                at = builder.add(builder.mul(which, head_step), halves[half])
                builder.store(total, place("out", at, SHORTS), align=2)
                less = builder.sub(top, total)
                nearer = builder.icmp_signed("<", less, nearest[half])
                nearest[half] = builder.select(nearer, less, nearest[half])
        for half, least in zip(halves, nearest, strict=True):
            builder.store(least, place("near", half, SHORTS), align=2)


@intrinsic
def sums_of_block(typing, codes, at, step, count, tables, size, share, out, head_step, tops, near, o):
    """The sums of 64 rows for `share` query heads, and how far these are below `tops`.

    `out[g * head_step + o:]` uint16 are the sums of `tables[g * size + 16 m + code]` over the codes m of `count` bytes,
    byte r at `codes[at + r * step:]`, each below 16. `near[o:]` int16 is the least over g of `tops[g]` less the sum.
    """

    def code(context, builder, signature, arguments):
        codes_, at_, step_, count_, tables_, size_, share_, out_, head_step_, tops_, near_, o_ = arguments
        arrays = {
            "codes": (codes, codes_), "tables": (tables, tables_), "out": (out, out_),
            "tops": (tops, tops_), "near": (near, near_),
        }  # fmt: skip
        four, two, one = (ir.Constant(at_.type, heads) for heads in (4, 2, 1))
        with cgutils.for_range(builder, builder.sdiv(share_, four)) as loop:
            first = builder.mul(loop.index, four)
            _sums_of_heads(context, builder, 4, arrays, at_, step_, count_, size_, first, o_, head_step_)
        done = builder.and_(share_, ir.Constant(at_.type, -4))
        for heads, bit in ((2, two), (1, one)):
            with builder.if_then(builder.icmp_unsigned("!=", builder.and_(share_, bit), ir.Constant(at_.type, 0))):
                _sums_of_heads(context, builder, heads, arrays, at_, step_, count_, size_, done, o_, head_step_)
            done = builder.add(done, builder.and_(share_, bit))
        return context.get_dummy_value()

    place = types.intp
    return types.void(codes, place, place, place, tables, place, place, out, place, tops, near, place), code


@intrinsic
def within(typing, near, o, valid, v, limit):
    """A bit for each of 64 rows of which `near[o:]` int16 is `limit` at most and `valid[v:]` is not 0. Where that is 0,
    `near` becomes `NONE`."""

    def code(context, builder, signature, arguments):
        near_, o_, valid_, v_, limit_ = arguments
        bits, most = ir.Constant(LONG, 0), _splat(builder, limit_)
        for tile in range(BLOCK // WIDTH):
            marks = _marks(context, builder, valid, valid_, _moved(builder, v_, tile * WIDTH))
            for half, mark in enumerate(marks):
                first = tile * WIDTH + half * WIDTH // 2
                place = place_in(context, builder, near, near_, _moved(builder, o_, first), SHORTS)
                x = builder.select(mark, builder.load(place, align=2), every(SHORTS, NONE))
                builder.store(x, place, align=2)
                found = builder.icmp_signed("<=", x, most)
                wide = builder.zext(builder.bitcast(found, ir.IntType(SHORTS.count)), LONG)
                bits = builder.or_(bits, builder.shl(wide, ir.Constant(LONG, first)))
        return bits

    return types.uint64(near, types.intp, valid, types.intp, types.int16), code


@intrinsic
def list_rows(typing, marks, first, near, own, share, rows, below, sums, most, found):
    """Write the rows that have a bit in `marks` behind the `found` ones that are listed, and return how many are then.

    first: the block's first row; near, own: of `sums_of_block`; rows int32, below int16, and sums uint16, of which
    those of query head g begin at `g * most`.
    """

    def code(context, builder, signature, arguments):
        marks_, first_, near_, own_, share_, rows_, below_, sums_, most_, found_ = arguments
        lanes = cgutils.global_constant(
            builder, "product_codes_row_at", ir.Constant(ir.ArrayType(BYTE, BLOCK), [int(row) for row in ROW_AT])
        )
        left, count = cgutils.alloca_once_value(builder, marks_), cgutils.alloca_once_value(builder, found_)
        zero, one = ir.Constant(LONG, 0), ir.Constant(LONG, 1)

        def copy(source, value, at, target, into, to):
            number = builder.load(place_in(context, builder, source, value, at))
            builder.store(number, place_in(context, builder, target, into, to))

        with _while(builder, lambda: builder.icmp_unsigned("!=", builder.load(left), zero)):
            bits, to = builder.load(left), builder.load(count)
            lane = builder.cttz(bits, ir.Constant(ir.IntType(1), 1))
            builder.store(builder.and_(bits, builder.sub(bits, one)), left)
            row = builder.zext(builder.load(builder.gep(lanes, [zero, lane])), LONG)
            row = builder.trunc(builder.add(first_, row), ir.IntType(32))
            builder.store(row, place_in(context, builder, rows, rows_, to))
            copy(near, near_, lane, below, below_, to)
            for heads in (4, 1):  # four at a time, as a loop over one takes as long as two stores
                done = builder.and_(share_, ir.Constant(LONG, -4)) if heads == 1 else zero
                left_over = builder.sub(share_, done)
                with cgutils.for_range(builder, builder.sdiv(left_over, ir.Constant(LONG, heads))) as loop:
                    first_head = builder.add(done, builder.mul(loop.index, ir.Constant(LONG, heads)))
                    for head in range(heads):
                        g = _moved(builder, first_head, head)
                        at = builder.add(builder.mul(g, ir.Constant(LONG, BLOCK)), lane)
                        copy(own, own_, at, sums, sums_, builder.add(builder.mul(g, most_), to))
            builder.store(builder.add(to, one), count)
        return builder.load(count)

    place = types.intp
    return types.intp(types.uint64, place, near, own, place, rows, below, sums, place, place), code


@intrinsic
def listed_logits(typing, sums, s, below, last, size, count, out, o):
    """`out[o:o + count]`, a multiple of 16: `size` times `sums[s:]` where `below` is `last` at most, else -inf."""

    def code(context, builder, signature, arguments):
        sums_, s_, below_, last_, size_, count_, out_, o_ = arguments
        none, sixteen = ir.Constant(count_.type, 0), ir.Constant(count_.type, LANES)
        few, by = ir.VectorType(SHORT, LANES), splat(builder, size_, FLOATS)
        most = splat(builder, builder.sext(last_, WORD), WORDS)
        with cgutils.for_range_slice(builder, none, count_, sixteen, intp=count_.type) as (n, _):
            x = builder.load(place_in(context, builder, sums, sums_, builder.add(s_, n), few), align=2)
            apart = builder.load(place_in(context, builder, below, below_, n, few), align=2)
            logit = builder.fmul(builder.uitofp(builder.zext(x, WORDS), FLOATS), by)
            there = builder.icmp_signed("<=", builder.sext(apart, WORDS), most)
            logit = builder.select(there, logit, every(FLOATS, float("-inf")))
            builder.store(logit, place_in(context, builder, out, out_, builder.add(o_, n), FLOATS), align=4)
        return context.get_dummy_value()

    place = types.intp
    return types.void(sums, place, below, types.int16, types.float32, place, out, place), code
