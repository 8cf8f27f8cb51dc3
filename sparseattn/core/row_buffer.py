"""What depends on the rows seen, one part a sequence: `State`, and `RowBuffer`, a tensor with spare capacity along one
dimension, so that appending a row copies only that row."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparseattn.utils.huge_pages import on_huge_pages
from sparseattn.utils.inference_mode import keeps_tensors

EMPTY = "this row buffer holds nothing yet: append rows first"


class State(ABC):
    """Keeps something for every sequence of a batch. Selectors keep nothing that depends on the rows seen elsewhere, so
    that the base class can reorder, clone, reset and move it.

    Attributes:
        rows: rows taken in, 0 while nothing is held.
        room: rows of storage of a fixed size (0: as many as come first); None where storage grows.
    """

    rows: int = 0
    room: int | None = None

    @abstractmethod
    def fresh(self) -> State:
        """Return an empty one of the same kind."""

    @abstractmethod
    def clone(self) -> State:
        """Return an independent copy."""

    @abstractmethod
    def take(self, index: Tensor) -> None:
        """Replace sequence b by what sequence `index[b]` was; `index` `[B']` may repeat and omit."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets every row and frees the storage, which the next batch may need in another shape."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move what can lie on another device."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for the rows taken in."""

    def saved(self) -> dict[str, Tensor]:
        """Return what it holds, as tensors by name, for a file; none where it holds nothing.

        Raises:
            ValueError: it is held in something else than tensors.
        """
        raise ValueError(f"a {type(self).__name__} is not kept in tensors, so it is not written to files")

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Make an empty one hold what `saved` gave, on `device`. ValueError for other names or shapes."""
        raise ValueError(f"a {type(self).__name__} is not read from files")


class RowBuffer(State):
    """A tensor whose dimension `dim` grows; dimension 0 is the batch.

    `rows` counts the filled part; storage beyond it is unspecified, or `spare` once the buffer is fixed (`fix`).

    Args:
        dim: the growing dimension, 1 or more, counted from the front.
        capacity: rows to allocate at the first append; 0 lets the size follow the data.
        pinned: page-lock storage in host memory where there is a CUDA device, whose copies are then direct.
        spare: what rows of a fixed buffer hold that are not filled; None: unspecified.

    Attributes:
        storage: the whole tensor, capacity included; None before the first row.
    """

    def __init__(self, dim: int, capacity: int = 0, pinned: bool = False, spare: float | None = None) -> None:
        if dim < 1:
            raise ValueError(f"a row buffer grows along dimension 1 or later (0 is the batch), got {dim}")
        self.dim, self.capacity, self.pinned, self.spare, self.rows = dim, capacity, pinned, spare, 0
        self.storage: Tensor | None = None
        self._view: Tensor | None = None  # of the filled rows, as `visible` last showed it

    def fix(self, capacity: int = 0) -> None:
        """Allocates `capacity` rows at the first append (0: as many as that brings) and never again, so that addresses
        stay as a CUDA graph has recorded them: through `take` and `reset` too.

        Raises:
            RuntimeError: rows are stored already.
        """
        if self.storage is not None:
            raise RuntimeError("storage is fixed before the first row is appended")
        self.room = capacity

    @property
    def allocated(self) -> bool:
        """Whether there is storage: with the first row, and in a fixed buffer after a `reset`."""
        return self.storage is not None

    @property
    def full(self) -> Tensor:
        """The whole storage. Raises RuntimeError before the first row."""
        if self.storage is None:
            raise RuntimeError(EMPTY)
        return self.storage

    @property
    def data(self) -> Tensor:
        """The filled rows, a view."""
        return self.full.narrow(self.dim, 0, self.rows)

    @property
    def visible(self) -> Tensor:
        """What a decode step reads, a view: the filled rows, or all of a fixed buffer's, whose shape stays.

        The same tensor until rows are added or taken away, so that who keeps what it made of it can tell.
        """
        storage, view = self.storage, self._view
        if storage is None:
            raise RuntimeError(EMPTY)
        if self.room is not None:
            return storage
        if view is None or view.shape[self.dim] != self.rows:
            view = self._view = storage.narrow(self.dim, 0, self.rows)
        return view

    def resize(self, rows: int, like: Tensor | None = None) -> Tensor:
        """Make it hold `rows` rows, growing the storage if needed; rows that are new are unspecified.

        `like` gives the other sizes, dtype and device where there is no storage; None where there is.

        Returns:
            The storage.

        Raises:
            ValueError: more rows than a fixed buffer has.
            RuntimeError: no storage, and nothing that it is to be like.
        """
        storage = self.storage
        like = storage if like is None else like
        if like is None:
            raise RuntimeError(EMPTY)
        if self.room is not None:
            storage = self._fill_to(rows, self.room or rows, like)
        elif storage is None or rows > storage.shape[self.dim]:
            # Growth by half keeps the copies below three per row; the spare 64 serve the first decode steps.
            capacity = 0 if storage is None else storage.shape[self.dim]
            shape, enough = list(like.shape), storage is None and self.capacity >= rows
            shape[self.dim] = self.capacity if enough else max(capacity + capacity // 2, rows + 64)
            grown = self._empty(shape, like)
            if storage is not None:
                grown.narrow(self.dim, 0, self.rows).copy_(self.data)
            self.storage = storage = grown
            self._view = None
        self.rows = rows
        return storage

    def _fill_to(self, rows: int, room: int, like: Tensor) -> Tensor:
        if self.storage is None:
            shape = list(like.shape)
            shape[self.dim] = room
            self.storage = self._empty(shape, like)
            self._clear(0)
        elif rows < self.rows:
            self._clear(rows)
        if rows > self.storage.shape[self.dim]:
            raise ValueError(f"storage is fixed at {self.storage.shape[self.dim]} rows, and {rows} are to be stored")
        return self.storage

    def _clear(self, first: int) -> None:
        """Make the rows from `first` on spare ones."""
        if self.storage is not None and self.spare is not None:
            self.storage.narrow(self.dim, first, self.storage.shape[self.dim] - first).fill_(self.spare)

    @keeps_tensors
    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        lock = self.pinned and like.device.type == "cpu" and torch.cuda.is_available()
        return on_huge_pages(torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=lock))

    def append(self, rows: Tensor) -> None:
        """Append `rows`, which agree with what is stored in every other dimension."""
        first, count = self.rows, rows.shape[self.dim]
        self.resize(first + count, rows).narrow(self.dim, first, count).copy_(rows)

    def take(self, index: Tensor) -> None:
        """Replace sequence b by the stored sequence `index[b]`; ValueError where a fixed batch would change."""
        if self.storage is None:
            return
        if self.room is not None:
            if len(index) != len(self.storage):
                raise ValueError(f"storage is fixed at {len(self.storage)} sequences, got an index of {len(index)}")
            self.storage.copy_(self.storage.index_select(0, index.to(self.storage.device)))
        else:
            taken = self._empty([len(index), *self.storage.shape[1:]], self.storage)
            self.storage = torch.index_select(self.storage, 0, index.to(self.storage.device), out=taken)
            self._view = None

    def keep(self, ids: Tensor, first: int = 0, last: int | None = None) -> None:
        """Of the rows `first` to `last` (None: to the end) only `ids` stay, in their order; rows before and behind
        stay all. What is left moves together, and the rest of the storage, the capacity asked for included, is freed.

        Args:
            ids: integers counted from `first`, `[B,...,K]` with the sizes before `dim`: of `[B,H,N,D]` `[B,H,K]`.

        Raises:
            RuntimeError: the storage is fixed.
        """
        if self.room is not None:
            raise RuntimeError("storage that is fixed cannot be freed")
        stored, dim, last = self.full, self.dim, self.rows if last is None else last
        rows = first + ids.shape[-1] + self.rows - last
        made = self._empty(
            [*stored.shape[:dim], rows + 64, *stored.shape[dim + 1 :]], stored
        )  # spare as of a first append
        made.narrow(dim, 0, first).copy_(stored.narrow(dim, 0, first))
        made.narrow(dim, rows - (self.rows - last), self.rows - last).copy_(stored.narrow(dim, last, self.rows - last))
        taken = ids.to(stored.device) + first
        for place in itertools.product(*map(range, stored.shape[:dim])):  # a head at a time: no second copy of all
            made[place][first : first + ids.shape[-1]] = stored[place][taken[place]]
        self.storage, self.rows, self._view = made, rows, None

    def fresh(self) -> RowBuffer:
        """Return an empty buffer of the same kind, not fixed."""
        return RowBuffer(self.dim, self.capacity, self.pinned, self.spare)

    def clone(self) -> RowBuffer:
        """Return an independent copy."""
        copy = self.fresh()
        copy.rows, copy.room = self.rows, self.room
        if self.storage is not None:
            copy.storage = self._empty(self.storage.shape, self.storage).copy_(self.storage)
        return copy

    def reset(self) -> None:
        """Forgets every row and frees the storage, which the next batch may need in another shape; not a fixed one."""
        self.rows, self._view = 0, None
        if self.room is None:
            self.storage = None
        else:
            self._clear(0)

    def to(self, device: torch.device | str) -> None:
        """Move the storage."""
        if self.storage is not None:
            self.storage, self._view = self.storage.to(device), None

    def saved(self) -> dict[str, Tensor]:
        """Return the filled rows, a view."""
        return {} if self.storage is None else {"rows": self.data}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        """Append the rows that `saved` gave."""
        if set(tensors) != {"rows"} or tensors["rows"].ndim <= self.dim:
            raise ValueError(f"a row buffer holds rows of {self.dim + 1} dimensions or more, got {_shapes(tensors)}")
        self.append(tensors["rows"].to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of the filled rows."""
        return 0 if self.storage is None else self.data.numel() * self.storage.element_size()


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "nothing"
