"""Rows that can be candidates, by sums of 8 bits that stop at 255, listed with their codes."""

# Code for the compiler, which takes LLVM's types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_vectors import BYTE, LANES, WORD, WORDS, ask_for, call, every, splat
from sparseattn.kernels.product_codes.codes import BLOCK
from sparseattn.kernels.product_codes.cpu_registers import (
    BYTES,
    COMPRESSES,
    LONG,
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

TOGETHER = 2 * BLOCK // WIDTH if WIDTH == 64 else 1  # registers of rows for which a table is read once
TILE = 2 * BLOCK  # rows of which `possible` tells at once
ABOVE = 255  # a sum that has stopped: of a row that is no candidate
place = types.intp


def _fewer(builder, x, y):
    return builder.select(builder.icmp_unsigned("<", x, y), x, y)


def _losses(builder, heads, g, codes, tables, size, begins, least):
    for tile in range(0, TILE // WIDTH, TOGETHER):
        totals = [[cgutils.alloca_once(builder, BYTES) for _ in range(TOGETHER)] for _ in range(heads)]
        for head, own in enumerate(totals):
            begin = builder.add(begins, builder.mul(builder.add(g, long(head)), long(TILE)))
            for part, total in enumerate(own):
                builder.store(load(builder, moved(builder, begin, (tile + part) * WIDTH), BYTES), total)
        first = builder.add(tables, builder.mul(g, size))
        with cgutils.for_range(builder, codes.count) as loop:
            at = moved(builder, builder.add(codes.at, builder.mul(loop.index, codes.step)), tile * WIDTH)
            names = [both_codes(builder, moved(builder, at, part * WIDTH)) for part in range(TOGETHER)]
            table = builder.add(first, builder.shl(loop.index, long(5)))
            for head in range(heads):
                for half in range(2):
                    half_table = table_at(builder, moved(builder, table, 16 * half))
                    for part in range(TOGETHER):
                        total = totals[head][part]
                        losses = looked_up(builder, half_table, names[part][half])
                        losses = call(builder, f"llvm.uadd.sat.v{WIDTH}i8", BYTES, builder.load(total), losses)
                        builder.store(losses, total)
                table = builder.add(table, size)
        for part in range(TOGETHER):
            least_yet = least[tile + part]
            for own in totals:
                builder.store(_fewer(builder, builder.load(own[part]), builder.load(least_yet)), least_yet)


@intrinsic
def possible(typing, codes, step, count, tables, size, begins, share, valid, marks):
    """At `marks` two numbers of 64 bits, a bit for each of 128 rows that `valid`, as many bytes, does not exclude, and
    whose sum of 8-bit tables added to what it begins with is below 255 for one of `share` query heads.

    begins: a byte for each row, 128 of a query head; all else as `cpu_sums.sum_block` has it.
    """

    def code(context, builder, signature, arguments):
        codes_, step_, count_, tables_, size_, begins_, share_, valid_, marks_ = arguments
        least = [cgutils.alloca_once(builder, BYTES) for _ in range(TILE // WIDTH)]
        for least_loss in least:
            builder.store(every(BYTES, ABOVE), least_loss)

        def losses(heads, g):
            _losses(builder, heads, g, CodesAt(codes_, step_, count_), tables_, size_, begins_, least)

        for_groups(builder, share_, losses)
        for half in range(2):
            bits = long(0)
            for tile in range(BLOCK // WIDTH):
                first = half * BLOCK + tile * WIDTH
                there = load(builder, moved(builder, valid_, first), BYTES)
                below = builder.icmp_unsigned("!=", builder.load(least[first // WIDTH]), every(BYTES, ABOVE))
                hits = builder.and_(below, builder.icmp_unsigned("!=", there, every(BYTES, 0)))
                bits = builder.or_(bits, builder.shl(mask_of(builder, hits), long(tile * WIDTH)))
            store(builder, bits, moved(builder, marks_, 8 * half))
        return context.get_dummy_value()

    return types.void(*[place] * 9), code


@intrinsic
def begin_sums(typing, added, head_step, share, highest, scales, firsts, begins):
    """Write what sums of losses begin with for each of 128 rows and each query head, `[G,128]` uint8, by what is added
    to rows' sums, int16: how far that is below the head's highest `[G]` int16, times the head's `scales` `[G]` uint16,
    a fraction of 16 bits, and rounded down, and the head's `firsts` `[G]` uint8. All are addresses but `head_step`,
    bytes from a query head's rows to the next's."""

    def code(context, builder, signature, arguments):
        added_, head_step_, share_, highest_, scales_, firsts_, begins_ = arguments
        few = WIDTH // 2
        some, words = ir.VectorType(BYTE, few), ir.VectorType(WORD, few)
        with cgutils.for_range(builder, share_) as loop:
            short = builder.shl(loop.index, long(1))
            top = shorts_of(builder, load(builder, builder.add(highest_, short), SHORT))
            scale = builder.zext(shorts_of(builder, load(builder, builder.add(scales_, short), SHORT)), words)
            first = splat(builder, load(builder, builder.add(firsts_, loop.index), BYTE), some)
            own = builder.add(added_, builder.mul(loop.index, head_step_))
            to = builder.add(begins_, builder.mul(loop.index, long(TILE)))
            for at in range(0, TILE, few):
                below = builder.sub(top, load(builder, moved(builder, own, 2 * at), SHORTS))
                scaled = builder.lshr(builder.mul(builder.zext(below, words), scale), every(words, 16))
                most = _fewer(builder, builder.trunc(scaled, SHORTS), every(SHORTS, ABOVE))
                sums = call(builder, f"llvm.uadd.sat.v{few}i8", some, builder.trunc(most, some), first)
                store(builder, sums, moved(builder, to, at))
        return context.get_dummy_value()

    return types.void(*[place] * 7), code


@intrinsic
def ask(typing, codes, step, count):
    """Asks for the line of memory at `codes`, an address, and for `count` such, `step` bytes apart."""

    def code(context, builder, signature, arguments):
        codes_, step_, count_ = arguments
        with cgutils.for_range(builder, count_) as loop:
            at = builder.add(codes_, builder.mul(loop.index, step_))
            ask_for(builder, builder.inttoptr(at, BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(place, place, place), code


def _moved_together(builder, name, x, marks):
    return call(builder, f"llvm.x86.avx512.mask.compress.{name}", x.type, x, every(x.type, 0), marks)


def _list_at_once(builder, marks, listed, first, codes, kept, most, rows):
    """`list_rows` in a few instructions: 64 bytes are written whatever is listed."""
    wide = ir.VectorType(BYTE, BLOCK)
    lanes = builder.bitcast(marks, ir.VectorType(ir.IntType(1), BLOCK))
    with cgutils.for_range(builder, codes.count) as loop:
        own = load(builder, builder.add(codes.at, builder.mul(loop.index, codes.step)), wide)
        at = builder.add(builder.add(kept, builder.mul(loop.index, most)), listed)
        store(builder, _moved_together(builder, "v64i8", own, lanes), at)
    which = _moved_together(builder, "v64i8", ir.Constant(wide, list(range(BLOCK))), lanes)
    many = builder.ctpop(marks)
    base = splat(builder, builder.trunc(first, WORD), WORDS)
    for part in range(0, BLOCK, LANES):

        def put(part=part):
            few = ir.Constant(ir.VectorType(WORD, LANES), list(range(part, part + LANES)))
            own = builder.zext(builder.shuffle_vector(which, which, few), WORDS)
            store(
                builder, builder.add(own, base), builder.add(rows, builder.shl(moved(builder, listed, part), long(2)))
            )

        if part == 0:
            put()
        else:
            with builder.if_then(builder.icmp_unsigned(">", many, long(part)), likely=False):
                put()
    return builder.add(listed, many)


def _list_one_by_one(builder, marks, listed, first, codes, kept, most, rows):
    left, to = cgutils.alloca_once_value(builder, marks), cgutils.alloca_once_value(builder, listed)
    loop, body, end = (builder.append_basic_block(name) for name in ("rows", "rows.body", "rows.end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    bits = builder.load(left)
    builder.cbranch(builder.icmp_unsigned("!=", bits, long(0)), body, end)
    builder.position_at_end(body)
    lane, at = builder.cttz(bits, ir.Constant(ir.IntType(1), 1)), builder.load(to)
    builder.store(builder.and_(bits, builder.sub(bits, long(1))), left)
    row = builder.trunc(builder.add(first, lane), WORD)
    store(builder, row, builder.add(rows, builder.shl(at, long(2))))
    with cgutils.for_range(builder, codes.count) as each:
        own = load(builder, builder.add(builder.add(codes.at, builder.mul(each.index, codes.step)), lane), BYTE)
        store(builder, own, builder.add(builder.add(kept, builder.mul(each.index, most)), at))
    builder.store(builder.add(at, long(1)), to)
    builder.branch(loop)
    builder.position_at_end(end)
    return builder.load(to)


@intrinsic
def list_rows(typing, marks, listed, first, codes, step, count, kept, most, rows):
    """List the rows of 64 that have a bit in the number at `marks` behind the `listed` ones that are listed: their
    names, `first` that of the first, at `rows`, int32; byte r of their codes at `kept + r * most`. Return how many are
    listed then.

    All but numbers are addresses. As many as 64 numbers behind the last may be written over.
    """

    def code(context, builder, signature, arguments):
        marks_, listed_, first_, codes_, step_, count_, *to = arguments
        marks_here, own = load(builder, marks_, LONG), CodesAt(codes_, step_, count_)
        return (_list_at_once if COMPRESSES else _list_one_by_one)(builder, marks_here, listed_, first_, own, *to)

    return place(*[place] * 9), code


@intrinsic
def keep_rows(typing, rows, marks, to):
    """Write those of 16 int32 at the address `rows` that have a bit in `marks` to the address `to`, which is no larger;
    return how many."""

    def code(context, builder, signature, arguments):
        rows_, marks_, to_ = arguments
        if COMPRESSES:
            lanes = builder.bitcast(builder.trunc(marks_, ir.IntType(LANES)), ir.VectorType(ir.IntType(1), LANES))
            store(builder, _moved_together(builder, "v16i32", load(builder, rows_, WORDS), lanes), to_)
            return builder.ctpop(builder.zext(builder.trunc(marks_, ir.IntType(LANES)), LONG))
        left = cgutils.alloca_once_value(builder, builder.and_(marks_, long((1 << LANES) - 1)))
        done = cgutils.alloca_once_value(builder, long(0))
        loop, body, end = (builder.append_basic_block(name) for name in ("rows", "rows.body", "rows.end"))
        builder.branch(loop)
        builder.position_at_end(loop)
        bits = builder.load(left)
        builder.cbranch(builder.icmp_unsigned("!=", bits, long(0)), body, end)
        builder.position_at_end(body)
        lane, at = builder.cttz(bits, ir.Constant(ir.IntType(1), 1)), builder.load(done)
        row = load(builder, builder.add(rows_, builder.shl(lane, long(2))), WORD)
        store(builder, row, builder.add(to_, builder.shl(at, long(2))))
        builder.store(builder.and_(bits, builder.sub(bits, long(1))), left)
        builder.store(builder.add(at, long(1)), done)
        builder.branch(loop)
        builder.position_at_end(end)
        return builder.load(done)

    return place(place, types.uint64, place), code
