"""Store one more token of every sequence, compiled by numba for the CPU: one call, where torch takes ten."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, KINDS, array_at, read

if TYPE_CHECKING:
    from sparseattn.kernels.token_rows.dispatch import Storage


@njit(fastmath=set(FAST))
def _sum(numbers, many):
    total = np.float32(0)
    for i in range(many):
        total += read(numbers, i)
    return total


@njit
def _copy(source, target, sizes, row):
    """Copy `[B*H,D]` to the row of every `[N,D]` of a target, both flat; sizes: B*H, N, D."""
    heads, rows, size = sizes
    for h in range(heads):
        to = (h * rows + row) * size
        for d in range(size):
            target[to + d] = source[h * size + d]


@entry(cache=True, nogil=True)
def _put(kind, new, stored, sizes, notes, row, position):
    """Store rows; new, stored: where keys and values lie; sizes: B, H, N, D, and N of the positions; notes: where
    positions, rows and newest lie."""
    (key_at, value_at), (keys_at, values_at) = new, stored
    (batch, heads, rows, size, columns), (position_at, row_at, newest_at) = sizes, notes
    many, room = batch * heads * size, batch * heads * rows * size
    key, value = array_at(kind, key_at, many), array_at(kind, value_at, many)
    if not np.isfinite(_sum(key, many)) or not np.isfinite(_sum(value, many)):
        return False
    _copy(key, array_at(kind, keys_at, room), (batch * heads, rows, size), row)
    _copy(value, array_at(kind, values_at, room), (batch * heads, rows, size), row)
    positions = array_at(np.int64, position_at, batch * columns)
    end, newest = array_at(np.int32, row_at, batch), array_at(np.int64, newest_at, batch)
    for b in range(batch):
        positions[b * columns + row], end[b], newest[b] = position, row + 1, position
    return True


def put(keys: Tensor, values: Tensor, storage: Storage, row: int, position: int) -> bool:
    """As `dispatch.put`."""
    keys, values = keys.contiguous(), values.contiguous()
    stored_keys, held_values, positions, rows, newest = storage
    done: bool = _put(
        KINDS[keys.dtype], (keys.data_ptr(), values.data_ptr()), (stored_keys.data_ptr(), held_values.data_ptr()),
        (*stored_keys.shape, positions.shape[1]), (positions.data_ptr(), rows.data_ptr(), newest.data_ptr()),
        row, position,
    )  # fmt: skip
    return done
