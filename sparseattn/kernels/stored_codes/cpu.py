"""Codes of sequences' rows from a shared store, compiled by numba for the CPU: copies of a few cache lines each."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import array_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

WORD = 8  # bytes that are copied at once
MANY = 1 << 19  # bytes of which threads share the copying


@njit
def _copy(which, store_at, steps, table, shape, out_at):
    """Copy the codes of one KV head of a sequence; see `_gather`."""
    (entry_step, head_step, total), (heads, count, unit) = steps, shape
    entries = table.shape[1]
    rows = entries * unit
    store = array_at(np.uint64, store_at, total)
    out = array_at(np.uint64, out_at + which * count * rows * WORD, count * rows)
    b, first = which // heads, which % heads * head_step
    for e in range(entries):
        if table[b, e] < 0:
            continue
        at, to = np.int64(table[b, e]) * entry_step + first, e * unit
        for m in range(count):
            for i in range(unit):
                out[to + m * rows + i] = store[at + m * unit + i]


@entry(cache=True, nogil=True)
def _gather(store_at, steps, table, shape, out_at):
    """store_at: where it lies, its steps of entry and head, and its numbers; shape: heads, M and rows of an entry. All
    are counted in words."""
    for which in range(table.shape[0] * shape[0]):
        _copy(which, store_at, steps, table, shape, out_at)


@entry(parallel=True, cache=True, nogil=True)
def _gather_by_threads(store_at, steps, table, shape, out_at):
    for which in prange(table.shape[0] * shape[0]):
        _copy(which, store_at, steps, table, shape, out_at)


def gather(store: Tensor, table: Tensor) -> Tensor:
    """As `dispatch.gather`."""
    entries, heads, count, unit = store.shape
    if store.stride()[2:] != (unit, 1):
        raise ValueError(
            f"a head's bytes of an entry are adjacent, got strides {store.stride()} of {list(store.shape)}"
        )
    steps = store.stride(0), store.stride(1), store.storage_offset()
    if unit % WORD or any(step % WORD for step in steps):
        raise ValueError(
            f"rows of an entry, strides and offset are multiples of {WORD}, got {unit} rows, strides {store.stride()} "
            f"and offset {store.storage_offset()}"
        )
    batch, listed = table.shape
    out = torch.empty(batch, heads, count, listed * unit, dtype=torch.uint8)
    if out.numel():
        last = (entries - 1) * steps[0] + (heads - 1) * steps[1] + count * unit
        words = tuple(number // WORD for number in (*steps[:2], last))
        given = store.data_ptr(), words, table.numpy(), (heads, count, unit // WORD), out.data_ptr()
        if out.numel() < MANY:  # nor is numba told of threads, which takes as long
            _gather(*given)
            return out
        with ONE_AT_A_TIME:
            use_threads()
            _gather_by_threads(*given)
    return out


@entry(cache=True, nogil=True)
def _gather_missed(store_at, steps, table, shape, out_at):
    """store_at, steps: as of `_gather`; shape: heads, records of an entry, a record's bytes in words and rows of an
    entry."""
    (entry_step, head_step, total), (heads, count, width, unit) = steps, shape
    batch, entries = table.shape
    store = array_at(np.uint64, store_at, total)
    out = array_at(np.uint64, out_at, batch * heads * entries * count * width)
    ids = array_at(np.int32, out_at, 2 * batch * heads * entries * count * width)
    to = 0
    for b in range(batch):
        for h in range(heads):
            for e in range(entries):
                at = np.int64(max(table[b, e], 0)) * entry_step + h * head_step
                for i in range(count * width):
                    out[to + i] = store[at + i]
                for i in range(count):
                    place = 2 * (to + i * width)
                    ids[place] = ids[place] + e * unit if table[b, e] >= 0 else -1
                to += count * width


def gather_missed(store: Tensor, table: Tensor, width: int, unit: int) -> Tensor:
    """As `dispatch.gather_missed`."""
    entries, heads, size = store.shape
    steps = store.stride(0), store.stride(1), store.storage_offset()
    if store.stride(2) != 1 or width % WORD or any(step % WORD for step in steps):
        raise ValueError(
            f"a head's bytes of an entry are adjacent, and strides, offset and width multiples of {WORD}, got strides "
            f"{store.stride()}, offset {store.storage_offset()} and width {width}"
        )
    batch, listed = table.shape
    out = torch.empty(batch, heads, listed * size // width, width, dtype=torch.uint8)
    if out.numel():
        last = (entries - 1) * steps[0] + (heads - 1) * steps[1] + size
        words = tuple(number // WORD for number in (*steps[:2], last))
        shape = heads, size // width, width // WORD, unit
        _gather_missed(store.data_ptr(), words, table.numpy(), shape, out.data_ptr())
    return out
