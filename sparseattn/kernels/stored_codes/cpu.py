"""Codes of sequences' rows from a shared store, compiled by numba for the CPU: copies of a few cache lines each."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import array_at


@entry(cache=True, nogil=True)
def _gather(store_at, steps, table, shape, out_at):
    """store_at: where it lies, its steps of entry and head, and its numbers; shape: heads, M and rows of an entry."""
    (entry_step, head_step, total), (heads, count, unit) = steps, shape
    store = array_at(np.uint8, store_at, total)
    batch, entries = table.shape
    rows = entries * unit
    out = array_at(np.uint8, out_at, batch * heads * count * rows)
    for b in range(batch):
        for h in range(heads):
            for e in range(entries):
                if table[b, e] < 0:
                    continue
                at = np.int64(table[b, e]) * entry_step + h * head_step
                to = (b * heads + h) * count * rows + e * unit
                for m in range(count):
                    for i in range(unit):
                        out[to + m * rows + i] = store[at + m * unit + i]


def gather(store: Tensor, table: Tensor) -> Tensor:
    """As `dispatch.gather`."""
    entries, heads, count, unit = store.shape
    if store.stride()[2:] != (unit, 1):
        raise ValueError(
            f"a head's bytes of an entry are adjacent, got strides {store.stride()} of {list(store.shape)}"
        )
    batch, listed = table.shape
    out = torch.empty(batch, heads, count, listed * unit, dtype=torch.uint8)
    if out.numel():
        last = (entries - 1) * store.stride(0) + (heads - 1) * store.stride(1) + count * unit
        _gather(
            store.data_ptr(), (store.stride(0), store.stride(1), last), table.numpy(), (heads, count, unit),
            out.data_ptr(),
        )  # fmt: skip
    return out
