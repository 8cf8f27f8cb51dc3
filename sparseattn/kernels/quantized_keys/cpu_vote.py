"""The group's vote by "softmax" and the best rows by it, in the kernel that scores the rows: compiled code."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.group_vote.cpu_vectors import factors, highest, vote_of_list, voted, weights
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E
from sparseattn.kernels.numba_threads import EXPONENTIAL, ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import (
    LANES,
)
from sparseattn.kernels.quantized_keys.cpu_choice import LikelyRows
from sparseattn.kernels.quantized_keys.cpu_listed import logits_of_listed
from sparseattn.kernels.quantized_keys.cpu_rows import (
    groups_and_rows,
    groups_of_a_part,
    head_of,
    places_of,
    score_part,
    stored_inputs,
    work_of,
    work_of_a_thread,
    work_of_masses,
)
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.cpu import best


@njit
def _weigh(query, which, head, form, places, groups, pages_of, weights_of, sums):
    """Return the weights of a part, and of each query head the largest score and the sum of the weights.

    query, head, form, places: see `score_part`, `which` being the head's; groups: first and last; pages_of: rows of a
    page, and how many pages a part has room for; weights_of: flat, the place of the first query head's, and the step to
    the next; sums: `peak` and `total` `[G]`, which are written.
    """
    (page, each), (room, to, wide), (peak, total) = pages_of, weights_of, sums
    share = query.shape[1]
    scores = np.empty(share * each, np.float32)
    score_part(query, which, head, form, places, (*groups, 1), (page, np.float32(1)), (scores, 0, each))
    pages = (groups[1] - groups[0]) * form[1] // page
    count = (pages + LANES - 1) & -LANES
    for g in range(share):
        begin = g * each
        scores[begin + pages : begin + count] = -np.inf
        peak[g], total[g] = highest(scores, begin, count), 0
        if peak[g] > -np.inf:
            total[g] = weights(scores, begin, count, peak[g], room, to)
        else:
            room[to : to + count] = 0
        room[to + count : to + each] = 0
        to += wide


@entry(parallel=True, cache=True, nogil=True)
def _softmax(query, keys, form, table, sizes, room, out, ids):
    """query, keys, form: see `_masses`; table: as `_masses` has `places`; sizes: groups in all, groups of a part, KV
    heads, rows of a page, and the pages of a part, up to a multiple of 16; held: `[L,G,parts*each]`, for weights; out:
    `[B*H,parts*each]`; ids: `[B*H,S]`, the best places of each, or S 0.

    A weight is 2 to the power of the score, in units of log 2, less the part's largest; of rows that all query heads
    weigh at less than 2^-126 of that no order is kept. Where L divides B*H, L threads each take whole KV heads, one
    after the other, so that the weights of one stay in the cache, and the votes too where `out` is `[L,parts*each]`;
    with L = B*H all threads share each of them.
    """
    # What the loop over parts reads stands loose, or in tuples of one level: numba takes no others into it.
    (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step) = keys
    (groups, once, heads, page, each), lists, (workers, share, places) = sizes, len(ids), room.shape
    parts, own = places // each, len(out) == lists
    line, votes = room.reshape(-1), out.reshape(-1)
    peak, total = np.empty((lists, parts, share), np.float32), np.empty((lists, parts, share), np.float32)
    most, shares = np.empty((lists, parts), np.float32), total.reshape(-1)
    shared = workers == lists
    units = workers * parts if shared else workers  # named first: numba takes no choice inside prange for parallel
    for unit in prange(units):
        worker = unit // parts if shared else unit
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            b, h = which // heads, which % heads
            begin = unit % parts if shared else 0
            keys_of = (
                (packed, packed_steps),
                (low, low_steps),
                (step, step_steps),
                (grid, grid_step),
                (valid, valid_step),
            )
            head = head_of(keys_of, b, h, which * grid_step)
            for part in range(begin, begin + 1 if shared else parts):
                first = part * once
                _weigh(
                    query, np.intp(which), head, form, table[b],
                    (first, min(groups, first + once)), (page, each),
                    (line, worker * share * places + part * each, places), (peak[which, part], total[which, part]),
                )  # fmt: skip
            if not shared:
                to = np.intp(which if own else worker)
                factors(peak[which], total[which], most[which])
                for part in range(parts):
                    at, own_at = worker * share * places + part * each, (which * parts + part) * share
                    to_all = at, own_at, to * places + part * each
                    voted((line, shares, votes), to_all, places, share, most[which, part], each)
                best(out[to], ids[which])
    if shared:
        for which in range(lists):
            factors(peak[which], total[which], most[which])
        for unit in prange(lists * parts):
            which, part = unit // parts, unit % parts
            at = which * share * places + part * each, unit * share, which * places + part * each
            voted((line, shares, votes), at, places, share, most[which, part], each)
        for which in prange(lists):
            best(out[which], ids[which])


def _vote(
    query: Tensor, keys: QuantizedKeys, page: int, count: int | None, table: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return votes `[B,H,parts,each]`, of which as many of a part as it has pages are said; for a `count`, which reads
    single rows, the best rows `[B,H,S]` int32 instead. See `masses` for a table."""
    batch, heads, share, size = query.shape
    groups, rows = groups_and_rows(keys, table)
    stored, lists, once = groups * rows, batch * heads, groups_of_a_part(rows)
    parts, inside = -(-groups // once), once * rows // page
    each = -(-inside // LANES) * LANES
    ids = torch.empty(batch, heads, min(count or 0, stored), dtype=torch.int32)
    inputs = stored_inputs(query, keys, rows, float(LOG2E) * size**-0.5)
    with ONE_AT_A_TIME:
        work = work_of(query, stored) + work_of_masses(query, stored, page)
        threads = use_threads(work + EXPONENTIAL * lists * share * parts * each / 8, work_of_a_thread(table))
        workers = lists if lists % threads else threads
        out = torch.empty(lists if count is None else workers, parts, each)
        _softmax(
            *inputs, places_of(table, batch), (groups, once, heads, page, each),
            torch.empty(workers, share, parts * each).numpy(),
            out.numpy().reshape(-1, parts * each), ids.numpy().reshape(lists, -1),
        )  # fmt: skip
    return out.view(batch, heads, parts, each)[..., :inside] if count is None else out, ids


def voted_scores(query: Tensor, keys: QuantizedKeys, page: int, table: Tensor | None = None) -> Tensor:
    """Return what `dispatch.scores` does by "softmax"; see `masses` for a table."""
    votes, _ = _vote(query, keys, page, None, table)
    groups, rows = groups_and_rows(keys, table)
    return votes.flatten(2)[..., : groups * rows // page]


def best_by_vote(query: Tensor, keys: QuantizedKeys, count: int) -> Tensor:
    """Return what `dispatch.best` does by "softmax" of single rows."""
    if LikelyRows.serves(keys, count):
        ids = LikelyRows(query, keys, count)(query)
        if ids is not None:
            return ids
    return best_of_all(query, keys, count)


def best_of_all(query: Tensor, keys: QuantizedKeys, count: int) -> Tensor:
    """Return what `best_by_vote` does by the votes of all rows; of these a thread keeps those of one KV head."""
    return _vote(query, keys, 1, count)[1]


@entry(parallel=True, cache=True, nogil=True)
def _voted_rows(logits, pages, page, rows, room, votes, marked, ids, groups):
    """logits: `[L,G,M]`, M a multiple of 16; pages: `[L,P]`; held, votes, marked: `[T,G,M]`, `[T,M]` and `[T,n]`, of T
    threads; ids: `[L,S]`, the best rows; groups: `[L]`, in how many of n groups, of `rows` rows, a listed one lies."""
    lists, share, count = logits.shape
    workers = len(room)
    line, kept, out = logits.reshape(-1), room.reshape(-1), votes.reshape(-1)
    for worker in prange(workers):
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            vote_of_list(line, which * share * count, count, share, kept, worker * share * count, out, worker * count)
            listed, chosen = pages[which], ids[which]
            best(votes[worker], chosen)
            for i in range(len(chosen)):
                if chosen[i] >= 0:
                    chosen[i] = listed[chosen[i] // page] * page + chosen[i] % page
            groups[which] = _touched(listed, page, rows, marked[worker])


@njit
def _touched(pages, page, rows, marked):
    """How many groups of `rows` rows listed pages reach into; marked: `[n]`, of each group."""
    marked[:] = 0
    for p in range(len(pages)):
        if pages[p] >= 0:
            first = pages[p] * page // rows
            for group in range(first, min((pages[p] * page + page - 1) // rows + 1, len(marked))):
                marked[group] = 1
    touched = 0
    for group in range(len(marked)):
        touched += marked[group]
    return touched


def best_listed_by_vote(
    query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return what `dispatch.best_listed` does by "softmax", of pages `[B,H,P]`."""
    pages = pages.int().contiguous()
    logits = logits_of_listed(query, keys, pages, page, float(LOG2E))
    batch, heads, share, listed = logits.shape
    lists, key_heads = batch * heads, keys.groups
    ids = torch.empty(batch, heads, min(count, listed), dtype=torch.int32)
    groups = torch.empty(batch, heads, dtype=torch.int64)
    if listed % LANES:
        logits = torch.nn.functional.pad(logits, (0, -listed % LANES), value=-math.inf)
    full = logits.shape[3]
    with ONE_AT_A_TIME:
        threads = min(use_threads(EXPONENTIAL * logits.numel() / 4), lists)
        _voted_rows(
            logits.numpy().reshape(lists, share, full), pages.numpy().reshape(lists, -1), page,
            keys.mask.shape[1] // max(key_heads, 1), np.empty((threads, share, full), np.float32),
            np.empty((threads, full), np.float32), np.empty((threads, key_heads), np.uint8),
            ids.numpy().reshape(lists, -1), groups.numpy().reshape(-1),
        )  # fmt: skip
    return ids, groups
