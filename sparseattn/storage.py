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

    def resize(self, rows: int, like: Tensor) -> None:
        """Makes it hold `rows` rows, growing the storage if needed; rows that are new are unspecified.

        `like` gives the other sizes, dtype and device where there is no storage.
        """
        held = 0 if self._data is None else self._data.shape[self.dim]
        if self._data is None or rows > held:
            # Growth by half keeps the copies below three per row; the spare 64 serve the first decode steps.
            shape = list(like.shape)
            shape[self.dim] = max(self.capacity, held + held // 2, rows + 64)
            grown = torch.empty(shape, dtype=like.dtype, device=like.device)
            if self._data is not None:
                grown.narrow(self.dim, 0, self.rows).copy_(self.data)
            self._data = grown
        self.rows = rows

    def append(self, rows: Tensor) -> None:
        """Appends `rows`, which agree with what is stored in every other dimension."""
        first, count = self.rows, rows.shape[self.dim]
        self.resize(first + count, rows)
        self.full.narrow(self.dim, first, count).copy_(rows)

    def take(self, index: Tensor) -> None:
        """Replaces sequence b by the stored sequence `index[b]`."""
        if self._data is not None:
            self._data = self._data.index_select(0, index.to(self._data.device))

    def fresh(self) -> RowBuffer:
        """An empty buffer of the same kind."""
        return RowBuffer(self.dim, self.capacity)

    def clone(self) -> RowBuffer:
        """An independent copy."""
        copy = self.fresh()
        copy.rows = self.rows
        copy._data = None if self._data is None else self._data.clone()
        return copy

    def reset(self) -> None:
        """Forgets every row and frees the storage, which the next batch may need in another shape."""
        self.rows, self._data = 0, None

    def to(self, device: torch.device | str) -> None:
        """Moves the storage."""
        if self._data is not None:
            self._data = self._data.to(device)

    @property
    def nbytes(self) -> int:
        """Bytes of the filled rows."""
        return 0 if self._data is None else self.data.numel() * self._data.element_size()
