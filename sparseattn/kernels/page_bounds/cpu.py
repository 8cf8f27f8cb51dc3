"""Quest's scores of pages, compiled by numba for the CPU: each page's bounds are read once for a query group."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.group_vote.cpu import vote_softmax
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, address_of, array_at, fetch, read, rows_at
from sparseattn.kernels.numba_threads import ALONE, ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.reference import in_steps

PAGES = 512  # scored by one part
AHEAD = 8  # pages between one that is scored and one whose bounds are asked for
At: TypeAlias = tuple[Any, int, tuple[int, ...]]  # see `rows_at`


@njit(fastmath=set(FAST))
def _bound(up, down, q, high, low, at, other, size):
    total = np.float32(0)
    for d in range(size):
        total += read(up, q + d) * read(high, at + d) + read(down, q + d) * read(low, other + d)
    return total


@njit(fastmath=set(FAST))
def _pages(halves, lows, highs, pages, first, last, each, out):
    """Scores of the pages from `first` to `last` of one KV head.

    halves: both `[G,D]`; lows, highs: storage, place of the head's first bound and step to the next; pages: storage and
    place of what says whether there is such a page, or if the third is true where it lies, below 0 for none; out: flat
    scores, the place of the head's `[G or 1,P]`, and P.
    """
    (up, down), (low, low_base, low_step), (high, high_base, high_step) = halves, lows, highs
    (valid, valid_base, tabled), (scores, to, count) = pages, out
    group, size = up.shape
    ups, downs = up.reshape(-1), down.reshape(-1)
    for p in range(first, last):
        if tabled and p + AHEAD < last:  # which lie anywhere
            coming = np.int64(max(valid[valid_base + p + AHEAD], 0))
            fetch(high, high_base + coming * high_step, size)
            fetch(low, low_base + coming * low_step, size)
        place = np.int64(valid[valid_base + p])
        if not tabled:
            place = p if place else -1
        if place < 0:
            for g in range(group if each else 1):
                scores[to + g * count + p] = -np.inf
            continue
        at, other = high_base + place * high_step, low_base + place * low_step
        best = np.float32(-np.inf)
        for g in range(group):
            bound = _bound(ups, downs, g * size, high, low, at, other, size)
            if each:
                scores[to + g * count + p] = bound
            best = max(best, bound)
        if not each:
            scores[to + p] = best


@njit
def _halves(query, root, summed, up, down):
    """Each head's query over `root`, cut at zero: query: flat of `[A,G,D]`; up, down: `[A,G,D]`, or their sums
    `[A,1,D]`."""
    heads, _, size = up.shape
    group = query.shape[0] // (heads * size)
    up[:], down[:] = 0, 0
    for a in range(heads):
        for g in range(group):
            for d in range(size):
                x = read(query, (a * group + g) * size + d) / root
                up[a, 0 if summed else g, d] += np.float32(0) if x < 0 else x  # NaN stays
                down[a, 0 if summed else g, d] += np.float32(0) if x > 0 else x


@entry(parallel=True, cache=True, nogil=True)
def score_pages(query, low, high, pages, vote, scores):
    """query: where `[B*H,G,D]` lies, G, D, and what it is divided by; low, high: where they lie, with steps of b, h, p;
    pages: where `[B,P]` lies that says which there are, its step of b, and whether it names places, see `_pages`; vote:
    whether a group's halves are summed, and whether each head has scores; scores: where `[B,H,G or 1,P]` lies, and its
    sizes."""
    (kind, query_at, share, size, root), (summed, each), (out_at, (batch, heads, lists, count)) = query, vote, scores
    (low_kind, low_at, low_steps), (high_kind, high_at, high_steps) = low, high
    valid_kind, valid_at, valid_step, tabled = pages
    queries, many = array_at(kind, query_at, batch * heads * share * size), 1 << 48
    lows, highs = array_at(low_kind, low_at, many), array_at(high_kind, high_at, many)
    valid = array_at(valid_kind, valid_at, many)
    out = array_at(np.float32, out_at, batch * heads * lists * count)
    halves = np.empty((2, batch * heads, 1 if summed else share, size), np.float32)
    up, down = halves[0], halves[1]
    _halves(queries, root, summed, up, down)
    chunks = (count + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        _pages(
            (up[which], down[which]), (lows, b * low_steps[0] + h * low_steps[1], low_steps[2]),
            (highs, b * high_steps[0] + h * high_steps[1], high_steps[2]), (valid, b * valid_step, tabled),
            chunk * PAGES, min(count, (chunk + 1) * PAGES), each, (out, which * lists * count, count),
        )  # fmt: skip


def scores(query: Tensor, bounds: PageBounds, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores`."""
    valid = bounds.valid
    assert valid is not None
    query = query if bounds.step is None else in_steps(query, bounds.step)
    if valid.stride(1) != 1:
        valid = valid.contiguous()
    pages = (*address_of(valid), valid.stride(0), False)
    return _voted(query, rows_at(bounds.minimum), rows_at(bounds.maximum), pages, group, temperature, valid.shape[1])


def scores_at(query: Tensor, store: PageBounds, table: Tensor, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores_at`."""
    table = table.contiguous()
    minimum, maximum = store.minimum.transpose(0, 1)[None], store.maximum.transpose(0, 1)[None]  # [1,H,pages,D]
    low, high = ((kind, at, (0, *steps[1:])) for kind, at, steps in (rows_at(minimum), rows_at(maximum)))
    pages = (*address_of(table), table.shape[1], True)
    return _voted(query, low, high, pages, group, temperature, table.shape[1], STEP)


def _voted(
    query: Tensor, low: At, high: At, pages: tuple[Any, ...], group: str, temperature: float, count: int,
    alone: int = ALONE,
) -> Tensor:  # fmt: skip
    """Return the group's vote on `count` pages, whose bounds and validity lie as `score_pages` takes them."""
    batch, heads, share, size = query.shape
    each, summed = group in ("each", "softmax"), group == "sum"  # the bound is linear in halves
    query, lists = query.contiguous(), share if each else 1
    out = torch.empty(batch, heads * lists, count)
    with ONE_AT_A_TIME:
        use_threads(2 * batch * heads * (1 if summed else share) * size * count, alone)
        score_pages(
            (*address_of(query), share, size, np.float32(temperature)), low, high, pages, (summed, each),
            (out.data_ptr(), (batch, heads, lists, count)),
        )  # fmt: skip
    return vote_softmax(out.unflatten(1, (heads, share))) if group == "softmax" else out
