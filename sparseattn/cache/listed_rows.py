"""Rows of a layer whose model chooses among them itself: stored as they come, and attended to where they are listed."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import ATTEND, attend
from sparseattn.kernels.attend_latents import attend_latents

Self = TypeVar("Self", bound="Listed")


class Listed(ABC):
    """What one layer stores, padding included, so that a row's number is its token's column."""

    @abstractmethod
    def buffers(self) -> dict[str, RowBuffer]:
        """Return what holds the rows, by attribute."""

    @abstractmethod
    def check_impl(self, impl: str | None, device: torch.device, dtype: torch.dtype) -> None:
        """Refuse, by ValueError or RuntimeError, an implementation that cannot attend to such rows."""

    @property
    def rows(self) -> int:
        """Rows of each sequence."""
        return next(iter(self.buffers().values())).rows

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of one sequence, all heads; 0 before the first row."""
        first = (buffer.data[0] for buffer in self.buffers().values() if buffer.rows)
        return sum(data.nbytes for data in first) // max(self.rows, 1)

    def shorten(self, rows: int) -> None:
        """Keep the first `rows`."""
        for buffer in self.buffers().values():
            if rows < buffer.rows:
                buffer.resize(rows)

    def take(self, index: Tensor) -> None:
        """Let sequence b become what sequence `index[b]` was."""
        for buffer in self.buffers().values():
            buffer.take(index)

    def reset(self) -> None:
        """Forget every row."""
        for buffer in self.buffers().values():
            buffer.reset()

    def clone(self: Self) -> Self:
        """Return an independent copy."""
        twin = copy.copy(self)
        for name, buffer in self.buffers().items():
            setattr(twin, name, buffer.clone())
        return twin


class ListedRows(Listed):
    """Keys and values of H heads.

    Args:
        capacity: rows to allocate at once; 0 grows by half when full.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.keys, self.values = RowBuffer(2, capacity), RowBuffer(2, capacity)

    def buffers(self) -> dict[str, RowBuffer]:
        return {"keys": self.keys, "values": self.values}

    def check_impl(self, impl: str | None, device: torch.device, dtype: torch.dtype) -> None:
        ATTEND.pick(impl, device, dtype)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store `[B,H,n,D]` each, and return all rows, views `[B,H,N,D]`."""
        self.keys.append(keys)
        self.values.append(values)
        return self.keys.data, self.values.data

    def attend(self, query: Tensor, selection: Selection, scale: float, impl: str | None) -> Tensor:
        """Return `[B,H,G,D]` for a query `[B,H,G,D]` over the rows of a selection, and no others."""
        return attend(query, self.keys.data, self.values.data, selection, scale=scale, impl=impl)[0]


class ListedLatents(Listed):
    """Latents that all heads of a layer share, see `attend_latents`.

    Args:
        capacity: rows to allocate at once; 0 grows by half when full.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.latents = RowBuffer(1, capacity)

    def buffers(self) -> dict[str, RowBuffer]:
        return {"latents": self.latents}

    def check_impl(self, impl: str | None, device: torch.device, dtype: torch.dtype) -> None:
        if impl is not None:
            raise ValueError(
                f"latents that all heads share are attended to by torch alone: leave impl out, got {impl!r}"
            )

    def append(self, latents: Tensor) -> Tensor:
        """Store `[B,n,D]`, and return all rows, a view `[B,N,D]`."""
        self.latents.append(latents)
        return self.latents.data

    def attend(self, query: Tensor, rows: Tensor, value_size: int, scale: float, sinks: Tensor | None) -> Tensor:
        """Return `[B,G,value_size]` for a query `[B,G,D]` over the listed `rows` `[B,S]`."""
        return attend_latents(query, self.latents.data, rows, value_size, scale, sinks)
