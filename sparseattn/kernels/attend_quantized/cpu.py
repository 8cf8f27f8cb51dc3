"""`attend_coded`, compiled by numba for the CPU: codes are read in place, 32 rows at a time are read back into a buffer
that stays in the cache of a core, and what attends to them there is the code that attends to rows of 32 bits.

A row is read back once for all query heads that share its choice; the levels of a group of keys are widened once for
all rows of it that follow each other in a selection, as those of a page do.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.cpu import PART_ROWS, PARTS, no_bias
from sparseattn.kernels.attend.cpu_softmax import TILE, add_tile, join_parts
from sparseattn.kernels.attend_quantized.reference import CHANNELS, CodedRows
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, LOG2E, as_bits, fetch, flat_rows, put, read, scope
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads


@intrinsic
def _few(typing, array, place, shift, last):
    """Return the bits `last` of the byte at `place` of a flat uint8 array, from bit `shift` on, as float32."""

    def code(context, builder, signature, arguments):
        data = context.make_array(array)(context, builder, arguments[0]).data
        value = builder.load(builder.gep(data, [arguments[1]]))
        value.set_metadata("alias.scope", scope(builder))
        word = ir.IntType(32)  # vectors of words shift by a number of the loop's, those of bytes do not
        shifted = builder.lshr(builder.zext(value, word), builder.trunc(arguments[2], word))
        masked = builder.and_(shifted, builder.trunc(arguments[3], word))
        return builder.sitofp(masked, ir.FloatType())

    return types.float32(array, types.intp, types.intp, types.intp), code


@njit(fastmath=set(FAST))
def _widened(levels, at, out, size):
    """Levels of a group of keys, low then step, as float32."""
    for d in range(2 * size):
        put(out, d, read(levels, at + d))


@njit(fastmath=set(FAST))
def _key(codes, at, levels, out, to, size, bits):
    """Read a key back into `out[to:]`; levels: float32, low then step."""
    if bits == 8:
        for d in range(size):
            put(out, to + d, read(levels, d) + read(levels, size + d) * read(codes, at + d))
        return
    wide, last = (size * bits + 7) // 8, (1 << bits) - 1
    for plane in range(8 // bits):
        first, shift = plane * wide, plane * bits
        for d in range(min(wide, size - first)):
            low, step = read(levels, first + d), read(levels, size + first + d)
            put(out, to + first + d, low + step * _few(codes, at + d, shift, last))


@njit(fastmath=set(FAST))
def _value(codes, at, levels, level_at, out, to, form):
    """Read a value back into `out[to:]`; levels: the lows of its groups of channels from `level_at` on, then their
    steps; form: channels, bits, and groups."""
    size, bits, groups = form
    wide, last = (size * bits + 7) // 8, (1 << bits) - 1
    d = 0
    while d < size:  # as many channels as are of one group and of one plane of the bytes
        c, plane = d // CHANNELS, d // wide
        end = min((c + 1) * CHANNELS, (plane + 1) * wide, size)
        low, step = read(levels, level_at + c), read(levels, level_at + groups + c)
        if bits == 8:
            for e in range(d, end):
                put(out, to + e, low + step * read(codes, at + e))
        else:
            first, shift = at - plane * wide, plane * bits
            for e in range(d, end):
                put(out, to + e, low + step * _few(codes, first + e, shift, last))
        d = end


@njit(fastmath=set(FAST))
def _part(query, scale, all_keys, all_values, form, spans, part, sums):
    """Attention of a list's query heads `[share,D]` over one part of their rows.

    all_keys, all_values: codes and levels, each flat, with the place of the head's first row and the step to the next;
    form: rows in all, rows that share levels, and bits; spans: start, length and bias `[S]`, and the longest; part: its
    number, and how many there are; sums: `acc` `[share*D]`, `peak` and `total` `[share]`, which are written.
    """
    (keys, key_base, key_step), (levels, level_base, level_step) = all_keys
    (values, value_base, value_step), (of_values, of_base, of_step) = all_values
    (stored, group, bits), (start, length, bias, span), (split, splits) = form, spans, part
    acc, peak, total = sums
    share, size = query.shape
    slots, groups = start.shape[0], (size + CHANNELS - 1) // CHANNELS
    wide = (size * bits + 7) // 8
    rows = 0
    for s in range(slots):
        rows += max(min(start[s] + min(length[s], span), stored) - max(start[s], 0), 0)
    begin, stop = rows * split // splits, rows * (split + 1) // splits
    scaled, flat = np.empty(share * size, np.float32), query.reshape(-1)
    for d in range(share * size):
        scaled[d] = read(flat, d) * scale
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    row_at = np.empty(TILE, np.int64)
    key_at, value_at = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    read_keys, read_values = np.empty(TILE * size, np.float32), np.empty(TILE * size, np.float32)
    own, levels_of = np.empty(2 * size, np.float32), -1
    weights, more = np.empty(share * TILE, np.float32), np.zeros(TILE, np.float32)
    filled, passed, seen = 0, 0, -1
    for s in range(slots + 1):
        low, high, extra = 0, 0, np.float32(0)
        if s < slots:
            low, high = max(start[s], 0), min(start[s] + min(length[s], span), stored)
            extra = bias[s] * LOG2E if bias.shape[0] else np.float32(0)
        first, last = max(low, low + begin - passed), min(high, low + stop - passed)
        passed += max(high - low, 0)
        end = s == slots or passed >= stop
        row = first
        while row < last or (end and filled):
            if row < last:
                row_at[filled], more[filled] = row, extra
                fetch(keys, key_base + row * key_step, wide)
                fetch(values, value_base + row * value_step, wide)
                fetch(of_values, of_base + row * of_step, 2 * groups)
                if row // group != seen:
                    seen = row // group
                    fetch(levels, level_base + seen * level_step, 2 * size)
                row += 1
                filled += 1
            if filled == TILE or (end and row >= last):
                for t in range(filled):
                    at = row_at[t]
                    if at // group != levels_of:
                        levels_of = at // group
                        _widened(levels, level_base + levels_of * level_step, own, size)
                    key_at[t] = value_at[t] = t * size
                    _key(keys, key_base + at * key_step, own, read_keys, t * size, size, bits)
                    _value(
                        values, value_base + at * value_step, of_values, of_base + at * of_step, read_values, t * size,
                        (size, bits, groups),
                    )  # fmt: skip
                rows_of_tile = (read_keys, key_at), (read_values, value_at)
                add_tile((scaled, share, size), *rows_of_tile, (more, filled, 0), weights, (peak, total, acc))
                filled = 0
        if end:
            break


@entry(parallel=True, cache=True, nogil=True)
def _attend(query, scale, coded_keys, coded_values, form, spans, splits, outs):
    """query: `[B*Hs,share,D]`; coded_keys, coded_values: codes and levels, each flat with the steps of sequence, head
    and row; form: rows in all, rows that share levels, bits, KV heads, and sequences; spans: start, length, bias
    `[B*Hs,S]`, or a bias without slots, and the longest; splits: parts of a list; outs: out `[B*Hs,share,D]` and lse
    `[B*Hs,share]`."""
    ((keys, key_steps), (levels, level_steps)), ((values, value_steps), (of_values, of_steps)) = (
        coded_keys,
        coded_values,
    )
    (stored, group, bits, heads, batch), (start, length, bias, span), (out, lse) = form, spans, outs
    lists, share, size = query.shape
    acc = np.empty((lists, splits, share * size), np.float32)
    peak, total = np.empty((lists, splits, share), np.float32), np.empty((lists, splits, share), np.float32)
    chosen = lists // batch
    for unit in prange(lists * splits):
        which, split = unit // splits, unit % splits
        b = which // chosen
        h = which % chosen * heads // chosen
        key_codes = keys, b * key_steps[0] + h * key_steps[1], key_steps[2]
        key_levels = levels, b * level_steps[0] + h * level_steps[1], level_steps[2]
        value_codes = values, b * value_steps[0] + h * value_steps[1], value_steps[2]
        value_levels = of_values, b * of_steps[0] + h * of_steps[1], of_steps[2]
        _part(
            query[which], scale, (key_codes, key_levels), (value_codes, value_levels), (stored, group, bits),
            (start[which], length[which], bias[which], span), (split, splits),
            (acc[which, split], peak[which, split], total[which, split]),
        )  # fmt: skip
    for which in range(lists):
        for g in range(share):
            join_parts(acc[which], peak[which], total[which], g, out[which], lse[which])


def attend(query: Tensor, rows: CodedRows, selection: Selection, scale: float) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend_coded`, accumulated in float32; rows are views of any strides but the last.

    Raises:
        ValueError: codes or levels whose elements of one row are not adjacent.
    """
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    lists, share = batch * chosen, heads * group // chosen
    splits = max(1, min(-(-PARTS // max(lists, 1)), slots * selection.span // PART_ROWS + 1))
    out, lse = torch.empty(batch, heads, group, size), torch.empty(batch, heads, group)
    start, length = (part.contiguous().numpy().reshape(lists, slots) for part in (selection.start, selection.length))
    bias = no_bias(lists) if selection.bias is None else selection.bias.contiguous().numpy().reshape(lists, slots)
    with ONE_AT_A_TIME:
        use_threads(2 * slots * selection.span * lists * share * size)
        _attend(
            as_bits(query).reshape(lists, share, size),
            np.float32(scale) * LOG2E,
            (flat_rows(rows.keys), flat_rows(rows.key_levels.flatten(3))),
            (flat_rows(rows.values), flat_rows(rows.value_levels.flatten(3))),
            (rows.keys.shape[2], rows.group, rows.bits, heads, batch),
            (start, length, bias, selection.span),
            splits,
            (out.numpy().reshape(lists, share, size), lse.numpy().reshape(lists, share)),
        )
    return out.to(query.dtype), lse
