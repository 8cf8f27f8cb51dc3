"""Store one more token of every sequence, compiled by numba for the CPU: one call, where torch takes ten."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import KINDS, all_finite, array_at

if TYPE_CHECKING:
    from sparseattn.kernels.token_rows.dispatch import Storage


@njit
def _copy(source, target, sizes, row):
    """Copy `[B*H,D]` to the row of every `[N,D]` of a target, both flat; sizes: B*H, N, D."""
    heads, rows, size = sizes
    for h in range(heads):
        to = (h * rows + row) * size
        for d in range(size):
            target[to + d] = source[h * size + d]


@entry(cache=True, nogil=True)
def _put(kind, numbers, key_at, value_at, row, position):
    """Store rows; numbers: see `_Writer`; key_at, value_at: where the rows lie."""
    batch, heads, rows, size, columns, keys_at, values_at, position_at, row_at, newest_at = numbers[:10]
    many, room = batch * heads * size, batch * heads * rows * size
    key, value = array_at(kind, key_at, many), array_at(kind, value_at, many)
    if not (all_finite(key, many) and all_finite(value, many)):
        return False
    _copy(key, array_at(kind, keys_at, room), (batch * heads, rows, size), row)
    _copy(value, array_at(kind, values_at, room), (batch * heads, rows, size), row)
    positions = array_at(np.int64, position_at, batch * columns)
    end, newest = array_at(np.int32, row_at, batch), array_at(np.int64, newest_at, batch)
    for b in range(batch):
        positions[b * columns + row], end[b], newest[b] = position, row + 1, position
    return True


class _Writer:
    """Where tokens go, in numbers, as numba looks at every argument of a call and at every number of a tuple."""

    def __init__(self, storage: Storage) -> None:
        keys, values, positions, rows, newest = self.held = storage  # addresses hold nothing
        self.kind = KINDS[keys.dtype]
        addresses = [tensor.data_ptr() for tensor in (keys, values, positions, rows, newest)]
        self.numbers = np.array([*keys.shape, positions.shape[1], *addresses], np.int64)

    def __call__(self, keys: Tensor, values: Tensor, row: int, position: int) -> bool:
        keys, values = keys.contiguous(), values.contiguous()
        done: bool = _put(self.kind, self.numbers, keys.data_ptr(), values.data_ptr(), row, position)
        return done


def token_writer(storage: Storage) -> _Writer:
    """As `dispatch.token_writer`."""
    return _Writer(storage)
