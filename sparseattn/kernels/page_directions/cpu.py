"""Pages by mean and directions, compiled by numba for the CPU: entries are read as they are kept, once for a group.

A page's products with up to four query heads are made while each of its numbers is widened once. Codes are multiplied
as the integers they are and steps come to the products. What kind of score is made of these is asked once a page.
Within the loop over pages stand intrinsics alone: an array that is given to a compiled function there is counted as
held and let go, which took more time than the arithmetic (the log, 2026-11-23).
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.group_vote.cpu import vote_softmax
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import (
    FAST,
    LINE,
    LN2,
    LOG2E,
    dot,
    flat_rows,
    prefetch,
    read,
    scope,
    storage_of,
    widened,
)
from sparseattn.kernels.numba_threads import ALONE, EXPONENTIAL, ONE_AT_A_TIME, STEP, use_threads
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
from sparseattn.kernels.page_directions.reference import KINDS, Form, Parts

PAGES = 256  # scored by one part
FEW = 4  # rows of a page whose coordinates are read at once
SERVED = 4  # query heads for which a number is widened once
AHEAD = 4  # pages whose directions are asked for before their turn: their entries lie in order, their heads do not
LOWEST = float(np.float32(-3e38))  # of a row that is not there: -inf less itself is no number
CLSE, ELLIPSOID = KINDS.index("clse"), KINDS.index("ellipsoid")


@intrinsic
def _half(typing, array, place, high):
    """The upper 4 bits of the byte at `place` of a flat int8 array as a float32, or the lower; of other arrays 0.

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
        held = builder.ashr(builder.select(upper, value, up), ir.Constant(byte, 4))
        return builder.sitofp(held, ir.FloatType())

    return types.float32(array, types.intp, types.intp), code


def _lanes(builder, at, number, lanes=LANES):
    """The numbers of a flat array from a pointer on, as float32; see `attend.cpu.widen`."""
    words, floats = ir.VectorType(WORD, lanes), ir.VectorType(FLOAT, lanes)
    value = builder.load(builder.bitcast(at, ir.VectorType(at.type.pointee, lanes).as_pointer()), align=1)
    if number == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(value, words), every(words, 16)), floats)
    if number == types.int16:
        return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), lanes)), floats)
    return value if number == types.float32 else builder.sitofp(value, floats)


def _by_fours(builder, share, body):
    """Writes `body(g, many)` for the query heads from g on, `SERVED` at a time, and for what is left."""
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
def _multiply(typing, asked, q, share, size, vectors, at, halves, step, products, first):
    """products[first:first + share]: of each query head, from `asked[q:]` on, and the vector `vectors[at:]`, times
    `step`; of codes of 4 bits where `halves` is not 0. A number is widened once for up to four query heads."""
    kind, byte = vectors.dtype, ir.IntType(8)

    def code(context, builder, signature, arguments):
        asked_, q_, share_, size_, vectors_, at_, halves_, step_, products_, first_ = arguments
        base, place = place_in(context, builder, vectors, vectors_, at_), at_.type

        def number(n):
            return ir.Constant(place, n)

        def times(heads, held, channel, totals, vector):
            """Adds to `totals` the products of `held` with each head's numbers from `channel` on."""
            for head, total in zip(heads, totals, strict=True):
                at = builder.gep(head, [channel])
                at = builder.bitcast(at, FLOATS.as_pointer()) if vector else at
                found = times_plus(builder, builder.load(at, align=4), held, builder.load(total))
                builder.store(found, total)

        def nibbles(value, vector):
            """The lower and the upper 4 bits of bytes, signed, as float32."""
            bytes_, floats = (MARKS, FLOATS) if vector else (byte, FLOAT)
            four = every(MARKS, 4) if vector else ir.Constant(bytes_, 4)
            lower = builder.ashr(builder.shl(value, four), four)
            return builder.sitofp(lower, floats), builder.sitofp(builder.ashr(value, four), floats)

        def dots(g, many, four):
            sums = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            rests = [cgutils.alloca_once(builder, FLOAT) for _ in range(many)]
            for held in sums:
                builder.store(every(FLOATS, 0.0), held)
            for held in rests:
                builder.store(ir.Constant(FLOAT, 0.0), held)
            heads = []
            for k in range(many):
                far = builder.mul(builder.add(g, number(k)), size_)
                heads.append(place_in(context, builder, asked, asked_, builder.add(q_, far)))
            half = builder.sdiv(builder.add(size_, number(1)), number(2))
            count = builder.sub(size_, half) if four else size_  # bytes of two channels, or numbers
            whole = builder.and_(count, number(-LANES))
            with cgutils.for_range_slice(builder, number(0), whole, number(LANES), intp=place) as (j, _):
                at = builder.gep(base, [j])
                if four:
                    value = builder.load(builder.bitcast(at, MARKS.as_pointer()), align=1)
                    for held, channel in zip(nibbles(value, True), (j, builder.add(half, j)), strict=True):
                        times(heads, held, channel, sums, True)
                else:
                    times(heads, _lanes(builder, at, kind), j, sums, True)
            with cgutils.for_range_slice(builder, whole, count, number(1), intp=place) as (j, _):
                value = builder.load(builder.gep(base, [j]))
                if four:
                    for held, channel in zip(nibbles(value, False), (j, builder.add(half, j)), strict=True):
                        times(heads, held, channel, rests, False)
                else:
                    times(heads, widened(builder, value, kind), j, rests, False)
            if four:
                with builder.if_then(builder.icmp_signed(">", half, count)):  # an odd channel, whose byte is half full
                    value = builder.load(builder.gep(base, [count]))
                    times(heads, nibbles(value, False)[0], count, rests, False)
            for k, (held, rest) in enumerate(zip(sums, rests, strict=True)):
                found = call(
                    builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, builder.load(rest), builder.load(held), flags=FAST
                )
                to = place_in(context, builder, products, products_, builder.add(first_, builder.add(g, number(k))))
                builder.store(builder.fmul(found, step_), to)

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
    return types.void(asked, place, place, place, vectors, place, place, types.float32, products, place), code


@njit
def _place(coordinates, at, j, half, bits):
    """Coordinate j of a page, of `2 * half` ones."""
    if bits != 4:
        return read(coordinates, at + j)
    return _half(coordinates, at + j, 0) if j < half else _half(coordinates, at + j - half, 1)


@intrinsic
def _unpack(typing, coordinates, at, bits, numbers, number_at, rank, page, wide, held):
    """held[:rank * wide]: how far the rows of a page lie along its directions, `page` of each `wide` places, from
    `coordinates[at:]` on and with codes the rows' steps, `numbers[number_at:]`. There are a multiple of eight."""
    codes, few = coordinates.dtype == types.int8, ir.VectorType(FLOAT, FEW)
    bytes_ = ir.VectorType(ir.IntType(8), FEW)

    def code(context, builder, signature, arguments):
        coordinates_, at_, bits_, numbers_, number_, rank_, page_, wide_, held_ = arguments
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
                builder.store(quarters[0], place_in(context, builder, held, held_, to, FLOATS), align=4)

        with cgutils.for_range(builder, rank_) as loop:
            page_of(loop.index)
        return context.get_dummy_value()

    place = types.intp
    return types.void(coordinates, place, place, numbers, place, place, place, place, held), code


@intrinsic
def _log_sums(typing, products, first, share, rank, held, wide, edge, logits, out):
    """out[:share]: the logarithm of the sum of a page's exponentiated logits, but the mean's, for each query head.

    Products of the heads with direction k are `products[first + k * share:]`, the rows' places along it
    `held[k * wide:]`; `edge` `[wide]` is 0 for a row, far below any logit for a place behind the last; logits:
    `[SERVED*wide]`, to work in. Heads take turns at each instruction, as each waits for its own last one.
    """

    def code(context, builder, signature, arguments):
        products_, first_, share_, rank_, held_, wide_, edge_, logits_, out_ = arguments
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
            found = [cgutils.alloca_once(builder, FLOATS) for _ in range(many)]
            for top, total in zip(tops, totals, strict=True):
                builder.store(every(FLOATS, LOWEST), top)
                builder.store(every(FLOATS, 0.0), total)
            with cgutils.for_range_slice(builder, number(0), wide_, number(LANES), intp=place) as (t, _):
                start = load(edge, edge_, t)
                for one in found:
                    builder.store(start, one)
                with cgutils.for_range(builder, rank_) as loop:
                    row = load(held, held_, builder.add(builder.mul(loop.index, wide_), t))
                    row = builder.fmul(row, every(FLOATS, float(LOG2E)))
                    at = builder.add(builder.add(first_, g), builder.mul(loop.index, share_))
                    for k, one in enumerate(found):
                        x = builder.load(place_in(context, builder, products, products_, builder.add(at, number(k))))
                        builder.store(times_plus(builder, splat(builder, x, FLOATS), row, builder.load(one)), one)
                for k, (one, top) in enumerate(zip(found, tops, strict=True)):
                    logit = builder.load(one)
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
    return types.void(products, place, place, place, held, place, edge, logits, out), code


@njit  # without fastmath, under which what `powers` rounds by adding and subtracting would be left out
def _part(
    asked, q, share, size, kind, page, rank, bits, rest, deviations, vectors, vector_at, vector_steps, numbers,
    number_at, number_step, coordinates, coordinate_at, coordinate_step, table, row, first, last, how, scores, to,
    pages,
):  # fmt: skip
    """Scores of the pages from `first` to `last` of one KV head, `scores[to:]` those of its `[G or 1,P]`; how: 0 each
    query head's, 1 their sum, 2 the largest. See `sparseattn.kernels.page_directions.reference.estimates`."""
    lengths, products = np.zeros(share, np.float32), np.empty((1 + rank) * share, np.float32)
    wide = (page + LANES - 1) // LANES * LANES
    held, edge = np.zeros(rank * wide, np.float32), np.zeros(wide, np.float32)
    logits, sums = np.empty(SERVED * wide, np.float32), np.zeros(share, np.float32)
    edge[page:] = LOWEST
    steps = 0 if bits == 16 else 1 + rank + (page if kind == CLSE else 0)
    for g in range(share):
        lengths[g] = dot(asked, q + g * size, asked, q + g * size, size)
    for p in range(first, last):
        place = np.int64(table[row + p])
        if place < 0:
            for g in range(share if how == 0 else 1):
                scores[to + g * pages + p] = -np.inf
            continue
        ahead = np.int64(table[row + p + AHEAD]) if p + AHEAD < last else np.int64(-1)
        if ahead >= 0:
            for d in range(0, vector_steps[1], LINE // vectors.itemsize):
                prefetch(vectors, vector_at + ahead * vector_steps[0] + d)
        at, number = vector_at + place * vector_steps[0], number_at + place * number_step
        for k in range(1 + rank):
            step = read(numbers, number + k) if bits < 16 else np.float32(1)
            halves = 1 if bits == 4 and k > 0 else 0
            _multiply(asked, q, share, size, vectors, at, halves, step, products, k * share)
            at += (size + 1) // 2 if halves else size
        other = read(numbers, number + steps) if rest else np.float32(0)
        other *= other
        if kind == CLSE:
            at = coordinate_at + place * coordinate_step
            if page >= FEW and rank * page % (2 * FEW) == 0:
                _unpack(coordinates, at, bits, numbers, number + 1 + rank, rank, page, wide, held)
            else:
                for t in range(page):
                    step = read(numbers, number + 1 + rank + t) if bits < 16 else np.float32(1)
                    for k in range(rank):
                        held[k * wide + t] = _place(coordinates, at, k * page + t, rank * page // 2, bits) * step
            _log_sums(products, share, share, rank, held, wide, edge, logits, sums)
        total = np.float32(0)
        for g in range(share):
            found, squares = products[g], np.float32(0)
            for k in range(1, 1 + rank):
                squares += products[k * share + g] * products[k * share + g]
            if kind == CLSE:
                left = lengths[g] - squares
                found += sums[g]
                found += other * (left if left > 0 else np.float32(0)) / np.float32(2)
            elif kind == ELLIPSOID:
                found += deviations * np.sqrt(squares + other * lengths[g])
            else:
                found += (squares + other * lengths[g]) / np.float32(2)
            if how == 0:
                scores[to + g * pages + p] = found
            elif how == 1 or g == 0:
                total += found
            else:
                total = total if total > found or total != total else found  # NaN stays
        if how > 0:
            scores[to + p] = total


@entry(parallel=True, cache=True, nogil=True)
def _scores(
    asked, kind, page, rank, bits, rest, deviations, vectors, vector_steps, numbers, number_steps, coordinates,
    coordinate_steps, table, how, scores,
):  # fmt: skip
    """asked: `[B*H,G,D]` float32, over the temperature; the rest flat, with steps of b, h, p (and how many numbers the
    vectors of an entry are); table: `[B,P]` int32, where pages lie, below 0 for none; how: see `_part`; scores:
    `[B,H,G or 1,P]`."""
    batch, heads, each, pages = scores.shape
    share, size = asked.shape[1:]
    chunks = (pages + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        _part(
            asked.reshape(-1), which * share * size, share, size, kind, page, rank, bits, rest, deviations,
            vectors, b * vector_steps[0] + h * vector_steps[1], vector_steps[2:],
            numbers, b * number_steps[0] + h * number_steps[1], number_steps[2],
            coordinates, b * coordinate_steps[0] + h * coordinate_steps[1], coordinate_steps[2],
            table.reshape(-1), b * pages, chunk * PAGES, min(pages, (chunk + 1) * PAGES),
            how, scores.reshape(-1), which * each * pages, pages,
        )  # fmt: skip


def scores(query: Tensor, entries: Parts, valid: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores`, of float32 and 16-bit queries."""
    place = torch.arange(valid.shape[1], dtype=torch.int32)
    lie = {name: (*flat_rows(part), part.shape[-1]) for name, part in entries.items()}
    return _voted_scores(query, lie, torch.where(valid, place, -1), form, group, temperature, ALONE)


def scores_at(query: Tensor, store: Parts, table: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `dispatch.scores_at`, of float32 and 16-bit queries."""
    lie = {}
    for name, part in store.items():
        held = part.transpose(0, 1)  # [H,entries,..]
        lie[name] = storage_of(held), (0, *held.stride()[:2]), part.shape[-1]
    return _voted_scores(query, lie, table.contiguous(), form, group, temperature, STEP)


def _voted_scores(
    query: Tensor, lie: dict[str, Any], table: Tensor, form: Form, group: str, temperature: float, alone: int
) -> Tensor:
    """lie: name -> flat numbers, their steps of b, h and p, and how many an entry has."""
    batch, heads, share, size = query.shape
    pages = table.shape[1]
    each = group in ("each", "softmax")
    asked = (query.float() / temperature).reshape(batch * heads, share, size).contiguous()
    out = torch.empty(batch, heads, share if each else 1, pages)
    vectors, steps, length = lie["vectors"]
    numbers = lie.get("numbers", lie["vectors"])[:2]  # what is not there is not read
    coordinates = lie.get("coordinates", lie["vectors"])[:2]
    logits = EXPONENTIAL * form.page if form.kind == "clse" else 0
    with ONE_AT_A_TIME:
        use_threads(batch * heads * share * pages * (size * (1 + form.rank) + logits), alone)
        _scores(
            asked.numpy(), KINDS.index(form.kind), form.page, form.rank, form.bits, form.rest,
            np.float32(form.deviations), vectors, (*steps, length), *numbers, *coordinates, table.numpy(),
            {"sum": 1, "max": 2}.get(group, 0), out.numpy(),
        )  # fmt: skip
    if group == "softmax":
        return vote_softmax(out)
    return out.flatten(1, 2)
