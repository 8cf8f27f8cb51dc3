"""`attend`, compiled by numba for the CPU: rows are read in place, once for a query group.

The list of rows of each head is cut into parts of one length, whatever the lengths of its spans, and the parts are
merged in their order: the result does not depend on how many threads there are.
"""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend.cpu_softmax import TILE, add_tile, join_parts
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, LOG2E, as_bits, fetch, flat_rows, read
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

PARTS = 32  # parts in all, at least, where there are rows for them: enough for any number of threads
PART_ROWS = 128  # rows for which a part of its own pays


@njit(fastmath=set(FAST))
def _part(query, scale, stored, h, table, spans, zones, part, sums):
    """Attention of a list's query heads `[share,D]` over one part of their rows.

    stored: keys and values flat, each with the steps of block, head and row; table: blocks of the sequence, and rows of
    one; spans: start, length and bias `[S]`, and the longest; zones: sink, base, sealed and end; part: its number,
    and how many there are; sums: `acc` `[share*D]`, `peak` and `total` `[share]`, which are written.
    """
    ((keys, key_steps), (values, value_steps)), (table, block_rows), (start, length, bias, span) = stored, table, spans
    (sink, base, sealed, end), (split, splits), (acc, peak, total) = zones, part, sums
    share, size = query.shape
    slots, zone = start.shape[0], min(sealed, block_rows * table.shape[0]) - base
    recent = max(end - sealed, 0)
    rows = sink + recent
    for s in range(slots):
        low = max(start[s], 0)
        rows += max(min(start[s] + min(length[s], span), zone) - low, 0)
    begin, stop = rows * split // splits, rows * (split + 1) // splits
    asked, flat = np.empty(share * size, np.float32), query.reshape(-1)
    for d in range(share * size):
        asked[d] = read(flat, d) * scale
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    key_at, value_at = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    weights = np.empty(share * TILE, np.float32)
    more, extra = np.zeros(TILE, np.float32), np.float32(0)
    filled, passed = 0, 0
    for s in range(slots + 2):
        if s < slots:
            low = max(start[s], 0) + base
            high = min(start[s] + min(length[s], span), zone) + base
            extra = bias[s] * LOG2E if bias.shape[0] else np.float32(0)
        elif s == slots:
            low, high, extra = 0, sink, np.float32(0)
        else:
            low, high = sealed, sealed + recent
        if high <= low:
            continue
        first, last = max(low, low + begin - passed), min(high, low + stop - passed)
        passed += high - low
        block, row = first // block_rows, first % block_rows
        for _ in range(first, last):
            if row == block_rows:
                block, row = block + 1, 0
            held = np.int64(table[block])
            key_at[filled] = held * key_steps[0] + h * key_steps[1] + row * key_steps[2]
            value_at[filled] = held * value_steps[0] + h * value_steps[1] + row * value_steps[2]
            fetch(keys, key_at[filled], size)
            fetch(values, value_at[filled], size)
            more[filled] = extra
            row += 1
            filled += 1
            if filled == TILE:
                add_tile(asked, share, size, keys, values, key_at, value_at, more, TILE, weights, peak, total, acc)
                filled = 0
        if passed >= stop:
            break
    if filled:
        add_tile(asked, share, size, keys, values, key_at, value_at, more, filled, weights, peak, total, acc)


@entry(parallel=True, cache=True, nogil=True)
def _attend(
    query, scale, keys, key_steps, values, value_steps, heads, table, block_rows, start, length, bias, span,
    sink, base, sealed, end, acc, peak, total, out, lse,
):  # fmt: skip
    """query, out: `[B*Hs,share,D]`; keys, values: flat, with the steps of block, head and row; table: `[B,M]`, blocks
    of each sequence; start, length, bias: `[B*Hs,S]`, or a bias without slots; acc, peak and total:
    `[B*Hs,splits,share,..]`, the parts. Loose, as taking tuples apart costs a call 1 to 2 us."""
    lists, splits = total.shape[:2]
    chosen = lists // sink.shape[0]
    for unit in prange(lists * splits):
        which, split = unit // splits, unit % splits
        b = which // chosen
        h = which % chosen * heads // chosen
        _part(
            query[which], scale, ((keys, key_steps), (values, value_steps)), h, (table[b], block_rows),
            (start[which], length[which], bias[which], span), (sink[b], base, sealed[b], end[b]), (split, splits),
            (acc[which, split].reshape(-1), peak[which, split], total[which, split]),
        )  # fmt: skip
    for which in range(lists):
        for g in range(total.shape[2]):
            join_parts(acc[which], peak[which], total[which], g, out[which], lse[which])


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend`, accumulated in float32; keys and values are views of any strides but the last.

    Raises:
        ValueError: keys or values whose elements of one row are not adjacent.
    """
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    lists = batch * chosen
    shape = lists, slots
    splits = max(1, min(-(-PARTS // max(lists, 1)), slots * selection.span // PART_ROWS + 1))
    share = heads * group // chosen
    acc, total = torch.empty(lists, splits, share, size), torch.empty(2, lists, splits, share)
    out, lse = torch.empty(batch, heads, group, size), torch.empty(batch, heads, group)
    sealed, end = bounds.sealed.contiguous().numpy(), bounds.rows.contiguous().numpy()
    recent = max(map(operator.sub, end.tolist(), sealed.tolist()), default=0)
    rows = slots * selection.span + bounds.base + max(recent, 0)
    with ONE_AT_A_TIME:
        use_threads(2 * rows * lists * share * size)
        _attend(
            as_bits(query).reshape(lists, share, size),
            np.float32(scale) * LOG2E,
            *flat_rows(keys),
            *flat_rows(values),
            heads,
            _own_blocks(batch) if block_table is None else block_table.contiguous().numpy(),
            max(keys.shape[2], 1),
            selection.start.contiguous().numpy().reshape(shape),  # a view of other steps would compile anew
            selection.length.contiguous().numpy().reshape(shape),
            no_bias(lists) if selection.bias is None else selection.bias.contiguous().numpy().reshape(shape),
            selection.span,
            bounds.sink.contiguous().numpy(),
            bounds.base,
            sealed,
            end,
            acc.numpy(),
            *total.numpy(),
            out.numpy().reshape(lists, share, size),
            lse.numpy().reshape(lists, share),
        )
    return out.to(query.dtype), lse


@functools.cache
def _own_blocks(batch: int) -> Any:
    """The block table `[B,1]` of keys that are no paged store: each sequence is one block."""
    return np.arange(batch, dtype=np.int32)[:, None]


@functools.cache
def no_bias(lists: int) -> Any:
    """What stands for no bias: an array of the same type, so that one compiled form serves both."""
    return np.empty((lists, 0), np.float32)
