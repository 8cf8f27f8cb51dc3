"""What depends on the rows seen, one part a sequence: `State`, and `RowBuffer`, a tensor with spare capacity along one
dimension, so that appending a row copies only that row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class State(ABC):
    """Keeps something for every sequence of a batch. Selectors keep nothing that depends on the rows seen elsewhere, so
    that the base class can reorder, clone, reset and move it.

    Attributes:
        rows: rows taken in, 0 while nothing is held.
    """

    rows: int = 0

    @abstractmethod
    def fresh(self) -> State:
        """An empty one of the same kind."""

    @abstractmethod
    def clone(self) -> State:
        """An independent copy."""

    @abstractmethod
    def take(self, index: Tensor) -> None:
        """Replaces sequence b by what sequence `index[b]` was; `index` `[B']` may repeat and omit."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every row and frees the storage, which the next batch may need in another shape."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Moves what can lie on another device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for the rows taken in."""


class RowBuffer(State):
    """A tensor whose dimension `dim` grows; dimension 0 is the batch.

    `rows` counts the filled part; storage beyond it is unspecified.

    Args:
        dim: the growing dimension, 1 or more, counted from the front.
        capacity: rows to allocate at the first append; 0 lets the size follow the data.
        pinned: page-lock storage in host memory where there is a CUDA device, whose copies are then direct.
    """

    def __init__(self, dim: int, capacity: int = 0, pinned: bool = False) -> None:
        if dim < 1:
            raise ValueError(f"a row buffer grows along dimension 1 or later (0 is the batch), got {dim}")
        self.dim, self.capacity, self.pinned, self.rows = dim, capacity, pinned, 0
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
            grown = self._empty(shape, like)
            if self._data is not None:
                grown.narrow(self.dim, 0, self.rows).copy_(self.data)
            self._data = grown
        self.rows = rows

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        lock = self.pinned and like.device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=lock)

    def append(self, rows: Tensor) -> None:
        """Appends `rows`, which agree with what is stored in every other dimension."""
        first, count = self.rows, rows.shape[self.dim]
        self.resize(first + count, rows)
        self.full.narrow(self.dim, first, count).copy_(rows)

    def take(self, index: Tensor) -> None:
        """Replaces sequence b by the stored sequence `index[b]`."""
        if self._data is not None:
            taken = self._empty([len(index), *self._data.shape[1:]], self._data)
            self._data = torch.index_select(self._data, 0, index.to(self._data.device), out=taken)

    def fresh(self) -> RowBuffer:
        """An empty buffer of the same kind."""
        return RowBuffer(self.dim, self.capacity, self.pinned)

    def clone(self) -> RowBuffer:
        """An independent copy."""
        copy = self.fresh()
        copy.rows = self.rows
        if self._data is not None:
            copy._data = self._empty(self._data.shape, self._data).copy_(self._data)
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
