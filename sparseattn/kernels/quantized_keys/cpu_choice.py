"""The best rows by the group's vote "softmax", of those rows that can be among them: compiled code.

A sample of the groups tells about what the weights of each query head come to, and about what vote the last of the best
rows has. One pass weighs every row and lists those that may have as much. What the weights of all rows come to says
then whether a row that was not listed could be among the best. If so, a second pass, which knows that, lists
again; it is one thread's work for a list.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.group_vote.cpu_vectors import highest, weights
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, LOG2E, array_at, read, rows_at
from sparseattn.kernels.numba_threads import EXPONENTIAL, ONE_AT_A_TIME, scratch, use_threads
from sparseattn.kernels.numba_vectors import FLOATS, LANES, WORD, WORDS, every, splat
from sparseattn.kernels.product_codes.cpu_lists import keep_rows
from sparseattn.kernels.product_codes.cpu_registers import load, store
from sparseattn.kernels.product_codes.cpu_votes import choose, least_of_best, mixed, vote_of
from sparseattn.kernels.quantized_keys.cpu_rows import groups_of_a_part, head_of, score_part, work_of
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.quantized_keys.level_grid import NUMBERS

MORE = 3  # rows that the pass shall list for each that is chosen
EXPECTED = 48  # of these in the sample
LEAST_APART, MOST_APART = 8, 64  # groups from one of the sample to the next
BLOCK = 64  # candidates are filled up to a multiple of so many
ABOVE = np.float32(60)  # in units of log 2: rows that lie farther above what a sample expects are not weighed
BELOW = np.float32(1 - 1e-5)  # of a vote: what the same sums in another order may be off by
place = types.intp


@intrinsic
def _reaching(typing, weighed, step, share, least):
    """Return a bit for each of 16 rows whose weights, float32 at `weighed`, of `share` query heads `step` bytes apart
    add up to `least` or more. All but numbers are addresses."""

    def code(context, builder, signature, arguments):
        weighed_, step_, share_, least_ = arguments
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, 0.0), total)
        with cgutils.for_range(builder, share_) as loop:
            own = load(builder, builder.add(weighed_, builder.mul(loop.index, step_)), FLOATS)
            builder.store(builder.fadd(own, builder.load(total)), total)
        marks = builder.fcmp_ordered(">=", builder.load(total), splat(builder, least_, FLOATS))
        return builder.zext(builder.bitcast(marks, ir.IntType(LANES)), ir.IntType(64))

    return types.uint64(place, place, place, types.float32), code


@intrinsic
def _name(typing, first, names):
    """Write 16 numbers from `first` on, int32, to the address `names`."""

    def code(context, builder, signature, arguments):
        first_, names_ = arguments
        lanes = ir.Constant(WORDS, list(range(LANES)))
        store(builder, builder.add(splat(builder, builder.trunc(first_, WORD), WORDS), lanes), names_)
        return context.get_dummy_value()

    return types.void(place, place), code


@njit
def _list(weighed, step, share, count, first, least, kept, room, most, rows, listed, names):
    """List those of `count` rows, a multiple of 16, `first` the name of the first, whose weights add up to `least`.

    weighed: their weights, float32, of query heads `step` bytes apart; kept: those of the listed rows, of heads `room`
    numbers apart; most: rows that there is room for; rows: the names of these, int32; names: room for 16. All but
    numbers are addresses. Return how many are listed then, -1 where there is no room.
    """
    for n in range(0, count, LANES):
        marks = _reaching(weighed + 4 * n, step, share, least)
        if marks:
            if listed + LANES > most:
                return -1
            _name(first + n, names)
            for g in range(share):
                keep_rows(weighed + 4 * n + g * step, marks, kept + 4 * (g * room + listed))
            listed += keep_rows(names, marks, rows + 4 * listed)
    return listed


@njit
def _sample(query, which, head, form, groups, apart, wanted, shift):
    """Return about the vote of the `wanted`-th best row, and write the logarithm of base 2 of what the weights of each
    query head come to, `shift` `[G]`, by every `apart`-th group; 0 where that tells nothing.

    query, head, form: see `score_part`, `which` being the head's; groups: in all. A row that makes up more than a
    quarter of its head's sample is taken to be the only one.
    """
    share, sampled = query.shape[1], (groups + apart - 1) // apart
    count = sampled * form[1]
    wide = (count + BLOCK - 1) // BLOCK * BLOCK
    scores, factors = np.empty(share * wide, np.float32), np.empty(share, np.float32)
    scale = np.float32(groups) / np.float32(sampled)
    score_part(
        query, which, head, form, np.empty(0, np.int32), (0, groups, apart), (1, np.float32(1)), (scores, 0, wide)
    )
    for g in range(share):
        begin = g * wide
        scores[begin + count : begin + wide] = -np.inf
        top = highest(scores, begin, wide)
        if not top > -np.inf:
            return np.float32(0)
        total = weights(scores, begin, wide, top, scores, begin)
        total = scale * total if total >= 4 else scale * (total - 1) + 1
        if not total < np.inf:
            return np.float32(0)
        shift[g], factors[g] = top + np.log2(total), 1 / total
    expected = wanted * MORE / scale
    return _sampled_vote(scores, wide, factors, min(int(np.ceil(expected + np.sqrt(expected))), count))


@njit
def _sampled_vote(weighed, wide, factors, wanted):
    """Return the `wanted`-th largest vote of rows with these weights `[G,wide]`, which are lost.

    Arrays whose addresses are read must be arguments: numba frees one behind the last line that names it.
    """
    votes = weighed.ctypes.data
    mixed(votes, 4 * wide, len(factors), factors.ctypes.data, wide, votes)
    return vote_of(least_of_best(votes, wide, wanted))


@njit
def _weigh(query, which, head, form, parts_of, shift, least, sums, kept, room, most, rows):
    """Weigh the rows of some parts of one KV head and list those whose vote is at least about `least`.

    query, head, form: see `score_part`; parts_of: first part, last, groups of one, and groups in all; sums:
    `[parts,G]`, what the weights of each come to, where that of a row is 2 to the power of its score less `shift`
    `[G]`; kept, room, most, rows: see `_list`. Return how many are listed, -1 where there is no room, or where a row
    weighs far more than expected.
    """
    (begin, end, once, groups), share, listed = parts_of, query.shape[1], 0
    each = once * form[1]
    scores, names = np.empty(share * each, np.float32), np.empty(LANES, np.int32)
    for part in range(begin, end):
        first = part * once
        last = min(groups, first + once)
        score_part(
            query, which, head, form, np.empty(0, np.int32), (first, last, 1), (1, np.float32(1)), (scores, 0, each)
        )
        count = (last - first) * form[1]
        for g in range(share):
            if not highest(scores, g * each, count) - shift[g] <= ABOVE:
                return -1
            sums[part, g] = weights(scores, g * each, count, shift[g], scores, g * each)
        listed = _list(
            scores.ctypes.data, 4 * each, share, count, first * form[1], least, kept, room, most, rows, listed,
            names.ctypes.data,
        )  # fmt: skip
        if listed < 0:
            return listed
    return listed


@njit
def _votes(kept, room, share, listed, factors, votes):
    """Write the votes of listed rows to the address `votes`, see `_list` for the others, and 0 behind them. Return how
    many that is in whole blocks."""
    wide = (listed + BLOCK - 1) // BLOCK * BLOCK
    for g in range(share):
        array_at(np.float32, kept + 4 * g * room, wide)[listed:] = 0
    mixed(kept, 4 * room, share, factors.ctypes.data, wide, votes)
    return wide


def arena_of_list(share, stretches, most):
    """Return how many numbers of 32 bits a list works in: of what is listed the weights, the names and the votes."""
    return (share + 2) * stretches * most


_arena_of_list = njit(arena_of_list)


@entry(parallel=True, cache=True, nogil=True)
def best_of_likely(kinds, numbers, factor, query_at, arenas_at, out_at):
    """kinds: of queries, lowest levels, steps and grid; numbers: of `LikelyRows`; factor: of logits; ..._at: where
    queries `[B,H,G,D]`, room for what is listed, and what comes out lie, of int32: start and length of the best rows
    `[2,lists,S]`, then for each list how many passes that took, 0 where better rows may not have been seen."""
    # What the loops over lists read stands loose, or in tuples of one level: numba takes no others into them.
    lists, heads, share, size, padded, groups, rows, words, bits, once, parts, stretches, most, wanted = numbers[:14]
    packed_at, packed_b, packed_h, packed_g, low_at, low_b, low_h, low_g = numbers[14:22]
    step_at, step_b, step_h, step_g, grid_at, grid_step, valid_at, valid_step = numbers[22:30]
    apart = numbers[30]
    asked_kind, low_kind, step_kind, grid_kind = kinds
    packed, packed_steps = array_at(np.uint8, packed_at, 1), (packed_b, packed_h, packed_g)
    low, low_steps = array_at(low_kind, low_at, 1), (low_b, low_h, low_g)
    step, step_steps = array_at(step_kind, step_at, 1), (step_b, step_h, step_g)
    grid, valid = array_at(grid_kind, grid_at, 1), array_at(np.uint8, valid_at, 1)
    form, room = (size, rows, words, bits), stretches * most
    arena = _arena_of_list(share, stretches, most)
    query = np.zeros((lists, share, padded), np.float32)
    asked, scaled = array_at(asked_kind, query_at, lists * share * size), query.reshape(-1)
    for i in range(lists * share):
        for d in range(size):
            scaled[i * padded + d] = read(asked, i * size + d) * factor
    out = array_at(np.int32, out_at, lists * (2 * wanted + 1))
    shift, least = np.empty((lists, share), np.float32), np.empty(lists, np.float32)
    sums, listed = np.empty((lists, parts, share), np.float32), np.empty((lists, stretches), np.int64)
    for which in prange(lists):
        keys_of = (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step)
        head = head_of(keys_of, which // heads, which % heads, which * grid_step)
        least[which] = _sample(query, np.intp(which), head, form, groups, apart, wanted, shift[which])
    for unit in prange(lists * stretches):
        which, stretch = unit // stretches, unit % stretches
        keys_of = (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step)
        head = head_of(keys_of, which // heads, which % heads, which * grid_step)
        begin, end = stretch * parts // stretches, (stretch + 1) * parts // stretches
        kept = arenas_at + 4 * (which * arena + stretch * most)
        listed[which, stretch] = -1
        if least[which] > 0:
            listed[which, stretch] = _weigh(
                query, np.intp(which), head, form, (begin, end, once, groups), shift[which], least[which], sums[which],
                kept, room, most, arenas_at + 4 * (which * arena + share * room + stretch * most),
            )  # fmt: skip
    for which in prange(lists):
        keys_of = (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step)
        head = head_of(keys_of, which // heads, which % heads, which * grid_step)
        own = out[which * wanted : (which + 1) * wanted]
        passes = _choose(
            query, np.intp(which), head, form, (np.intp(0), parts, once, groups), shift[which], least[which],
            sums[which], listed[which], most, arenas_at + 4 * which * arena, own,
        )  # fmt: skip
        out[2 * lists * wanted + which] = passes
        out[(lists + which) * wanted : (lists + which + 1) * wanted] = 1


@njit
def _choose(query, which, head, form, parts_of, shift, least, sums, listed, most, kept, out):
    """Name the best rows of one KV head in `out` `[S]`, of those that are listed. Return how many passes that took; 0
    where a row that is not listed may be better.

    query, head, form, parts_of, shift, least, sums: see `_weigh`; listed: of each stretch, whose names and weights lie
    `most` apart; kept: their address.
    """
    share, wanted, room = query.shape[1], len(out), len(listed) * most
    rows, votes = kept + 4 * share * room, kept + 4 * (share + 1) * room
    factors, total = np.empty(share, np.float32), _close_up(listed, most, share, kept, rows)
    if total < wanted or not _factors(sums, factors):
        return 0
    wide = _votes(kept, room, share, total, factors, votes)
    last = vote_of(least_of_best(votes, wide, wanted))
    passes = 1
    if not last >= least * factors.max():
        for g in range(share):
            shift[g] -= np.log2(factors[g])
        total = _weigh(query, which, head, form, parts_of, shift, last * BELOW, sums, kept, room, room, rows)
        factors[:], passes = 1, 2
        if total < wanted:
            return 0
        wide = _votes(kept, room, share, total, factors, votes)
    chosen = choose(votes, rows, wide, wanted)
    named = array_at(np.int32, rows, room)
    for i in range(chosen):
        out[i] = named[i]
    return passes if chosen == wanted else 0


@njit
def _factors(sums, factors):
    """Write by what the weights of each query head are multiplied, `[G]`, that they come to 1; sums: `[parts,G]`.
    Return whether that is known."""
    known = True
    for g in range(len(factors)):
        whole = np.float64(0)
        for part in range(len(sums)):
            whole += sums[part, g]
        known &= whole > 0
        factors[g] = np.float32(1 / whole) if whole > 0 else np.float32(0)
    return known


@njit
def _close_up(listed, most, share, kept, rows):
    """Move what each stretch listed behind what the one before did, and return how many rows that is; -1 where one had
    no room. All but numbers are addresses."""
    total, room = 0, len(listed) * most
    names = array_at(np.int32, rows, room)
    for stretch in range(len(listed)):
        if listed[stretch] < 0:
            return -1
        for i in range(listed[stretch] if stretch else 0):
            names[total + i] = names[stretch * most + i]
        for g in range(share if stretch else 0):
            own = array_at(np.float32, kept + 4 * g * room, room)
            for i in range(listed[stretch]):
                own[total + i] = own[stretch * most + i]
        total += listed[stretch]
    return total


class LikelyRows:
    """What steps have in common, looked up once.

    Args:
        query: `[B,H,G,D]`, one such as is given at each step.
        keys: that are scored, which stay where they are.
        count: rows that are chosen, half of them at most.

    Attributes:
        passes: `[B*H]`, which the last choice took of each list: 2 where the sample misled, 0 where nothing is known.
    """

    def __init__(self, query: Tensor, keys: QuantizedKeys, count: int) -> None:
        (batch, heads, share, size), valid, grid = query.shape, keys.mask, keys.grid
        groups, rows = keys.groups, keys.mask.shape[1] // keys.groups
        self.lists, once, self.count = batch * heads, groups_of_a_part(rows), count
        parts, stored, threads = -(-groups // once), groups * rows, torch.get_num_threads()
        stretches = min(parts, threads if self.lists % threads else 1)
        most = min(-(-parts // stretches) * once * rows, 6 * count + 4096) // BLOCK * BLOCK + BLOCK
        valid = valid if valid.stride(-1) == 1 else valid.contiguous()
        grid = query.new_empty(0, dtype=torch.float32) if grid is None else grid.contiguous()
        self.arenas = 4 * self.lists * arena_of_list(share, stretches, most)
        self.held = keys, valid, grid  # addresses hold nothing
        stored_at = rows_at(keys.codes), rows_at(keys.low), rows_at(keys.step)
        self.kinds = KINDS[query.dtype], stored_at[1][0], stored_at[2][0], KINDS[torch.float32]
        self.factor = np.float32(LOG2E * np.float32(size**-0.5))
        self.numbers = np.array(
            [
                self.lists, heads, share, size, -(-size // LANES) * LANES, groups, rows,
                keys.codes.shape[3] // (4 * rows), keys.bits, once, parts, stretches, most, count,
                *(number for _, at, steps in stored_at for number in (at, *steps)), grid.data_ptr(),
                NUMBERS * size if grid.numel() else 0,
                valid.data_ptr(), valid.stride(0), min(max(MORE * count // EXPECTED, LEAST_APART), MOST_APART),
            ],
            np.int64,
        )  # fmt: skip
        self.passes = torch.zeros(0, dtype=torch.int32)
        self.work = work_of(query, stored) + EXPONENTIAL * self.lists * share * stored / 8

    @staticmethod
    def serves(keys: QuantizedKeys, count: int) -> bool:
        """Whether so few of the rows are chosen that most need not be listed."""
        return 0 < 2 * count <= keys.mask.shape[1]

    def __call__(self, query: Tensor) -> Tensor | None:
        """Return what `dispatch.best` does by "softmax" of single rows; None where rows that were not seen may be among
        them, as where nearly all rows weigh next to nothing, or one far more than the sample lets expect."""
        query, out = query.contiguous(), torch.empty(self.lists * (2 * self.count + 1), dtype=torch.int32)
        with ONE_AT_A_TIME:
            use_threads(self.work)
            arenas_at = scratch(self.arenas).data_ptr()
            best_of_likely(self.kinds, self.numbers, self.factor, query.data_ptr(), arenas_at, out.data_ptr())
        self.passes = out[2 * self.lists * self.count :]
        if not self.passes.all():
            return None
        return out[: self.lists * self.count].view(*query.shape[:2], self.count)
