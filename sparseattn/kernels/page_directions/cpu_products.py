"""Products, coordinates and log-sum-exps of a page by mean and directions, in vector instructions.

A page's products with up to four query heads are made while each of its numbers is widened once. Codes are multiplied
as the integers they are and steps come to the products.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import FAST, LN2, LOG2E, read, scope, widened
from sparseattn.kernels.numba_vectors import (
    FLOAT,
    FLOATS,
    LANES,
    MARKS,
    WORD,
    call,
    every,
    larger,
    logarithms,
    place_in,
    powers,
    splat,
    times_plus,
)

FEW = 4  # rows of a page whose coordinates are read at once
SERVED = 4  # query heads for which a number is widened once
LOWEST = float(np.float32(-3e38))  # of a row that is not there: -inf less itself is no number


@intrinsic
def _half(typing, array, place, high):
    """Return the upper 4 bits of the byte at `place` of a flat int8 array as a float32, or the lower; of other arrays
    0.

    The upper ones where `high` is not 0; both are signed.
    """

    def code(context, builder, signature, arguments):
        if array.dtype != types.int8:
            return ir.Constant(ir.FloatType(), 0.0)
        data = context.make_array(array)(context, builder, arguments[0]).data
        value = builder.load(builder.gep(data, [arguments[1]]))
        value.set_metadata("alias.scope", scope(builder))
        byte = ir.IntType(8)
        up = builder.shl(value, ir.Constant(byte, 4))
        upper = builder.icmp_signed("!=", arguments[2], ir.Constant(arguments[2].type, 0))
        nibble = builder.ashr(builder.select(upper, value, up), ir.Constant(byte, 4))
        return builder.sitofp(nibble, ir.FloatType())

    return types.float32(array, types.intp, types.intp), code


def _lanes(builder, at, number, lanes=LANES):
    """Return the numbers of a flat array from a pointer on, as float32; see `attend.cpu.widen`."""
    words, floats = ir.VectorType(WORD, lanes), ir.VectorType(FLOAT, lanes)
    value = builder.load(builder.bitcast(at, ir.VectorType(at.type.pointee, lanes).as_pointer()), align=1)
    if number == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, words), every(words, 16)), floats)
    if number == types.int16:
        return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), lanes)), floats)
    return value if number == types.float32 else builder.sitofp(value, floats)


def _by_fours(builder, share, body):
    """Write `body(g, many)` for the query heads from g on, `SERVED` at a time, and for what is left."""
    place = share.type
    with cgutils.for_range_slice(builder, ir.Constant(place, 0), share, ir.Constant(place, SERVED), intp=place) as (
        g,
        _,
    ):
        left = builder.sub(share, g)
        for many in range(1, SERVED):
            with builder.if_then(builder.icmp_signed("==", left, ir.Constant(place, many))):
                body(g, many)
        with builder.if_then(builder.icmp_signed(">=", left, ir.Constant(place, SERVED))):
            body(g, SERVED)


@intrinsic
def multiply(typing, query, q, heads, vectors, at, form, products, first):
    """products[first:first + share]: of each query head, from `query[q:]` on, and the vector `vectors[at:]`, times a
    step; heads: share, size; form: halves, step, codes of 4 bits where halves is not 0. A number is widened once for
    up to four query heads."""
    kind, byte = vectors.dtype, ir.IntType(8)

    def code(context, builder, signature, arguments):
        query_, q_, heads_, vectors_, at_, form_, products_, first_ = arguments
        (share_, size_), (halves_, step_) = (cgutils.unpack_tuple(builder, part) for part in (heads_, form_))
        base, place = place_in(context, builder, vectors, vectors_, at_), at_.type

        def number(n):
            return ir.Constant(place, n)

        def times(heads, part, channel, totals, vector):
            """Add to `totals` the products of `part` with each head's numbers from `channel` on."""
            for head, total in zip(heads, totals, strict=True):
                at = builder.gep(head, [channel])
                at = builder.bitcast(at, FLOATS.as_pointer()) if vector else at
                added = times_plus(builder, builder.load(at, align=4), part, builder.load(total))
                builder.store(added, total)

        def nibbles(value, vector):
            """Return the lower and the upper 4 bits of bytes, signed, as float32."""
            bytes_, floats = (MARKS, FLOATS) if vector else (byte, FLOAT)
            four = every(MARKS, 4) if vector else ir.Constant(bytes_, 4)
            lower = builder.ashr(builder.shl(value, four), four)
            return builder.sitofp(lower, floats), builder.sitofp(builder.ashr(value, four), floats)

        def dots(g, many, four):
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            rests = [cgutils.alloca_once(builder, FLOAT) for _ in range(many)]
            for total in sums:
                builder.store(every(FLOATS, 0.0), total)
            for total in rests:
                builder.store(ir.Constant(FLOAT, 0.0), total)
            heads = []
            for k in range(many):
                far = builder.mul(builder.add(g, number(k)), size_)
                heads.append(place_in(context, builder, query, query_, builder.add(q_, far)))
            half = builder.sdiv(builder.add(size_, number(1)), number(2))
            count = builder.sub(size_, half) if four else size_  # bytes of two channels, or numbers
            whole = builder.and_(count, number(-LANES))
            with cgutils.for_range_slice(builder, number(0), whole, number(LANES), intp=place) as (j, _):
                at = builder.gep(base, [j])
                if four:
                    value = builder.load(builder.bitcast(at, MARKS.as_pointer()), align=1)
                    for part, channel in zip(nibbles(value, True), (j, builder.add(half, j)), strict=True):
                        times(heads, part, channel, sums, True)
                else:
                    times(heads, _lanes(builder, at, kind), j, sums, True)
            with cgutils.for_range_slice(builder, whole, count, number(1), intp=place) as (j, _):
                value = builder.load(builder.gep(base, [j]))
                if four:
                    for part, channel in zip(nibbles(value, False), (j, builder.add(half, j)), strict=True):
                        times(heads, part, channel, rests, False)
                else:
                    times(heads, widened(builder, value, kind), j, rests, False)
            if four:
                with builder.if_then(builder.icmp_signed(">", half, count)):  # an odd channel, whose byte is half full
                    value = builder.load(builder.gep(base, [count]))
                    times(heads, nibbles(value, False)[0], count, rests, False)
            for k, (whole, rest) in enumerate(zip(sums, rests, strict=True)):
                product = call(
                    builder,
                    "llvm.vector.reduce.fadd.v16f32",
                    FLOAT,
                    builder.load(rest),
                    builder.load(whole),
                    flags=FAST,
                )
                to = place_in(context, builder, products, products_, builder.add(first_, builder.add(g, number(k))))
                builder.store(builder.fmul(product, step_), to)

        if kind == types.int8:
            with builder.if_else(builder.icmp_signed("!=", halves_, number(0))) as (yes, no):
                with yes:
                    _by_fours(builder, share_, lambda g, many: dots(g, many, True))
                with no:
                    _by_fours(builder, share_, lambda g, many: dots(g, many, False))
        else:
            _by_fours(builder, share_, lambda g, many: dots(g, many, False))
        return context.get_dummy_value()

    place = types.intp
    return types.void(query, place, heads, vectors, place, form, products, place), code


@njit
def coordinate(coordinates, at, j, half, bits):
    """Coordinate j of a page, of `2 * half` ones."""
    if bits != 4:
        return read(coordinates, at + j)
    return _half(coordinates, at + j, 0) if j < half else _half(coordinates, at + j - half, 1)


@intrinsic
def unpack(typing, coordinates, at, bits, numbers, number_at, shape, along):
    """along[:rank * wide]: how far the rows of a page lie along its directions, `page` of each `wide` places, from
    `coordinates[at:]` on and with codes the rows' steps, `numbers[number_at:]`. There are a multiple of eight.

    shape: rank, page, wide.
    """
    codes, few = coordinates.dtype == types.int8, ir.VectorType(FLOAT, FEW)
    bytes_ = ir.VectorType(ir.IntType(8), FEW)

    def code(context, builder, signature, arguments):
        coordinates_, at_, bits_, numbers_, number_, shape_, along_ = arguments
        rank_, page_, wide_ = cgutils.unpack_tuple(builder, shape_)
        place = at_.type

        def number(n):
            return ir.Constant(place, n)

        half = builder.sdiv(builder.mul(rank_, page_), number(2))
        four = builder.icmp_signed("==", bits_, ir.Constant(bits_.type, 4))

        def rows(k, t):
            """Those from t on: of 4 bits the first half of all lies in the lower bits, and the other in the upper."""
            j = builder.add(builder.mul(k, page_), t)
            if not codes:
                return _lanes(builder, place_in(context, builder, coordinates, coordinates_, builder.add(at_, j)),
                              coordinates.dtype, FEW)  # fmt: skip
            later = builder.and_(four, builder.icmp_signed(">=", j, half))
            byte = builder.add(at_, builder.select(later, builder.sub(j, half), j))
            value = place_in(context, builder, coordinates, coordinates_, byte, bytes_)
            value = builder.load(value, align=1)
            up = builder.select(builder.and_(four, builder.not_(later)), builder.shl(value, every(bytes_, 4)), value)
            value = builder.select(four, builder.ashr(up, every(bytes_, 4)), value)
            step = _lanes(
                builder, place_in(context, builder, numbers, numbers_, builder.add(number_, t)), numbers.dtype, FEW
            )
            return builder.fmul(builder.sitofp(value, few), step)

        def page_of(k):
            with cgutils.for_range_slice(builder, number(0), wide_, number(LANES), intp=place) as (t, _):
                quarters = []
                for u in range(LANES // FEW):  # one store: a load of what several wrote waits for them
                    quarter = cgutils.alloca_once(builder, few)
                    builder.store(every(few, 0.0), quarter)
                    first = builder.add(t, number(FEW * u))
                    with builder.if_then(builder.icmp_signed("<", first, page_)):
                        builder.store(rows(k, first), quarter)
                    quarters.append(builder.load(quarter))
                while len(quarters) > 1:
                    lanes = 2 * quarters[0].type.count
                    order = ir.Constant(ir.VectorType(WORD, lanes), list(range(lanes)))
                    quarters = [
                        builder.shuffle_vector(a, b, order) for a, b in zip(quarters[::2], quarters[1::2], strict=True)
                    ]
                to = builder.add(builder.mul(k, wide_), t)
                builder.store(quarters[0], place_in(context, builder, along, along_, to, FLOATS), align=4)

        with cgutils.for_range(builder, rank_) as loop:
            page_of(loop.index)
        return context.get_dummy_value()

    place = types.intp
    return types.void(coordinates, place, place, numbers, place, shape, along), code


@intrinsic
def log_sums(typing, products, first, shape, along, edge, logits, out):
    """out[:share]: the logarithm of the sum of a page's exponentiated logits, but the mean's, for each query head.

    shape: share, rank, wide.
    Products of the heads with direction k are `products[first + k * share:]`, the rows' places along it
    `along[k * wide:]`; `edge` `[wide]` is 0 for a row, far below any logit for a place behind the last; logits:
    `[SERVED*wide]`, to work in. Heads take turns at each instruction, as each waits for its own last one.
    """

    def code(context, builder, signature, arguments):
        products_, first_, shape_, along_, edge_, logits_, out_ = arguments
        share_, rank_, wide_ = cgutils.unpack_tuple(builder, shape_)
        place = wide_.type

        def number(n):
            return ir.Constant(place, n)

        def load(array, value, at):
            return builder.load(place_in(context, builder, array, value, at, FLOATS), align=4)

        def of_head(k, t):
            at = builder.add(builder.mul(wide_, number(k)), t)
            return place_in(context, builder, logits, logits_, at, FLOATS)

        def heads(g, many):
            tops = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            totals = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            logits_at = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            for top, total in zip(tops, totals, strict=True):
                builder.store(every(FLOATS, LOWEST), top)
                builder.store(every(FLOATS, 0.0), total)
            with cgutils.for_range_slice(builder, number(0), wide_, number(LANES), intp=place) as (t, _):
                start = load(edge, edge_, t)
                for logit_at in logits_at:
                    builder.store(start, logit_at)
                with cgutils.for_range(builder, rank_) as loop:
                    row = load(along, along_, builder.add(builder.mul(loop.index, wide_), t))
                    row = builder.fmul(row, every(FLOATS, float(LOG2E)))
                    at = builder.add(builder.add(first_, g), builder.mul(loop.index, share_))
                    for k, logit_at in enumerate(logits_at):
                        x = builder.load(place_in(context, builder, products, products_, builder.add(at, number(k))))
                        builder.store(
                            times_plus(builder, splat(builder, x, FLOATS), row, builder.load(logit_at)), logit_at
                        )
                for k, (logit_at, top) in enumerate(zip(logits_at, tops, strict=True)):
                    logit = builder.load(logit_at)
                    builder.store(logit, of_head(k, t), align=4)
                    builder.store(larger(builder, logit, builder.load(top)), top)  # never NaN: see `larger`
            highest = [
                call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(top), flags=("nnan",))
                for top in tops
            ]
            most = [splat(builder, top, FLOATS) for top in highest]
            with cgutils.for_range_slice(builder, number(0), wide_, number(LANES), intp=place) as (t, _):
                for k, total in enumerate(totals):
                    away = builder.fsub(builder.load(of_head(k, t), align=4), most[k])
                    builder.store(builder.fadd(builder.load(total), powers(builder, away)), total)
            sums = every(FLOATS, 1.0)
            for k, total in enumerate(totals):
                start = ir.Constant(FLOAT, 0.0)
                whole = call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)
                sums = builder.insert_element(sums, whole, ir.Constant(WORD, k))
            logs = logarithms(builder, sums)
            for k, top in enumerate(highest):
                log = builder.fadd(top, builder.extract_element(logs, ir.Constant(WORD, k)))
                to = place_in(context, builder, out, out_, builder.add(g, number(k)))
                builder.store(builder.fmul(log, ir.Constant(FLOAT, float(LN2))), to)

        _by_fours(builder, share_, heads)
        return context.get_dummy_value()

    place = types.intp
    return types.void(products, place, shape, along, edge, logits, out), code
