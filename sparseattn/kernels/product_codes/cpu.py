"""Logits of rows, and the best rows, by product codes of their keys, compiled by numba for the CPU.

A KV head is one thread's work, of all of its query heads. A sample of its blocks tells about how good the candidates
are. One pass over its codes lists what is as good, with its rounded sums, and these alone are looked at again and vote.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.group_vote.cpu_vectors import highest, vote_of_list, weights
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, LOG2E, dot, dot4, prefetch, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.numba_vectors import LANES
from sparseattn.kernels.product_codes.codes import BLOCK, LEVELS, MORE, MOST, ProductCodes, Tables, blocks_apart
from sparseattn.kernels.product_codes.cpu_sums import (
    NONE,
    ROW_AT,
    SHUFFLES,
    list_rows,
    listed_logits,
    sums_of_block,
    within,
)
from sparseattn.kernels.topk.cpu import best as best_of

AHEAD = 1024  # bytes of a code's rows that are asked for before their turn
CANDIDATE = 250  # multiplications that take as long as listing a candidate, its vote and its place among the best
ALL = NONE - 1  # no valid row is farther below the best
COARSE = 3  # bits that a bin of the first histogram leaves out


@njit(fastmath=set(FAST))
def _tables(query, turn, turn_at, centroids, centroids_at, shape, turned, out):
    """`out` `[G,M,K]` float32: what codes add to the logits of a KV head's queries `[G*D]` float32.

    turn, centroids: flat, stored as `numba_rows` has them, from these places on; shape: G, M, K and d; turned: `[G*D]`,
    which is written.
    """
    share, subspaces, entries, size = shape
    wide = subspaces * size
    for d in range(wide):
        g = 0
        while share - g >= 4:
            first = g * wide
            (
                turned[first + d], turned[first + wide + d], turned[first + 2 * wide + d], turned[first + 3 * wide + d]
            ) = dot4(query, first, turn, turn_at + d * wide, wide)  # fmt: skip
            g += 4
        while g < share:
            turned[g * wide + d] = dot(query, g * wide, turn, turn_at + d * wide, wide)
            g += 1
    for m in range(subspaces):
        for k in range(entries):
            at = centroids_at + (m * entries + k) * size
            for g in range(share):
                out[g, m, k] = dot(turned, g * wide + m * size, centroids, at, size)


@njit
def _round(tables, names):
    """Round the tables `[G,M,K]` float32 of a KV head to `names` `[G,M or M + 1,K]` uint8, and return the step."""
    share, subspaces, entries = tables.shape
    step = np.float32(0)
    least = np.empty((share, subspaces), np.float32)
    for g in range(share):
        for m in range(subspaces):
            low, high = tables[g, m, 0], tables[g, m, 0]
            for k in range(entries):
                low, high = min(low, tables[g, m, k]), max(high, tables[g, m, k])
            least[g, m] = low
            step = max(step, (high - low) / np.float32(LEVELS))
    scale = step if step > 0 else np.float32(1)
    names[:] = 0
    for g in range(share):
        for m in range(subspaces):
            for k in range(entries):
                names[g, m, k] = np.uint8(min(np.rint((tables[g, m, k] - least[g, m]) / scale), np.float32(LEVELS)))
    return step


@njit
def _added(codes, at, step, count, bits, names, out, head_step, tops, near, o):
    """As `sums_of_block`, where no shuffle looks codes up: four query heads' sums in a number of 64 bits."""
    share, near[o : o + BLOCK] = names.shape[0], NONE
    for first in range(0, share, 4):
        four = np.zeros((names.shape[1], names.shape[2]), np.uint64)
        for g in range(min(4, share - first)):
            for m in range(names.shape[1]):
                for k in range(names.shape[2]):
                    four[m, k] |= np.uint64(names[first + g, m, k]) << np.uint64(16 * g)
        for lane in range(BLOCK):
            total = np.uint64(0)
            for r in range(count):
                code = codes[at + r * step + ROW_AT[lane]]
                if bits == 8:
                    total += four[r, code]
                else:
                    total += four[2 * r, code & 15] + four[2 * r + 1, code >> 4]
            for g in range(min(4, share - first)):
                one = np.int64((total >> np.uint64(16 * g)) & np.uint64(0xFFFF))
                out[(first + g) * head_step + o + lane] = one
                near[o + lane] = min(np.int64(near[o + lane]), np.int64(tops[first + g]) - one)


@njit
def _sums_of_sample(codes, at, step, count, bits, names, valid, first, blocks, apart, tops, sums, near):
    """Write the sums of every `apart`-th of so many blocks, `first` the first and a multiple of it: `[G*n]`. And how
    far they are below `tops`, `[n]`, `NONE` for rows that are not valid."""
    share, flat, size = names.shape[0], names.reshape(-1), names[0].size
    for block in range(0, blocks, apart):
        row, o = (first + block) * BLOCK, (first + block) // apart * BLOCK
        if SHUFFLES > 0 and bits == 4:
            sums_of_block(codes, at + block * BLOCK, step, count, flat, size, share, sums, len(near), tops, near, o)
        else:
            _added(codes, at + block * BLOCK, step, count, bits, names, sums, len(near), tops, near, o)
        within(near, o, valid, row, np.int16(0))


@njit
def _sample(codes, at, step, count, bits, names, valid, whole, tail, apart, more, unit):
    """Return what sum of a query head all rows are compared with, `[G]` uint16, by a sample: every `apart`-th block.
    And return about how far below these the `more`-th of all rows is, or a little more.

    A head's number is the logarithm of its weights' sum, in steps of sums, less what keeps it among these and is the
    same for all heads. whole: blocks; tail: codes of one more, where `valid` has one. unit: such a step in a logit, in
    units of log 2.
    """
    share, rows = names.shape[0], (len(valid) // BLOCK + apart - 1) // apart * BLOCK
    sums, near = np.empty(share * rows, np.uint16), np.empty(rows, np.int16)
    last = len(valid) // BLOCK - whole if whole % apart == 0 else 0
    tops, weight, best = np.zeros(share, np.uint16), np.zeros(share, np.float32), np.zeros(share, np.float32)
    logits, least = np.empty(rows, np.float32), np.float32(np.inf)
    _sums_of_sample(codes, at, step, count, bits, names, valid, 0, whole, apart, tops, sums, near)
    _sums_of_sample(tail, 0, BLOCK, count, bits, names, valid, whole, last, apart, tops, sums, near)
    for g in range(share):
        listed_logits(sums, g * rows, near, np.int16(ALL), np.float32(unit), rows, logits, 0)
        top = highest(logits, 0, rows)
        if top > -np.inf and unit > 0:
            best[g] = top / unit
            weight[g] = best[g] + np.log2(weights(logits, 0, rows, top, logits, 0)) / unit
        least = min(least, weight[g] - best[g])
    for g in range(share):
        tops[g] = np.uint16(min(np.rint(weight[g] - least), np.float32(ALL)))
    _sums_of_sample(codes, at, step, count, bits, names, valid, 0, whole, apart, tops, sums, near)
    _sums_of_sample(tail, 0, BLOCK, count, bits, names, valid, whole, last, apart, tops, sums, near)
    bins = np.zeros((NONE >> COARSE) + 1, np.int32)
    for row in range(rows):
        bins[max(near[row], 0) >> COARSE] += 1
    bins[NONE >> COARSE] = 0  # rows that are not valid, and those too far away to be found by a limit
    found, needed = 0, more / apart
    needed += 2 * np.sqrt(needed) + 1
    for edge in range(len(bins)):
        found += bins[edge]
        if found >= needed:
            return tops, (edge + 1 << COARSE) - 1
    return tops, ALL


@njit
def _listed(codes, at, step, count, bits, names, valid, first, blocks, best, limit, rows, below, sums, found):
    """Add to the `found` rows that are listed those of so many blocks, `first` the first, that are valid and `limit` at
    most below `best`, and return how many are listed then; -1 where they might not find room.

    rows: `[most]` int32; below: `[most]` int16; sums: `[G*most]` uint16, a query head's behind each other.
    """
    share, most, flat, size = names.shape[0], len(rows), names.reshape(-1), names[0].size
    own, near = np.empty(share * BLOCK, np.uint16), np.empty(BLOCK, np.int16)
    for block in range(blocks):
        row = (first + block) * BLOCK
        if SHUFFLES > 0 and bits == 4:
            sums_of_block(codes, at + block * BLOCK, step, count, flat, size, share, own, BLOCK, best, near, 0)
        else:
            _added(codes, at + block * BLOCK, step, count, bits, names, own, BLOCK, best, near, 0)
        for r in range(count):
            prefetch(codes, at + r * step + row - first * BLOCK + AHEAD)
        marks = within(near, 0, valid, row, np.int16(limit))
        if found + BLOCK > most:
            return -1
        found = list_rows(marks, row, near, own, share, rows, below, sums, most, found)
    return found


@njit
def _cut(below, count):
    """Return the `count`-th smallest of `below` int16, of more numbers; all that are negative count as -1."""
    bins = np.zeros(NONE + 2 >> COARSE, np.int32)
    for i in range(len(below)):
        bins[max(below[i], 0) >> COARSE] += 1
    edge = 0
    while bins[edge] < count:
        count -= bins[edge]
        edge += 1
    fine = np.zeros(1 << COARSE, np.int32)
    for i in range(len(below)):
        if max(below[i], 0) >> COARSE == edge:
            fine[max(below[i], 0) & (1 << COARSE) - 1] += 1
    last = 0
    while fine[last] < count:
        count -= fine[last]
        last += 1
    return (edge << COARSE) + last


@njit
def _tail(codes, at, step, count, whole, left):
    """The codes of the `left` rows behind the whole blocks, 64 a byte."""
    own = np.zeros(count * BLOCK, np.uint8)
    for r in range(count if left else 0):
        first = at + r * step + whole * BLOCK
        own[r * BLOCK : r * BLOCK + left] = codes[first : first + left]
    return own


@njit
def _candidates(codes, at, step, count, bits, names, valid, whole, tail, more, best, limit, rows, below, sums):
    """List the valid rows that are no farther below the query heads' `best` than the `more`-th, and perhaps others
    behind these. Return how many are listed, -1 where there is no room, and how far below the last candidate is.

    valid: `[blocks * 64]`; whole, tail, best, limit: as `_sample` has them; rows, below, sums: as `_listed` has them.
    """
    left = len(valid) // BLOCK - whole
    while True:
        found = _listed(codes, at, step, count, bits, names, valid, 0, whole, best, limit, rows, below, sums, 0)
        if left and found >= 0:
            found = _listed(tail, 0, BLOCK, count, bits, names, valid, whole, left, best, limit, rows, below, sums,
                            found)  # fmt: skip
        if found < 0:
            return found, ALL
        if found >= more or limit == ALL:
            return found, _cut(below[:found], more) if found > more else ALL
        limit = min(2 * limit + 16, ALL)


@njit
def _vote(found, last, size, share, rows, below, sums, logits, votes, ids):
    """`ids` `[S]`: the best of the `found` rows that are listed and `last` at most below; logits: `[G*most]` float32,
    votes: `[most]`, which are written."""
    most, wide = len(rows), (found + LANES - 1) // LANES * LANES
    below[found:wide] = NONE
    for g in range(share):
        listed_logits(sums, g * most, below, np.int16(last), np.float32(size), wide, logits, g * wide)
    vote_of_list(logits, 0, wide, share, logits, 0, votes, 0)
    best_of(votes[:found], ids)
    for i in range(len(ids)):
        ids[i] = rows[ids[i]] if ids[i] >= 0 else -1


@entry(parallel=True, cache=True, nogil=True)
def _best(
    query, turn, centroids, shape, codes, steps, count, bits, heads, valid, total, apart, more, rows, below, sums,
    logits, votes, ids,
):  # fmt: skip
    """query: `[lists,G*D]` float32; turn, centroids: flat; shape: G, M, K and d; valid: `[B,blocks*64]` uint8; rows,
    below, votes: `[T,most]`, sums, logits: `[T,G*most]`, of T threads, which are written; ids: `[lists,S]` int32."""
    lists, (share, subspaces, entries, size), workers = len(query), shape, len(rows)
    whole, wide = total // BLOCK, subspaces * size
    for worker in prange(workers):
        turned, tables = np.empty(share * wide, np.float32), np.empty((share, subspaces, entries), np.float32)
        names = np.empty((share, count * 8 // bits, entries), np.uint8)
        for which in range(worker * lists // workers, (worker + 1) * lists // workers):
            _tables(query[which], turn, which * wide * wide, centroids, which * entries * wide, shape, turned, tables)
            unit = _round(tables, names) * LOG2E
            at, marks = which // heads * steps[0] + which % heads * steps[1], valid[which // heads]
            tail = _tail(codes, at, steps[2], count, whole, total % BLOCK)
            best, limit = _sample(codes, at, steps[2], count, bits, names, marks, whole, tail, apart, more, unit)
            found, last = _candidates(codes, at, steps[2], count, bits, names, marks, whole, tail, more, best, limit,
                                      rows[worker], below[worker], sums[worker])  # fmt: skip
            if found >= 0:
                _vote(found, last, unit, share, rows[worker], below[worker], sums[worker], logits[worker],
                      votes[worker], ids[which])  # fmt: skip
                continue
            most_rows, most_below = np.empty(total + 2 * BLOCK, np.int32), np.empty(total + 2 * BLOCK, np.int16)
            most_sums, most_votes = np.empty(share * len(most_rows), np.uint16), np.empty(len(most_rows), np.float32)
            found, last = _candidates(codes, at, steps[2], count, bits, names, marks, whole, tail, more, best, limit,
                                      most_rows, most_below, most_sums)  # fmt: skip
            _vote(found, last, unit, share, most_rows, most_below, most_sums, np.empty(len(most_sums), np.float32),
                  most_votes, ids[which])  # fmt: skip


@njit
def logits_of(codes, at, step, count, bits, tables, ids, out):
    """The logits of the rows `ids` `[C]` of one KV head, -inf for -1: `out` `[G,C]`; tables: `[G,M,K]`."""
    for i in range(len(ids)):
        if ids[i] < 0:
            out[:, i] = -np.inf
            continue
        out[:, i] = 0
        for r in range(count):
            code = codes[at + r * step + ids[i]]
            for g in range(len(out)):
                if bits == 8:
                    out[g, i] += tables[g, r, code]
                else:
                    out[g, i] += tables[g, 2 * r, code & 15] + tables[g, 2 * r + 1, code >> 4]


@entry(parallel=True, cache=True, nogil=True)
def _logits(codes, steps, count, bits, tables, heads, valid, valid_step, out):
    """tables: `[lists,G,M,K]`; out: `[lists,G,N]`."""
    lists, _, rows = out.shape
    parts = (rows + 2047) // 2048
    for work in prange(lists * parts):
        which, first = work // parts, work % parts * 2048
        b, h = which // heads, which % heads
        ids = np.empty(min(2048, rows - first), np.int32)
        for i in range(len(ids)):
            ids[i] = first + i if valid[b * valid_step + first + i] else -1
        logits_of(codes, b * steps[0] + h * steps[1], steps[2], count, bits, tables[which], ids,
                   out[which, :, first : first + len(ids)])  # fmt: skip


def stored(keys: ProductCodes) -> Any:
    """What a kernel takes of codes and of which rows are valid, in two parts."""
    steps = keys.codes.stride()
    if steps[3] != 1 and keys.codes.shape[3] > 1:
        raise ValueError(f"the compiled kernel reads codes whose rows are adjacent: the last stride is 1, got {steps}")
    valid = keys.valid if keys.valid.stride(-1) == 1 else keys.valid.contiguous()
    codes = storage_of(keys.codes), steps[:3], keys.codes.shape[2], keys.bits
    return codes, (storage_of(valid.view(torch.uint8)), valid.stride(0) if len(valid) > 1 else 0)


def padded(tables: Tensor, keys: ProductCodes) -> Tensor:
    """`[lists,G,M,K]` float32, M as many as the bytes have codes: one more of zeros where a byte has one alone."""
    missing = keys.codes.shape[2] * 8 // keys.bits - tables.shape[3]
    return torch.nn.functional.pad(tables, (0, 0, 0, missing)).flatten(0, 1).contiguous()


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    batch, heads, share, subspaces = tables.shape[:4]
    rows = keys.codes.shape[3]
    out = torch.empty(batch, heads, share, rows)
    codes, valid = stored(keys)
    with ONE_AT_A_TIME:
        use_threads(batch * heads * share * subspaces * rows)
        _logits(*codes, padded(tables, keys).numpy(), heads, *valid, out.flatten(0, 1).numpy())
    return out


@functools.lru_cache(maxsize=2)
def _scratch(workers: int, most: int, share: int) -> list[Any]:
    """What threads write the rows to that they list: kept, as pages that are new to a process take as long to get as
    the work on them; used under `ONE_AT_A_TIME`."""
    kinds = ((torch.int32, 1), (torch.int16, 1), (torch.uint16, share), (torch.float32, share), (torch.float32, 1))
    return [torch.empty(workers, most * times, dtype=kind).numpy() for kind, times in kinds]


def best(tables: Tables, keys: ProductCodes, count: int) -> Tensor:
    """As `dispatch.best`."""
    batch, heads, share, _ = tables.query.shape
    subspaces, entries, size = tables.centroids.shape[2:]
    if subspaces > MOST:
        raise ValueError(f"sums of 16 bits hold {MOST} subspaces, got {subspaces}")
    if keys.codes.shape[2] != -(-subspaces * keys.bits // 8):
        raise ValueError(f"{subspaces} codes of {keys.bits} bits do not fill {keys.codes.shape[2]} bytes")
    rows, lists = keys.codes.shape[3], batch * heads
    ids = torch.empty(batch, heads, min(count, rows), dtype=torch.int32)
    more, marks = min(MORE * count, rows), keys.valid.view(torch.uint8)
    if rows % BLOCK or not marks.is_contiguous():
        marks = torch.nn.functional.pad(marks, (0, -rows % BLOCK)).contiguous()
    codes, _ = stored(keys)
    query = tables.query.reshape(lists, -1).contiguous().numpy()
    books = (storage_of(part.contiguous()) for part in (tables.turn, tables.centroids))
    work = lists * (share * subspaces * rows / 4 + CANDIDATE * more)
    most = (more + more // 2 + 8 * BLOCK) // LANES * LANES  # where more are listed, a thread makes room for all
    with ONE_AT_A_TIME:
        workers = max(1, min(use_threads(work), lists))
        _best(query, *books, (share, subspaces, entries, size), *codes, heads, marks.numpy(), rows, blocks_apart(rows),
              more, *_scratch(workers, most, share), ids.flatten(0, 1).numpy())  # fmt: skip
    return ids
