"""Quest's scores of pages, compiled by numba for the CPU: each page's bounds are read once for a query group."""

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
from sparseattn.kernels.numba_rows import FAST, as_bits, flat_rows, read, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.reference import in_steps

PAGES = 512  # scored by one part


@njit(fastmath=set(FAST))
def _bound(up, down, q, high, low, at, other, size):
    total = np.float32(0)
    for d in range(size):
        total += read(up, q + d) * read(high, at + d) + read(down, q + d) * read(low, other + d)
    return total


@njit(fastmath=set(FAST))
def _pages(halves, lows, highs, pages, first, last, each, scores):
    """Scores `[G or 1,P]` of the pages from `first` to `last` of one KV head.

    halves: both `[G,D]`; lows, highs: storage, place of the head's first bound and step to the next; pages: storage and
    place of what says whether there is such a page, or if the third is true where it lies, below 0 for none.
    """
    (up, down), (low, low_base, low_step), (high, high_base, high_step) = halves, lows, highs
    valid, valid_base, tabled = pages
    group, size = up.shape
    ups, downs = up.reshape(-1), down.reshape(-1)
    for p in range(first, last):
        place = np.int64(valid[valid_base + p])
        if not tabled:
            place = p if place else -1
        if place < 0:
            scores[:, p] = -np.inf
            continue
        at, other = high_base + place * high_step, low_base + place * low_step
        best = np.float32(-np.inf)
        for g in range(group):
            bound = _bound(ups, downs, g * size, high, low, at, other, size)
            if each:
                scores[g, p] = bound
            best = max(best, bound)
        if not each:
            scores[0, p] = best


@njit
def _halves(query, root, summed, up, down):
    """Each head's query over `root`, cut at zero: query: `[A,G,D]`; up, down: `[A,G,D]`, or their sums `[A,1,D]`."""
    heads, group, size = query.shape
    flat = query.reshape(-1)
    up[:], down[:] = 0, 0
    for a in range(heads):
        for g in range(group):
            for d in range(size):
                x = read(flat, (a * group + g) * size + d) / root
                up[a, 0 if summed else g, d] += np.float32(0) if x < 0 else x  # NaN stays
                down[a, 0 if summed else g, d] += np.float32(0) if x > 0 else x


@entry(parallel=True, cache=True, nogil=True)
def _page_scores(query, root, summed, low, low_steps, high, high_steps, valid, valid_step, tabled, each, scores):
    """query: `[B*H,G,D]`; low, high: flat, with steps of b, h, p; valid: flat `[B,P]`, see `_pages`; scores: `[B,H,G or
    1,P]`."""
    batch, heads, _, pages = scores.shape
    halves = np.empty((2, batch * heads, 1 if summed else query.shape[1], query.shape[2]), np.float32)
    up, down = halves[0], halves[1]
    _halves(query, root, summed, up, down)
    chunks = (pages + PAGES - 1) // PAGES
    for unit in prange(batch * heads * chunks):
        which, chunk = unit // chunks, unit % chunks
        b, h = which // heads, which % heads
        _pages(
            (up[which], down[which]), (low, b * low_steps[0] + h * low_steps[1], low_steps[2]),
            (high, b * high_steps[0] + h * high_steps[1], high_steps[2]), (valid, b * valid_step, tabled),
            chunk * PAGES, min(pages, (chunk + 1) * PAGES), each, scores[b, h],
        )  # fmt: skip


def scores(query: Tensor, bounds: PageBounds, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores`."""
    assert bounds.valid is not None
    query = query if bounds.step is None else in_steps(query, bounds.step)
    valid = bounds.valid
    batch, heads, share, size = query.shape
    pages, each, summed = valid.shape[1], group in ("each", "softmax"), group == "sum"  # the bound is linear in halves
    out = torch.empty(batch, heads, share if each else 1, pages)
    with ONE_AT_A_TIME:
        use_threads(2 * batch * heads * (1 if summed else share) * size * pages)
        _page_scores(
            as_bits(query).reshape(batch * heads, share, size), np.float32(temperature), summed,
            *flat_rows(bounds.minimum), *flat_rows(bounds.maximum), storage_of(valid), valid.stride(0), False, each,
            out.numpy(),
        )  # fmt: skip
    return vote_softmax(out) if group == "softmax" else out.flatten(1, 2)


def scores_at(query: Tensor, store: PageBounds, table: Tensor, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores_at`."""
    minimum, maximum = store.minimum.transpose(0, 1), store.maximum.transpose(0, 1)  # [H,pages,D]
    (batch, heads, share, size), pages = query.shape, table.shape[1]
    each, summed = group in ("each", "softmax"), group == "sum"
    out: Any = np.empty((batch, heads, share if each else 1, pages), np.float32)
    with ONE_AT_A_TIME:
        use_threads(2 * batch * heads * (1 if summed else share) * size * pages, STEP)
        _page_scores(
            as_bits(query).reshape(batch * heads, share, size), np.float32(temperature), summed,
            storage_of(minimum), (0, *minimum.stride()[:2]), storage_of(maximum), (0, *maximum.stride()[:2]),
            table.numpy().reshape(-1), pages, True, each, out,
        )  # fmt: skip
    voted = torch.from_numpy(out)
    return vote_softmax(voted) if group == "softmax" else voted.flatten(1, 2)
