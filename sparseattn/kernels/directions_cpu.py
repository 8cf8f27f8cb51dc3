"""Pages by mean and directions, compiled by numba for the CPU: entries are read once for a query group, as they are kept.

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
    _add,
    _dot,
    _dot4,
    _exp2,
    _flat,
    _read,
    _scope,
    _whole,
    fetch,
    use_threads,
    vote_softmax,
)

PAGES = 256  # scored by one part
AHEAD = 4  # pages whose directions are asked for before their turn: their entries lie in order, their heads do not
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


@njit(fastmath=set(FAST))
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


@njit
def _places(coordinates, at, bits, numbers, number_at, rank, page, held):
    """held[:rank * page]: how far the rows of a page lie along its directions."""
    if bits == 4:
        half = rank * page // 2
        for j in range(half):
            held[j], held[half + j] = _half(coordinates, at + j, 0), _half(coordinates, at + j, 1)
    else:
        for j in range(rank * page):
            held[j] = _read(coordinates, at + j)
    if bits < 16:
        for k in range(rank):
            for t in range(page):
                held[k * page + t] *= _read(numbers, number_at + t)


@njit(fastmath=set(FAST))
def _log_sum(products, g, share, rank, page, held, logits):
    """The logarithm of the sum of the rows' exponentiated logits, but the mean's."""
    for t in range(page):
        logits[t] = 0
    for k in range(rank):
        x = products[(1 + k) * share + g] * LOG2E
        for t in range(page):
            _add(logits, t, x * _read(held, k * page + t))
    highest, total = logits[0], np.float32(0)
    for t in range(1, page):
        highest = logits[t] if logits[t] > highest else highest
    for t in range(page):
        total += _exp2(logits[t] - highest)
    return (highest + np.log2(total)) * LN2


@njit(fastmath=set(FAST))
def _scored(
    asked, q, lengths, share, size, kind, page, rank, bits, rest, deviations, vectors, vector_at, numbers, number_at,
    coordinates, coordinate_at, products, held, logits, found,
):  # fmt: skip
    """found[:share]: the estimates of one page, see `sparseattn.kernels.directions.estimates`."""
    at = vector_at
    for k in range(1 + rank):
        step = _read(numbers, number_at + k) if bits < 16 else np.float32(1)
        _products(asked, q, share, size, vectors, at, k > 0 and bits == 4, step, products, k * share)
        at += (size + 1) // 2 if k > 0 and bits == 4 else size
    steps = 0 if bits == 16 else 1 + rank + (page if kind == CLSE else 0)
    other = _read(numbers, number_at + steps) if rest else np.float32(0)
    if kind == CLSE:
        _places(coordinates, coordinate_at, bits, numbers, number_at + 1 + rank, rank, page, held)
    for g in range(share):
        squares = np.float32(0)
        for k in range(1, 1 + rank):
            squares += products[k * share + g] * products[k * share + g]
        if kind == CLSE:
            left = lengths[g] - squares
            found[g] = products[g] + _log_sum(products, g, share, rank, page, held, logits)
            found[g] += other * other * (left if left > 0 else np.float32(0)) / np.float32(2)
        else:
            squares += other * other * lengths[g]
            if kind == ELLIPSOID:
                found[g] = products[g] + deviations * np.sqrt(squares)
            else:
                found[g] = products[g] + squares / np.float32(2)


@njit
def _voted(found, share, how, p, scores):
    """Puts a page's estimates into scores `[G or 1,P]`: 0 each, 1 their sum, 2 the largest; NaN stays."""
    if how == 0:
        for g in range(share):
            scores[g, p] = found[g]
        return
    total = found[0]
    for g in range(1, share):
        if how == 1:
            total += found[g]
        else:
            total = total if total > found[g] or total != total else found[g]
    scores[0, p] = total


@njit(parallel=True, cache=True, nogil=True)
def _scores(
    asked, kind, page, rank, bits, rest, deviations, vectors, vector_steps, numbers, number_steps, coordinates,
    coordinate_steps, table, how, scores,
):  # fmt: skip
    """asked: `[B*H,G,D]` float32, over the temperature; the rest flat, with steps of b, h, p; table: `[B,P]` int32,
    where pages lie, below 0 for none; how: see `_voted`; scores: `[B,H,G or 1,P]`."""
    batch, heads, _, pages = scores.shape
    share, size = asked.shape[1:]
    line = asked.reshape(-1)
    chunks = (pages + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        lengths, found = np.zeros(share, np.float32), np.empty(share, np.float32)
        products, held = np.empty((1 + rank) * share, np.float32), np.empty(rank * page, np.float32)
        logits = np.empty(page, np.float32)
        q = which * share * size
        for g in range(share):
            lengths[g] = _dot(line, q + g * size, line, q + g * size, size)
        vector_at = b * vector_steps[0] + h * vector_steps[1]
        number_at = b * number_steps[0] + h * number_steps[1]
        coordinate_at = b * coordinate_steps[0] + h * coordinate_steps[1]
        last = min(pages, (chunk + 1) * PAGES)
        for p in range(chunk * PAGES, last):
            place = np.int64(table[b, p])
            if place < 0:
                scores[b, h, :, p] = -np.inf
                continue
            ahead = np.int64(table[b, p + AHEAD]) if p + AHEAD < last else np.int64(-1)
            if ahead >= 0:
                fetch(vectors, vector_at + ahead * vector_steps[2], vector_steps[3])
            _scored(
                line, q, lengths, share, size, kind, page, rank, bits, rest, deviations,
                vectors, vector_at + place * vector_steps[2], numbers, number_at + place * number_steps[2],
                coordinates, coordinate_at + place * coordinate_steps[2], products, held, logits, found,
            )  # fmt: skip
            _voted(found, share, how, p, scores[b, h])


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
    asked = (query.float() / temperature).reshape(batch * heads, share, size)
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
