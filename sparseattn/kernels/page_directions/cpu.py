"""Pages by mean and directions, compiled by numba for the CPU: entries are read as they are kept, once for a group.

What kind of score is made of a page's products is asked once a page. Within the loop over pages stand intrinsics alone
(`cpu_products`): an array that is given to a compiled function there is counted as held and let go, which took more
time than the arithmetic (the log, 2026-11-23).
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.group_vote.cpu import vote_softmax
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LINE, dot, flat_rows, prefetch, read, storage_of
from sparseattn.kernels.numba_threads import ALONE, EXPONENTIAL, ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.numba_vectors import LANES
from sparseattn.kernels.page_directions.cpu_products import (
    FEW,
    LOWEST,
    SERVED,
    coordinate,
    log_sums,
    multiply,
    unpack,
)
from sparseattn.kernels.page_directions.reference import KINDS, Form, Parts

PAGES = 256  # scored by one part
AHEAD = 4  # pages whose directions are asked for before their turn: their entries lie in order, their heads do not
CLSE, ELLIPSOID = KINDS.index("clse"), KINDS.index("ellipsoid")


@njit  # without fastmath, under which what `powers` rounds by adding and subtracting would be left out
def _part(queries, form, entries, table, first, last, how, out):
    """Scores of the pages from `first` to `last` of one KV head.

    queries: flat, the head's place in them, its query heads and their size; form: see `_scores`; entries: vectors,
    numbers and coordinates, each flat with the head's place and the step to the next entry, of vectors also how many
    an entry has; table: flat, with the sequence's place; how: 0 each query head's, 1 their sum, 2 the largest; out:
    flat scores, the place of the head's `[G or 1,P]`, and P. See
    `sparseattn.kernels.page_directions.reference.estimates`.
    """
    (query, q, share, size), (kind, page, rank, bits, rest, deviations) = queries, form
    (vectors, vector_at, vector_steps), (numbers, number_at, number_step), coordinates_of = entries
    (coordinates, coordinate_at, coordinate_step), (table, row), (scores, to, pages) = coordinates_of, table, out
    lengths, products = np.zeros(share, np.float32), np.empty((1 + rank) * share, np.float32)
    wide = (page + LANES - 1) // LANES * LANES
    along, edge = np.zeros(rank * wide, np.float32), np.zeros(wide, np.float32)
    logits, sums = np.empty(SERVED * wide, np.float32), np.zeros(share, np.float32)
    edge[page:] = LOWEST
    steps = 0 if bits == 16 else 1 + rank + (page if kind == CLSE else 0)
    for g in range(share):
        lengths[g] = dot(query, q + g * size, query, q + g * size, size)
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
            multiply(query, q, (share, size), vectors, at, (halves, step), products, k * share)
            at += (size + 1) // 2 if halves else size
        other = read(numbers, number + steps) if rest else np.float32(0)
        other *= other
        if kind == CLSE:
            at = coordinate_at + place * coordinate_step
            if page >= FEW and rank * page % (2 * FEW) == 0:
                unpack(coordinates, at, bits, numbers, number + 1 + rank, (rank, page, wide), along)
            else:
                for t in range(page):
                    step = read(numbers, number + 1 + rank + t) if bits < 16 else np.float32(1)
                    for k in range(rank):
                        along[k * wide + t] = coordinate(coordinates, at, k * page + t, rank * page // 2, bits) * step
            log_sums(products, share, (share, rank, wide), along, edge, logits, sums)
        total = np.float32(0)
        for g in range(share):
            score, squares = products[g], np.float32(0)
            for k in range(1, 1 + rank):
                squares += products[k * share + g] * products[k * share + g]
            if kind == CLSE:
                left = lengths[g] - squares
                score += sums[g]
                score += other * (left if left > 0 else np.float32(0)) / np.float32(2)
            elif kind == ELLIPSOID:
                score += deviations * np.sqrt(squares + other * lengths[g])
            else:
                score += (squares + other * lengths[g]) / np.float32(2)
            if how == 0:
                scores[to + g * pages + p] = score
            elif how == 1 or g == 0:
                total += score
            else:
                total = total if total > score or total != total else score  # NaN stays
        if how > 0:
            scores[to + p] = total


@entry(parallel=True, cache=True, nogil=True)
def _scores(query, form, vectors, numbers, coordinates, table, how, scores):
    """query: `[B*H,G,D]` float32, over the temperature; form: kind, page, rank, bits, rest, deviations; vectors,
    numbers and coordinates: each flat with the steps of b, h, p, of vectors also how many an entry has; table: `[B,P]`
    int32, where pages lie, below 0 for none; how: see `_part`; scores: `[B,H,G or 1,P]`."""
    batch, heads, each, pages = scores.shape
    share, size = query.shape[1:]
    (vector, vector_steps), (number, number_steps), (place, place_steps) = vectors, numbers, coordinates
    chunks = (pages + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        entries = (
            (vector, b * vector_steps[0] + h * vector_steps[1], vector_steps[2:]),
            (number, b * number_steps[0] + h * number_steps[1], number_steps[2]),
            (place, b * place_steps[0] + h * place_steps[1], place_steps[2]),
        )
        _part(
            (query.reshape(-1), which * share * size, share, size), form, entries, (table.reshape(-1), b * pages),
            chunk * PAGES, min(pages, (chunk + 1) * PAGES), how, (scores.reshape(-1), which * each * pages, pages),
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
        entries = part.transpose(0, 1)  # [H,entries,..]
        lie[name] = storage_of(entries), (0, *entries.stride()[:2]), part.shape[-1]
    return _voted_scores(query, lie, table.contiguous(), form, group, temperature, STEP)


def _voted_scores(
    query: Tensor, lie: dict[str, Any], table: Tensor, form: Form, group: str, temperature: float, alone: int
) -> Tensor:
    """lie: name -> flat numbers, their steps of b, h and p, and how many an entry has."""
    batch, heads, share, size = query.shape
    pages = table.shape[1]
    each = group in ("each", "softmax")
    scaled = (query.float() / temperature).reshape(batch * heads, share, size).contiguous()
    out = torch.empty(batch, heads, share if each else 1, pages)
    vectors, steps, length = lie["vectors"]
    numbers = lie.get("numbers", lie["vectors"])[:2]  # what is not there is not read
    coordinates = lie.get("coordinates", lie["vectors"])[:2]
    logits = EXPONENTIAL * form.page if form.kind == "clse" else 0
    with ONE_AT_A_TIME:
        use_threads(batch * heads * share * pages * (size * (1 + form.rank) + logits), alone)
        kind = KINDS.index(form.kind), form.page, form.rank, form.bits, form.rest, np.float32(form.deviations)
        how = {"sum": 1, "max": 2}.get(group, 0)
        _scores(
            scaled.numpy(), kind, (vectors, (*steps, length)), numbers, coordinates, table.numpy(), how, out.numpy()
        )
    if group == "softmax":
        return vote_softmax(out)
    return out.flatten(1, 2)
