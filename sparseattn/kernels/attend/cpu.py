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
from sparseattn.kernels.attend.cpu_many import BY_ROWS, prepare, products_for, room_for
from sparseattn.kernels.attend.cpu_many import add_rows as add_rows_of_many
from sparseattn.kernels.attend.cpu_softmax import BATCH, TILE, add_rows, join_parts
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import LOG2E, address_of, array_at, fetch, put_float, read, rows_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

PARTS = 32  # parts in all, at least, where there are rows for them: enough for any number of threads
RUN = 64  # rows of a span from which on the processor asks for them by itself
PART_ROWS = 128  # rows for which a part of its own pays


@njit  # not fastmath, which numba hands on to what is called: `powers` may not be reordered
def _part(query, size, scale, products, stored, h, table, spans, zones, parts):
    """Attention of a list's query heads, flat of `[share,D]`, over one part of their rows.

    products: how they are made, see `cpu_many`; stored: keys and values flat, each with the steps of block, head and
    row; table: blocks of the sequence, and rows of one; spans: start, length and bias `[S]`, and the longest; zones:
    sink, base, sealed and end; parts: the one's number, how many there are, `acc` `[share*D]`, `peak` and `total`
    `[share]`, which are written.
    """
    ((keys, key_steps), (values, value_steps)), (table, block_rows), (start, length, bias, span) = stored, table, spans
    (sink, base, sealed, end), (split, splits, acc, peak, total) = zones, parts
    share, many = peak.shape[0], products != BY_ROWS
    slots, zone = start.shape[0], min(sealed, block_rows * table.shape[0]) - base
    recent = max(end - sealed, 0)
    rows = sink + recent
    for s in range(slots):
        low = max(start[s], 0)
        rows += max(min(start[s] + min(length[s], span), zone) - low, 0)
    begin, stop = rows * split // splits, rows * (split + 1) // splits
    scaled = np.empty(share * size, np.float32)
    for d in range(share * size):
        scaled[d] = read(query, d) * scale
    acc[:], peak[:], total[:] = 0, -np.inf, 0
    room = min(BATCH, (stop - begin + TILE - 1) // TILE * TILE)
    key_at, value_at = np.empty(room, np.int64), np.empty(room, np.int64)
    weights = np.empty(share * TILE, np.float32)
    more, extra = np.zeros(room, np.float32), np.float32(0)
    queries, sums = (scaled, share, size), (peak, total, acc)
    workspace = np.empty(room_for(share, size) if many else 0, np.uint8)
    asked = products, workspace, share, size, scale
    if many:
        prepare(workspace, query, share, size)
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
        if passed + high - low <= begin:  # it is another part's, as most spans are
            passed += high - low
            continue
        first, last = max(low, low + begin - passed), min(high, low + stop - passed)
        passed += high - low
        scattered = not many or last - first < RUN
        block, row = 0, first
        if first >= block_rows:  # a division takes as long as a row's products
            block, row = first // block_rows, first % block_rows
        for _ in range(first, last):
            if row == block_rows:
                block, row = block + 1, 0
            block_at = np.int64(table[block])
            key_at[filled] = block_at * key_steps[0] + h * key_steps[1] + row * key_steps[2]
            value_at[filled] = block_at * value_steps[0] + h * value_steps[1] + row * value_steps[2]
            if scattered:  # where a row lies is looked up now, amid no sums
                fetch(keys, key_at[filled], 1)
                fetch(values, value_at[filled], 1)
            more[filled] = extra
            row += 1
            filled += 1
            if filled == BATCH:
                if many:
                    add_rows_of_many(asked, (keys, key_at), (values, value_at), (more, bias.shape[0] > 0, BATCH), sums)
                else:
                    add_rows(queries, (keys, key_at), (values, value_at), (more, BATCH), weights, sums)
                filled = 0
        if passed >= stop:
            break
    if many:
        add_rows_of_many(asked, (keys, key_at), (values, value_at), (more, bias.shape[0] > 0, filled), sums)
    else:
        add_rows(queries, (keys, key_at), (values, value_at), (more, filled), weights, sums)


@entry(parallel=True, cache=True, nogil=True)
def attend_lists(query, keys, values, table, spans, zones, splits, products, outs):
    """query: where `[B*Hs,share,D]` lies, its sizes, how many KV heads there are, and the factor of logits of base 2;
    keys, values: where they lie, with the steps of block, head and row; table: `[B,M]`, blocks of each sequence, and
    rows of one; spans: start and length `[B*Hs,S]`, bias likewise or without slots, S, and the longest; zones: sink,
    sealed and end `[B]`, and base; splits: parts of a list; products: see `_part`; outs: where out
    `[B*Hs,share,D]` and lse lie.

    What the parfor below reads stands loose: taking tuples apart in it costs a call 1 to 2 us.
    """
    (asked_kind, asked_at, (lists, share, size), heads, scale), (key_kind, key_at, key_steps) = query, keys
    (value_kind, value_at, value_steps), (blocks, block_rows) = values, table
    (start_at, length_at, bias, slots, span), (sink_at, sealed_at, end_at, base) = spans, zones
    out_at, lse_at = outs
    batch, part, many = blocks.shape[0], share * size, 1 << 48
    queries, out = array_at(asked_kind, asked_at, lists * part), array_at(asked_kind, out_at, lists * part)
    rows, others = array_at(key_kind, key_at, many), array_at(value_kind, value_at, many)
    start, length = array_at(np.int32, start_at, lists * slots), array_at(np.int32, length_at, lists * slots)
    sink, sealed = array_at(np.int32, sink_at, batch), array_at(np.int32, sealed_at, batch)
    end, lse = array_at(np.int32, end_at, batch), array_at(np.float32, lse_at, lists * share)
    acc = np.empty((lists, splits, part), np.float32)
    peak, total = np.empty((lists, splits, share), np.float32), np.empty((lists, splits, share), np.float32)
    chosen = lists // batch
    for unit in prange(lists * splits):
        which, split = unit // splits, unit % splits
        b = which // chosen
        h = which % chosen * heads // chosen
        s, q = which * slots, which * part
        _part(
            queries[q : q + part], size, scale, products, ((rows, key_steps), (others, value_steps)), h,
            (blocks[b], block_rows),
            (start[s : s + slots], length[s : s + slots], bias[which], span), (sink[b], base, sealed[b], end[b]),
            (split, splits, acc[which, split], peak[which, split], total[which, split]),
        )  # fmt: skip
    whole = np.empty((share, size), np.float32)
    for which in range(lists):
        for g in range(share):
            join_parts(acc[which], peak[which], total[which], g, whole, lse[which * share : (which + 1) * share])
            for d in range(size):
                put_float(out, (which * share + g) * size + d, whole[g, d])


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
    _, chosen, slots = selection.start.shape
    lists, span, share = batch * chosen, selection.span, heads * group // chosen
    splits = parts_of(lists, slots * span)
    query, start, length = query.contiguous(), selection.start.contiguous(), selection.length.contiguous()
    sink, sealed, end = bounds.sink.contiguous(), bounds.sealed.contiguous(), bounds.rows.contiguous()
    table = own_blocks(batch) if block_table is None else block_table.contiguous().numpy()
    bias = no_bias(lists) if selection.bias is None else selection.bias.contiguous().numpy().reshape(lists, slots)
    out, lse = torch.empty(query.shape, dtype=query.dtype), torch.empty(batch, heads, group)
    recent = max(map(operator.sub, end.tolist(), sealed.tolist()), default=0)
    rows = slots * span + bounds.base + max(recent, 0)
    with ONE_AT_A_TIME:
        use_threads(2 * rows * lists * share * size)
        attend_lists(
            (*address_of(query), (lists, share, size), heads, np.float32(scale) * LOG2E),
            rows_at(keys),
            rows_at(values),
            (table, max(keys.shape[2], 1)),
            (start.data_ptr(), length.data_ptr(), bias, slots, span),
            (sink.data_ptr(), sealed.data_ptr(), end.data_ptr(), bounds.base),
            splits,
            products_for(share, query.dtype, size),
            (out.data_ptr(), lse.data_ptr()),
        )
    return out, lse


def parts_of(lists: int, rows: int) -> int:
    """Return how many parts a list is cut into; rows: that it has at most, without those that every query reads."""
    return max(1, min(-(-PARTS // max(lists, 1)), rows // PART_ROWS + 1))


@functools.cache
def own_blocks(batch: int) -> Any:
    """Return the block table `[B,1]` of keys that are no paged store: each sequence is one block."""
    return np.arange(batch, dtype=np.int32)[:, None]


@functools.cache
def no_bias(lists: int) -> Any:
    """Return what stands for no bias: an array of the same type, so that one compiled form serves both."""
    return np.empty((lists, 0), np.float32)
