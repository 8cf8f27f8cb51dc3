"""The best rows of one KV head by its codes, in compiled code.

A sample of the head's blocks tells about how good the candidates are. One pass over the codes, of sums that stop at
255, lists what may be as good. These alone are looked at again, by sums of 16 bits, and vote.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_rows import array_at
from sparseattn.kernels.product_codes.codes import BLOCK
from sparseattn.kernels.product_codes.cpu_lists import TILE, ask, begin_sums, list_rows, possible
from sparseattn.kernels.product_codes.cpu_registers import NONE, SHUFFLES
from sparseattn.kernels.product_codes.cpu_sums import count_within, highest_sum, nearest, sum_block, within
from sparseattn.kernels.product_codes.cpu_tables import make_losses
from sparseattn.kernels.product_codes.cpu_turning import add_to_listed, add_to_sums
from sparseattn.kernels.product_codes.cpu_votes import added_up, choose, mixed, weights

AHEAD = 1024  # bytes of a code's rows that are asked for before their turn
ALL = NONE - 1  # no valid row is farther below the best
FEW, MARGIN = 32, 1.2  # rows that tell how far others are below, and times as many as are needed are looked for


@njit
def words_needed(share, size, bits):
    """Return how many numbers `pack` writes, of tables of `size` entries a query head."""
    return 0 if SHUFFLES > 0 and bits == 4 else (share + 3) // 4 * size


@njit
def pack(names, share, words):
    """Write the entries `[G,size]` uint8 of four query heads each to one number of 64 bits, 16 bits a head, `[.,size]`
    flat, as `words_needed` says."""
    size = names.shape[1]
    words[:] = 0
    for g in range(share if len(words) else 0):
        first = g // 4 * size
        for k in range(size):
            words[first + k] |= np.uint64(names[g, k]) << np.uint64(16 * (g % 4))


@njit
def add_block(codes, step, count, bits, words, share, out, head_step, valid):
    """As `sum_block`, where no shuffle looks codes up: four query heads' sums in a number of 64 bits, see `pack`."""
    size, entries = count * 8 // bits << bits, 1 << bits
    read, marks = array_at(np.uint8, codes, (count - 1) * step + BLOCK), array_at(np.uint8, valid, BLOCK)
    totals = np.empty(BLOCK, np.uint64)
    for first in range(0, share, 4):
        four = array_at(np.uint64, words + 2 * first * size, size)
        totals[:] = 0
        for r in range(count):
            of, at = r * size // count, r * step
            if bits == 8:
                for lane in range(BLOCK):
                    totals[lane] += four[of + np.intp(read[at + lane])]
            else:
                for lane in range(BLOCK):
                    code = np.intp(read[at + lane])
                    totals[lane] += four[of + (code & 15)] + four[of + entries + (code >> 4)]
        for g in range(min(4, share - first)):
            sums, shift = array_at(np.int16, out + (first + g) * head_step, BLOCK), np.uint64(16 * g)
            for lane in range(BLOCK):
                own = np.int16((totals[lane] >> shift) & np.uint64(0xFFFF))
                sums[lane] = own if marks[lane] else np.int16(-1)


@njit
def _sum(codes, step, count, bits, tables, out, head_step, valid):
    """Write the sums of 64 rows for each query head, see `sum_block`; codes, out, valid: addresses."""
    names, share, words = tables[:3]
    if SHUFFLES > 0 and bits == 4:
        sum_block(codes, step, count, names, 32 * count, share, out, head_step, valid)
    else:
        add_block(codes, step, count, bits, words, share, out, head_step, valid)


@njit
def _smallest(gap, count, wanted):
    """Return the least number, 0 or more, that `wanted` of the `count` int16 at the address `gap` do not exceed;
    `ALL`."""
    low, high = 0, ALL
    while low < high:
        middle = (low + high) >> 1
        if count_within(gap, count, np.int16(middle)) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


@njit
def _sample(stored, tables, tail, total, apart, unit, sums, gap, tops):
    """Write what sum of a query head all rows are compared with, `tops` `[G]` int16, by a sample: the rows of every
    `apart`-th block. Return how many rows that is, in whole blocks.

    A head's number is the logarithm of its weights' sum, in steps of sums, less what keeps it among these and is the
    same for all heads. unit: such a step in a logit, in units of log 2; sums, gap: int16, written too: the sums of
    these rows, one query head's behind another's, and how far they are below. All but numbers are addresses.
    """
    (codes, step, count, bits, valid), share, added = stored, tables[1], tables[3]
    whole, at = total // TILE * TILE, sums
    rows = (total + BLOCK * apart - 1) // (BLOCK * apart) * BLOCK
    for first in range(0, total, apart * BLOCK):
        if first + BLOCK <= total:
            _sum(codes + first, step, count, bits, tables, at, 2 * rows, valid + first)
        else:
            own = tail + first - whole
            _sum(own, TILE, count, bits, tables, at, 2 * rows, own + count * TILE)
        if added:
            add_to_sums(at, 2 * rows, share, added, tables[4], first, BLOCK)
        at += 2 * BLOCK
    weight, best, least = np.zeros(share, np.float32), np.zeros(share, np.float32), np.float32(np.inf)
    highest = array_at(np.int16, tops, share)
    highest[:] = 0
    nearest(sums, 2 * rows, share, tops, gap, rows)
    for g in range(share):
        top = highest_sum(sums + 2 * rows * g, gap, np.int16(ALL), rows)
        if top >= 0 and unit > 0:
            best[g] = top
            total_weight = added_up(sums + 2 * rows * g, gap, np.int16(ALL), np.float32(unit), top, rows, 0)
            weight[g] = best[g] + np.log2(total_weight) / unit
        least = min(least, weight[g] - best[g])
    for g in range(share):
        highest[g] = np.int16(min(np.rint(weight[g] - least), np.float32(ALL)))
    nearest(sums, 2 * rows, share, tops, gap, rows)
    return rows


@njit
def _mark(stored, tables, row, tops, limit, sums, marks):
    """Mark those of 128 rows from `row` on that are valid and `limit` at most below `tops`, as `possible` does; sums:
    room for `[G + 1,64]` int16. All but numbers are addresses."""
    (codes, step, count, bits, valid), (_, share, _, added, stride, _) = stored, tables
    for half in range(2):
        first, bits_of = half * BLOCK, array_at(np.uint64, marks, 2)
        _sum(codes + first, step, count, bits, tables, sums, 2 * BLOCK, valid + first)
        if added:
            add_to_sums(sums, 2 * BLOCK, share, added, stride, row + first, BLOCK)
        nearest(sums, 2 * BLOCK, share, tops, sums + 2 * BLOCK * share, BLOCK)
        bits_of[half] = within(sums + 2 * BLOCK * share, np.int16(limit))


@njit
def _list(stored, tables, tail, total, limit, most, places):
    """List the valid rows that are `limit` at most below `tops`, and perhaps others. Return how many, -1 where there
    is no room for them.

    places: those of `choose_rows`, with losses, scales and firsts of `make_losses`. Written are kept and rows,
    `[count,most]` codes and `[most]` names; work has room for two numbers of 64 bits and `[G + 1,64]` int16. All are
    addresses, as arrays would be counted anew for each tile.
    """
    (codes, step, count, bits, valid), (_, share, _, added, stride, highest) = stored, tables
    _, _, kept, rows, _, tops, scales, firsts, losses, begins, _, work = places
    listed, whole, looked_up = 0, total // TILE * TILE, SHUFFLES > 0 and bits == 4
    if looked_up and not added:
        own = array_at(np.uint8, begins, share * TILE)
        for g in range(share):
            own[g * TILE : (g + 1) * TILE] = array_at(np.uint8, firsts, share)[g]
    for first in range(0, total, TILE):
        if listed + TILE > most:
            return -1
        at, across, there = codes + first, step, valid + first
        if first == whole:
            at, across, there = tail, TILE, tail + count * TILE
        if looked_up:
            if added:
                begin_sums(added + 2 * first, 2 * stride, share, highest, scales, firsts, begins)
            possible(at, across, count, losses, 32 * count, begins, share, there, work)
        else:
            _mark((at, across, count, bits, there), tables, first, tops, limit, work + 16, work)
        ask(at + AHEAD, across, count)
        ask(at + AHEAD + BLOCK, across, count)
        listed = list_rows(work, listed, first, at, across, count, kept, most, rows)
        listed = list_rows(work + 8, listed, first + BLOCK, at + BLOCK, across, count, kept, most, rows)
    return listed


@njit
def _candidates(stored, tables, tail, total, more, limit, most, places):
    """List the valid rows that are no farther below their `tops` than the `more`-th, and perhaps others. Return how
    many, in whole blocks, and how far below the last candidate is; -1 where there is no room.

    limit: about how far that is; places: those of `choose_rows`.
    """
    (_, _, count, bits, _), (names, share, _, added, stride, highest) = stored, tables
    sums, gap, kept, rows, _, tops, scales, firsts, losses, _, ones, _ = places
    marked, size = array_at(np.uint8, ones, BLOCK), count * 8 // bits << bits
    marked[:] = 1
    before = 0
    while True:
        if SHUFFLES > 0 and bits == 4:
            make_losses(
                array_at(np.uint8, names, share * size), array_at(np.int16, tops, share),
                array_at(np.int16, highest, share), (share, size >> bits, 1 << bits), limit,
                array_at(np.uint8, losses, share * size), array_at(np.uint16, scales, share),
                array_at(np.uint8, firsts, share),
            )  # fmt: skip
        listed = _list(stored, tables, tail, total, limit, most, places)
        if listed < 0:
            return listed, 0
        wide = (listed + BLOCK - 1) // BLOCK * BLOCK
        for first in range(0, wide, BLOCK):
            _sum(kept + first, most, count, bits, tables, sums + 2 * first, 2 * most, ones)
        if added:
            add_to_listed(sums, 2 * most, share, added, stride, rows, listed)
        nearest(sums, 2 * most, share, tops, gap, wide)
        below = array_at(np.int16, gap, wide)
        below[listed:] = NONE
        last = _smallest(gap, wide, more)
        if last <= limit or limit == ALL:
            return wide, last
        there, doubling = count_within(gap, wide, np.int16(limit)), limit + 16
        if there == before:  # perhaps no more rows are valid
            doubling *= 4
        elif there >= FEW:  # they become twice as many by about as much as the last time
            doubling = max(limit - _smallest(gap, wide, there // 2), limit // 4)
        limit = min(limit + 1 + int(doubling * np.log2(MARGIN * more / max(there, more / 2))), ALL)
        before = there


@njit
def _vote(places, step, count, last, unit, share, wanted):
    """Move the names of the best of `count` rows, in whole blocks, to the front of rows, and return how many; see
    `choose`. places: of `choose_rows`, where the heads' factors `[G]` float32 take the place of tops; step: rows from a
    query head's sums and weights to the next's."""
    sums, gap, _, rows, weighed, factors_at = places[:6]
    factors, least = array_at(np.float32, factors_at, share), np.float32(np.inf)
    for g in range(share):
        top = highest_sum(sums + 2 * step * g, gap, np.int16(last), count)
        factors[g] = weights(sums + 2 * step * g, gap, np.int16(last), np.float32(unit), top, count,
                             weighed + 4 * step * g)  # fmt: skip
        least = min(least, factors[g])
    for g in range(share):
        factors[g] = least / factors[g] if factors[g] > 0 else np.float32(0)
    mixed(weighed, 4 * step, share, factors_at, count, weighed)
    return choose(weighed, rows, count, wanted)


def room(share, count, bits, sampled, most):
    """Places of what `choose_rows` works in, from one address on: `sums`, gap, kept, rows, weights, tops, scales,
    firsts, losses, begins, ones, and room for `_list`; and its bytes in all."""
    gap = 2 * share * max(sampled, most)
    kept = gap + 2 * max(sampled, most)
    rows = kept + count * most
    weighed = rows + 4 * most
    tops = weighed + 4 * share * most
    scales = tops + 4 * share  # where factors come later
    firsts = scales + 2 * share
    losses = firsts + share
    begins = losses + share * (count * 8 // bits << bits)
    ones = begins + share * TILE
    work = ones + BLOCK
    end = work + 16 + 2 * (share + 1) * BLOCK
    return gap, kept, rows, weighed, tops, scales, firsts, losses, begins, ones, work, end


_room = njit(room)


@njit
def _places(arena, offsets):
    """Addresses of what `room` says, from `sums` on, without its bytes in all."""
    gap, kept, rows, weighed, tops, scales, firsts, losses, begins, ones, work, _ = offsets
    return (
        arena, arena + gap, arena + kept, arena + rows, arena + weighed, arena + tops, arena + scales, arena + firsts,
        arena + losses, arena + begins, arena + ones, arena + work,
    )  # fmt: skip


@njit
def choose_rows(stored, tables, tail, total, apart, more, unit, most, sampled, arena, out):
    """Name the best rows of one KV head in `out` `[S]` int32, and return how many; -1 where `arena` has no room.

    stored: address of the codes, bytes from one of a row to the next, how many, bits, and address of what says which
    rows are valid; tables: address of `[G,M,K]` uint8, G, address of what `pack` makes of them, what `round_turned`
    returned, the address 0 where nothing is added to sums, and address of the most that is added `[G]` int16; tail:
    address of the codes of the rows behind whole tiles `[count,128]`, and behind these which are valid; unit: a step of
    a sum in units of log 2; arena: address of what `room` says.
    """
    share, count, bits = tables[1], stored[2], stored[3]
    places = _places(arena, _room(share, count, bits, sampled, most))
    gap, rows, tops = places[1], places[3], places[5]
    threshold = _sample(stored, tables, tail, total, apart, unit, arena, gap, tops)
    needed = more / apart
    limit = _smallest(gap, threshold, int(np.ceil(needed + 2 * np.sqrt(needed) + 1)))
    wide, last = _candidates(stored, tables, tail, total, more, limit, most, places)
    if wide < 0:
        return wide
    chosen = _vote(places, most, wide, last, unit, share, len(out))
    named = array_at(np.int32, rows, most)
    for i in range(chosen):
        out[i] = named[i]
    return chosen
