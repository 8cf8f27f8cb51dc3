"""Logits of every row and masses of every page from keys of a few bits, in compiled code, before the group's vote."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LN2, LOG2E, fetch, flat_rows, storage_of
from sparseattn.kernels.numba_threads import ALONE, EXPONENTIAL, ONE_AT_A_TIME, STEP, use_threads
from sparseattn.kernels.numba_vectors import FLOATS, LANES, LOWEST, WORDS, every, larger, logarithms, place_in, powers
from sparseattn.kernels.quantized_keys.cpu_products import (
    LINES_AHEAD,
    PAIRS,
    SERVED,
    round_group,
    rounded_bytes,
    scratch,
    tile_logits,
)
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.quantized_keys.level_grid import NUMBERS

PART_ROWS = 2048  # of one part: the logits of four query heads stay in the cache of a core
AHEAD = 4  # listed pages asked for before their turn: they lie anywhere in memory


@intrinsic
def _page_masses(typing, numbers, at, page, out):
    """Of the pages of `page` rows, a power of two, that the register `numbers[at:]` holds, or of the one that begins
    there: the logarithms of base 2 of their sums of 2 to the power of each, the one of lane i at `out[i]`."""

    def code(context, builder, signature, arguments):
        numbers_, at_, page_, out_ = arguments
        none, sixteen = ir.Constant(page_.type, 0), ir.Constant(page_.type, LANES)
        top = cgutils.alloca_once(builder, FLOATS)
        total = cgutils.alloca_once(builder, FLOATS)
        builder.store(every(FLOATS, -math.inf), top)
        builder.store(every(FLOATS, 0.0), total)

        def load(n):
            place = builder.add(at_, n)
            return builder.load(place_in(context, builder, numbers, numbers_, place, FLOATS), align=4)

        def over_page(room, joined):
            for apart in (1, 2, 4, 8):
                with builder.if_then(builder.icmp_signed(">", page_, ir.Constant(page_.type, apart))):
                    x = builder.load(room)
                    other = ir.Constant(WORDS, [lane ^ apart for lane in range(LANES)])
                    builder.store(joined(x, builder.shuffle_vector(x, x, other)), room)

        with cgutils.for_range_slice(builder, none, page_, sixteen, intp=page_.type) as (n, _):
            builder.store(larger(builder, load(n), builder.load(top)), top)
        over_page(top, lambda a, b: larger(builder, a, b))
        peak = builder.load(top)
        less = larger(builder, peak, every(FLOATS, LOWEST))
        with cgutils.for_range_slice(builder, none, page_, sixteen, intp=page_.type) as (n, _):
            builder.store(builder.fadd(powers(builder, builder.fsub(load(n), less)), builder.load(total)), total)
        over_page(total, builder.fadd)
        mass = builder.fadd(peak, logarithms(builder, builder.load(total)))
        builder.store(mass, place_in(context, builder, out, out_, none, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(numbers, types.intp, types.intp, out), code


@njit
def head_of(keys, b, h, grid_at):
    """Return what is stored of KV head h of sequence b, of the `keys` of `stored_inputs`: codes, lowest levels and
    steps, each flat, with the head's place and the step from group to group; grid and validity, flat with the head's
    place."""
    (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, _), (valid, valid_step) = keys
    return (
        (packed, b * packed_steps[0] + h * packed_steps[1], packed_steps[2]),
        (low, b * low_steps[0] + h * low_steps[1], low_steps[2]),
        (step, b * step_steps[0] + h * step_steps[1], step_steps[2]),
        (grid, grid_at),
        (valid, b * valid_step),
    )


@njit
def score_part(query, h, head, form, places, groups, page_unit, out_of):
    """Write what the pages of some groups of one KV head weigh, for each query head: for pages of 1 row their logits,
    else `unit` times the logarithms of base 2 of their sums of 2 to the power of each.

    query: `[B*H,G,padded]`, of which h is the head's; head: see `head_of`; form: channels, rows of a group, words of a
    row, and bits; places: `[n]`, where in a store that sequences share a group lies, negative: nowhere; validity is
    then of any one group. `[0]`: the groups are the sequence's own; groups: first, last, and how many apart; page_unit:
    rows of a page, and `unit`; out_of: flat, the place of the first query head's, and the step to the next. The logits
    of a page's rows are kept for one group at a time.
    """
    (packed, packed_at, group_step), (low, low_at, low_step), (step, step_at, step_step), grid_of, known = head
    (size, rows, words, bits), (first, last, apart), (page, unit) = form, groups, page_unit
    out, out_at, out_step = out_of
    valid, valid_at = known
    share, padded = query.shape[1:]
    wide = rounded_bytes(words, bits, padded)
    room = scratch(share, padded, wide, 2)
    rounded, scale, base = room[3], room[4], room[5]
    flat, tiles, pages = query.reshape(-1), rows // LANES, rows // page
    queries, rounding = (flat, h * share * padded, share, padded), (size, bits, wide)
    paired = tiles & -2 if PAIRS else 0
    shared, alone = len(places) > 0, page == 1
    scattered = shared or apart > 1
    lines_ahead = 0 if scattered else LINES_AHEAD  # groups of a store lie anywhere, of a sample apart
    own = np.empty(1 if alone else SERVED * rows, np.float32)
    masses = np.empty(LANES, np.float32)
    count = (last - first + apart - 1) // apart
    # A group's queries are rounded while the rows of the group before are multiplied, of which neither waits.
    for turn in range(count + 1):
        group, slot = first + turn * apart, turn & 1
        place = np.intp(places[group]) if shared and turn < count else np.intp(group)
        if turn < count and place >= 0:
            at, by_at = low_at + place * low_step, step_at + place * step_step
            round_group(queries, rounding, (low, at), (step, by_at), grid_of, room, slot)
        if turn == 0:
            continue
        group, slot = group - apart, 1 - slot
        place, row, to = np.intp(group), valid_at + group * rows, out_at + (turn - 1) * pages
        ahead = np.intp(-1)
        if group + AHEAD * apart < last:
            ahead = np.intp(places[group + AHEAD]) if shared else np.intp(group + AHEAD * apart)
        if ahead >= 0 and scattered:
            fetch(packed, packed_at + ahead * group_step, rows * 4 * words)
            fetch(low, low_at + ahead * low_step, size)
            fetch(step, step_at + ahead * step_step, size)
        if shared:
            place, row = np.intp(places[group]), valid_at
            if place < 0:
                for g in range(share):
                    out[to + g * out_step : to + g * out_step + pages] = -np.inf
                continue
        codes = packed_at + place * group_step
        for g in range(0, share, SERVED):
            served, mine = min(SERVED, share - g), slot * share + g
            rounded_at = mine * wide
            into, into_at, head_step = (out, to + g * out_step, out_step) if alone else (own, np.intp(0), np.intp(rows))
            for t in range(0, paired, 2):
                tile_logits(
                    2, served, packed, codes + t * 64 * words, words, bits, rounded, rounded_at, wide, scale, base,
                    mine, valid, row + t * LANES, into, into_at + t * LANES, head_step, np.intp(lines_ahead),
                )  # fmt: skip
            for t in range(paired, tiles):
                tile_logits(
                    1, served, packed, codes + t * 64 * words, words, bits, rounded, rounded_at, wide, scale, base,
                    mine, valid, row + t * LANES, into, into_at + t * LANES, head_step, np.intp(lines_ahead),
                )  # fmt: skip
            if alone:
                continue
            for k in range(served):
                p = to + (g + k) * out_step
                for first_row in range(k * rows, (k + 1) * rows, max(page, LANES)):
                    _page_masses(own, first_row, page, masses)
                    for lane in range(0, LANES, page):
                        out[p] = masses[lane] * unit
                        p += 1


@entry(parallel=True, cache=True, nogil=True)
def _masses(query, keys, form, places, once, page_unit, out):
    """query: `[B*H,G,padded]`; keys: see `stored_inputs`; places: `[B,n]` or `[B,0]`; form, page_unit: see
    `score_part`; once: groups of a part; out: `[B,H,G,N/page]`."""
    # What the loop over parts reads stands loose, or in tuples of one level: numba takes no others into it.
    (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step) = keys
    _, heads, share, count = out.shape
    pages = form[1] // page_unit[0]
    groups = count // pages
    parts = (groups + once - 1) // once
    line = out.reshape(-1)
    for work in prange(query.shape[0] * parts):
        which, first = work // parts, work % parts * once
        b, h = which // heads, which % heads
        keys_of = (packed, packed_steps), (low, low_steps), (step, step_steps), (grid, grid_step), (valid, valid_step)
        head = head_of(keys_of, b, h, which * grid_step)
        to = line, which * share * count + first * pages, count
        score_part(query, which, head, form, places[b], (first, min(groups, first + once), 1), page_unit, to)


def stored_inputs(query: Tensor, keys: QuantizedKeys, rows: int, factor: float) -> Any:
    """Return what a kernel takes: the query, padded and times `factor`; the keys, as codes, lowest levels and steps
    with their steps of b, h and group, grid with its step of heads, validity with its step of b; and the form,
    channels, rows of a group, words of a row, and bits. `rows`: of a group."""
    size = query.shape[-1]
    padded = -(-size // LANES) * LANES
    scaled = torch.nn.functional.pad(query.float().flatten(0, 1) * factor, (0, padded - size)).contiguous()
    grid = torch.empty(0) if keys.grid is None else keys.grid
    valid = keys.mask if keys.mask.stride(-1) == 1 else keys.mask.contiguous()  # one for all rows, expanded
    return (
        scaled.numpy(),
        (
            flat_rows(keys.codes), flat_rows(keys.low), flat_rows(keys.step),
            (storage_of(grid.contiguous()), 0 if keys.grid is None else NUMBERS * size),
            (storage_of(valid.view(torch.uint8)), valid.stride(0)),
        ),
        (size, rows, keys.codes.shape[3] // (4 * rows), keys.bits),
    )  # fmt: skip


def groups_and_rows(keys: QuantizedKeys, table: Tensor | None) -> tuple[int, int]:
    """Return how many groups a sequence has, and the rows of one; with a table `valid` is of any one entry."""
    if table is not None:
        return table.shape[1], keys.mask.shape[1]
    return keys.groups, keys.mask.shape[1] // keys.groups


def groups_of_a_part(rows: int) -> int:
    """Return how many groups of so many rows one part takes."""
    return max(PART_ROWS // rows, 1)


def work_of(query: Tensor, rows: int) -> float:
    return query.numel() * rows / 8  # integer products: a register has four times as many of them, and two a cycle


def masses(query: Tensor, keys: QuantizedKeys, page: int = 1, table: Tensor | None = None) -> Tensor:
    """Return the masses of pages as of `dispatch.scores`, without the group's vote, `[B,H,G,N/page]` float32.

    That of a page of 1 row is its logit. The query times steps is rounded to 8 bits. With a `table` as of
    `dispatch.scores_at`, codes and levels `[B,H,entries,..]` are of a store, and `valid` `[B,rows]` is of any of its
    entries.
    """
    batch, heads, share, size = query.shape
    groups, rows = groups_and_rows(keys, table)
    out = torch.empty(batch, heads, share, groups * rows // page)
    factor, unit = (1.0, 1.0) if page == 1 else (float(LOG2E), float(LN2))
    inputs = stored_inputs(query, keys, rows, factor * size**-0.5)
    with ONE_AT_A_TIME:
        use_threads(work_of(query, groups * rows) + work_of_masses(query, groups * rows, page), work_of_a_thread(table))
        _masses(*inputs, places_of(table, batch), groups_of_a_part(rows), (page, np.float32(unit)), out.numpy())
    return out


def places_of(table: Tensor | None, batch: int) -> Any:
    """Return what a kernel takes of a table."""
    return np.empty((batch, 0), np.int32) if table is None else table.int().contiguous().numpy()


def work_of_a_thread(table: Tensor | None) -> int:
    """Return the work for which a thread more pays: a store is an engine's, in whose steps threads are awake."""
    return ALONE if table is None else STEP


def work_of_masses(query: Tensor, rows: int, page: int) -> float:
    """Return the work of a page's sum over its rows; none for pages of 1."""
    return 0.0 if page == 1 else EXPONENTIAL * query.shape[:3].numel() * rows / 8
