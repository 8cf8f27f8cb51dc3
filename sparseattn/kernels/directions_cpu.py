"""Pages by mean and directions, compiled by numba for the CPU: entries are read as they are kept, once for a group.

A page's products with up to four query heads are made while each of its numbers is widened once. Codes are multiplied
as the integers they are and steps come to the products. What kind of score is made of these is asked once a page.

numba keeps compiled code by this file's time stamp (see `numba_cpu`): of that file `_read`, `_add`, `_dot`, `_dot4`,
`_exp2` and `fetch` are compiled in here.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.directions import KINDS, Form, Parts
from sparseattn.kernels.numba_cpu import (
    ALONE,
    EXPONENTIAL,
    FAST,
    LN2,
    LOG2E,
    ONE_AT_A_TIME,
    STEP,
    _dot,
    _dot4,
    _flat,
    _read,
    _scope,
    _whole,
    fetch,
    use_threads,
    vote_softmax,
)
from sparseattn.kernels.vectors import (
    FLOAT,
    FLOATS,
    LANES,
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

PAGES = 256  # scored by one part
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
        value.set_metadata("alias.scope", _scope(builder))
        byte = ir.IntType(8)
        up = builder.shl(value, ir.Constant(byte, 4))
        upper = builder.icmp_signed("!=", arguments[2], ir.Constant(arguments[2].type, 0))
        held = builder.ashr(builder.select(upper, value, up), ir.Constant(byte, 4))
        return builder.sitofp(held, ir.FloatType())

    return types.float32(array, types.intp, types.intp), code


@njit(fastmath=set(FAST))
def _dot_halves(asked, q, vectors, at, size):
    """The product of a query head and a direction of 4 bits."""
    total, half = np.float32(0), (size + 1) // 2
    for j in range(size - half):
        total += _read(asked, q + j) * _half(vectors, at + j, 0)
        total += _read(asked, q + half + j) * _half(vectors, at + j, 1)
    if size % 2:
        total += _read(asked, q + half - 1) * _half(vectors, at + half - 1, 0)
    return total


@njit(fastmath=set(FAST))
def _dot4_halves(asked, q, vectors, at, size):
    """The same of four query heads."""
    a, b, c, e, half = np.float32(0), np.float32(0), np.float32(0), np.float32(0), (size + 1) // 2
    for j in range(size - half):
        x, y = _half(vectors, at + j, 0), _half(vectors, at + j, 1)
        a += _read(asked, q + j) * x + _read(asked, q + half + j) * y
        b += _read(asked, q + size + j) * x + _read(asked, q + size + half + j) * y
        c += _read(asked, q + 2 * size + j) * x + _read(asked, q + 2 * size + half + j) * y
        e += _read(asked, q + 3 * size + j) * x + _read(asked, q + 3 * size + half + j) * y
    if size % 2:
        x, last = _half(vectors, at + half - 1, 0), half - 1
        a += _read(asked, q + last) * x
        b += _read(asked, q + size + last) * x
        c += _read(asked, q + 2 * size + last) * x
        e += _read(asked, q + 3 * size + last) * x
    return a, b, c, e


@njit(inline="always")
def _products(asked, q, share, size, vectors, at, halves, step, products, first):
    """products[first:first + share]: of each query head, from `asked[q:]` on, and the vector `vectors[at:]`."""
    fours = share & ~3
    for g in range(0, fours, 4):
        if halves:
            a, b, c, e = _dot4_halves(asked, q + g * size, vectors, at, size)
        else:
            a, b, c, e = _dot4(asked, q + g * size, vectors, at, size)
        to = first + g
        products[to], products[to + 1], products[to + 2], products[to + 3] = a * step, b * step, c * step, e * step
    for g in range(fours, share):
        if halves:
            products[first + g] = _dot_halves(asked, q + g * size, vectors, at, size) * step
        else:
            products[first + g] = _dot(asked, q + g * size, vectors, at, size) * step


@njit(inline="always")
def _places(coordinates, at, bits, numbers, number_at, rank, page, wide, held):
    """held[:rank * wide]: how far the rows of a page lie along its directions, `page` of each `wide` places."""
    half = rank * page // 2
    for k in range(rank):
        for t in range(page):
            j = k * page + t
            if bits == 4:
                x = _half(coordinates, at + j, 0) if j < half else _half(coordinates, at + j - half, 1)
            else:
                x = _read(coordinates, at + j)
            held[k * wide + t] = x
    if bits < 16:
        for t in range(page):
            step = _read(numbers, number_at + t)
            for k in range(rank):
                held[k * wide + t] *= step


@intrinsic
def _log_sum(typing, products, first, share, rank, held, wide, edge, logits):
    """The logarithm of the sum of a page's exponentiated logits, but the mean's, for one query head.

    Its product with direction k is `products[first + k * share]`, the rows' places along it `held[k * wide:]`; `edge`
    `[wide]` is 0 for a row, far below any logit for a place behind the last; logits: `[wide]`, to work in.
    """

    def code(context, builder, signature, arguments):
        products_, first_, share_, rank_, held_, wide_, edge_, logits_ = arguments
        none, lanes = ir.Constant(wide_.type, 0), ir.Constant(wide_.type, LANES)
        top = cgutils.alloca_once_value(builder, every(FLOATS, LOWEST))
        total = cgutils.alloca_once_value(builder, every(FLOATS, 0.0))
        held_sum = cgutils.alloca_once(builder, FLOATS)

        def load(array, value, place):
            return builder.load(place_in(context, builder, array, value, place, FLOATS), align=4)

        with cgutils.for_range_slice(builder, none, wide_, lanes, intp=wide_.type) as (t, _):
            builder.store(load(edge, edge_, t), held_sum)
            with cgutils.for_range(builder, rank_) as loop:
                place = builder.add(first_, builder.mul(loop.index, share_))
                x = builder.load(place_in(context, builder, products, products_, place))
                x = builder.fmul(x, ir.Constant(FLOAT, float(LOG2E)))
                row = load(held, held_, builder.add(builder.mul(loop.index, wide_), t))
                builder.store(times_plus(builder, splat(builder, x, FLOATS), row, builder.load(held_sum)), held_sum)
            found = builder.load(held_sum)
            builder.store(found, place_in(context, builder, logits, logits_, t, FLOATS), align=4)
            builder.store(larger(builder, found, builder.load(top)), top)
        highest = call(builder, "llvm.vector.reduce.fmax.v16f32", FLOAT, builder.load(top))
        most = splat(builder, highest, FLOATS)
        with cgutils.for_range_slice(builder, none, wide_, lanes, intp=wide_.type) as (t, _):
            found = builder.fsub(load(logits, logits_, t), most)
            builder.store(builder.fadd(builder.load(total), powers(builder, found)), total)
        start = ir.Constant(FLOAT, 0.0)
        whole = call(builder, "llvm.vector.reduce.fadd.v16f32", FLOAT, start, builder.load(total), flags=FAST)
        log = builder.extract_element(logarithms(builder, splat(builder, whole, FLOATS)), ir.Constant(WORD, 0))
        return builder.fmul(builder.fadd(highest, log), ir.Constant(FLOAT, float(LN2)))

    place = types.intp
    return types.float32(products, place, place, place, held, place, edge, logits), code


@njit  # without fastmath, under which what `powers` rounds by adding and subtracting would be left out
def _part(
    asked, q, share, size, kind, page, rank, bits, rest, deviations, vectors, vector_at, vector_steps, numbers,
    number_at, number_step, coordinates, coordinate_at, coordinate_step, table, row, first, last, how, scores, to,
    pages,
):  # fmt: skip
    """Scores of the pages from `first` to `last` of one KV head, `scores[to:]` those of its `[G or 1,P]`; how: 0 each
    query head's, 1 their sum, 2 the largest. See `sparseattn.kernels.directions.estimates`."""
    lengths, products = np.zeros(share, np.float32), np.empty((1 + rank) * share, np.float32)
    wide = (page + LANES - 1) // LANES * LANES
    held, logits, edge = np.zeros(rank * wide, np.float32), np.empty(wide, np.float32), np.zeros(wide, np.float32)
    edge[page:] = LOWEST
    steps = 0 if bits == 16 else 1 + rank + (page if kind == CLSE else 0)
    for g in range(share):
        lengths[g] = _dot(asked, q + g * size, asked, q + g * size, size)
    for p in range(first, last):
        place = np.int64(table[row + p])
        if place < 0:
            for g in range(share if how == 0 else 1):
                scores[to + g * pages + p] = -np.inf
            continue
        ahead = np.int64(table[row + p + AHEAD]) if p + AHEAD < last else np.int64(-1)
        if ahead >= 0:
            fetch(vectors, vector_at + ahead * vector_steps[0], vector_steps[1])
        at, number = vector_at + place * vector_steps[0], number_at + place * number_step
        for k in range(1 + rank):
            step, halves = _read(numbers, number + k) if bits < 16 else np.float32(1), bits == 4 and k > 0
            _products(asked, q, share, size, vectors, at, halves, step, products, k * share)
            at += (size + 1) // 2 if halves else size
        other = _read(numbers, number + steps) if rest else np.float32(0)
        other *= other
        if kind == CLSE:
            _places(
                coordinates, coordinate_at + place * coordinate_step, bits, numbers, number + 1 + rank, rank, page,
                wide, held,
            )  # fmt: skip
        total = np.float32(0)
        for g in range(share):
            found, squares = products[g], np.float32(0)
            for k in range(1, 1 + rank):
                squares += products[k * share + g] * products[k * share + g]
            if kind == CLSE:
                left = lengths[g] - squares
                found += _log_sum(products, share + g, share, rank, held, wide, edge, logits)
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


@njit(parallel=True, cache=True, nogil=True)
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


def scores(query: Tensor, entries: Parts, real: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `sparseattn.kernels.directions.scores`, of float32 and 16-bit queries."""
    place = torch.arange(real.shape[1], dtype=torch.int32)
    lie = {name: (*_flat(part), part.shape[-1]) for name, part in entries.items()}
    return _voted_scores(query, lie, torch.where(real, place, -1), form, group, temperature, ALONE)


def scores_at(query: Tensor, store: Parts, table: Tensor, form: Form, group: str, temperature: float) -> Tensor:
    """As `sparseattn.kernels.directions.scores_at`, of float32 and 16-bit queries."""
    lie = {}
    for name, part in store.items():
        held = part.transpose(0, 1)  # [H,entries,..]
        lie[name] = _whole(held), (0, *held.stride()[:2]), part.shape[-1]
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
