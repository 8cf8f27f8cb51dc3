"""Rows that grow: a tensor with spare capacity along one dimension, so that appending a row copies only that row."""

from __future__ import annotations

import torch
from torch import Tensor


class RowBuffer:
    """A tensor whose dimension `dim` grows; dimension 0 is the batch.

    Selectors keep their state in row buffers and nothing else that depends on the rows seen, so that the base class can
    reorder, clone, reset and move it. `rows` counts the filled part; storage beyond it is unspecified.

    Args:
        dim: the growing dimension, 1 or more, counted from the front.
        capacity: rows to allocate at the first append; 0 lets the size follow the data.
    """

    def __init__(self, dim: int, capacity: int = 0) -> None:
        if dim < 1:
            raise ValueError(f"a row buffer grows along dimension 1 or later (0 is the batch), got {dim}")
        self.dim, self.capacity, self.rows = dim, capacity, 0
        self._data: Tensor | None = None

    @property
    def full(self) -> Tensor:
        """The whole storage, capacity included. Raises RuntimeError before the first row."""
        if self._data is None:
            raise RuntimeError("this row buffer holds nothing yet: append rows first")
        return self._data

    @property
    def data(self) -> Tensor:
        """The filled rows, a view."""
        return self.full.narrow(self.dim, 0, self.rows)

    def reserve(self, rows: int, like: Tensor) -> None:
        """Makes room for `rows` rows in all; `like` gives the other sizes, dtype and device of new storage."""
        if self.rows == 0 and self._data is not None and not self._holds(like):
            self._data = None  # reset, then used for another batch or dtype
        held = 0 if self._data is None else self._data.shape[self.dim]
        if self._data is not None and rows <= held:
            return
        # Growth by half keeps the copies below three per row; the spare 64 serve the first decode steps.
        shape = list(like.shape)
        shape[self.dim] = max(self.capacity, held + held // 2, rows + 64)
        grown = torch.empty(shape, dtype=like.dtype, device=like.device)
        if self._data is not None:
            grown.narrow(self.dim, 0, self.rows).copy_(self.data)
        self._data = grown

    def _holds(self, like: Tensor) -> bool:
        data = self.full
        sizes = [size for dim, size in enumerate(data.shape) if dim != self.dim]
        return sizes == [size for dim, size in enumerate(like.shape) if dim != self.dim] and (
            data.dtype,
            data.device,
        ) == (like.dtype, like.device)

    def append(self, rows: Tensor) -> None:
        """Appends `rows`, which agree with what is stored in every other dimension."""
        count = rows.shape[self.dim]
        self.reserve(self.rows + count, rows)
        self.full.narrow(self.dim, self.rows, count).copy_(rows)
        self.rows += count

    def take(self, index: Tensor) -> None:
        """Replaces sequence b by the stored sequence `index[b]`."""
        if self._data is not None:
            self._data = self._data.index_select(0, index.to(self._data.device))

    def clone(self) -> RowBuffer:
        """An independent copy."""
        copy = RowBuffer(self.dim, self.capacity)
        copy.rows = self.rows
        copy._data = None if self._data is None else self._data.clone()
        return copy

    def reset(self) -> None:
        """Forgets every row and keeps the storage."""
        self.rows = 0

    def to(self, device: torch.device | str) -> None:
        """Moves the storage."""
        if self._data is not None:
            self._data = self._data.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the filled rows."""
        return 0 if self._data is None else self.data.numel() * self._data.element_size()
