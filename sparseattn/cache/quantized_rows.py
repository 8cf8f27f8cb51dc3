"""Sealed rows of a cache in a few bits (`kernels.attend_quantized.reference`): what a cache keeps in place of them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.kernels.attend_quantized.reference import PARTS, CodedRows, encode


class SealedCodes(State):
    """Codes and levels of the sealed rows of B sequences and H heads, in stored order.

    Args:
        bits: 8 or 4.
        group: rows of keys that share levels.
        capacity: rows to allocate at once.
    """

    def __init__(self, bits: int, group: int, capacity: int = 0) -> None:
        self.bits, self.group, self.capacity, self.rows = bits, group, capacity, 0
        self._parts = {name: RowBuffer(2, capacity // (group if name == "key_levels" else 1)) for name in PARTS}

    @property
    def held(self) -> CodedRows:
        """All of them, a view. RuntimeError before the first."""
        return CodedRows(**{name: part.data for name, part in self._parts.items()}, bits=self.bits, group=self.group)

    def store(self, keys: Tensor, values: Tensor, first: int) -> None:
        """Rounds rows `[B,H,n,D]` and keeps them from row `first` on, in place of those that are there.

        Raises:
            ValueError: groups that would be cut, before anything is stored.
        """
        if first % self.group or first > self.rows:
            raise ValueError(
                f"rows that move begin at a group of {self.group} rows: an order begins at row {first} of {self.rows}"
            )
        made = encode(keys, values, self.bits, self.group)
        for name, buffer in self._parts.items():
            if buffer.rows:
                buffer.resize(first // (self.group if name == "key_levels" else 1))
            buffer.append(getattr(made, name))
        self.rows = first + keys.shape[2]

    def last(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[B,H,count,D]` of the last rows, read back."""
        held, first = self.held, self.rows - count
        keys, values, of_values = (part[:, :, first:] for part in (held.keys, held.values, held.value_levels))
        of_keys = held.key_levels[:, :, first // self.group :]
        return CodedRows(keys, of_keys, values, of_values, self.bits, self.group).decoded(dtype)

    def fresh(self) -> SealedCodes:
        return SealedCodes(self.bits, self.group, self.capacity)

    def clone(self) -> SealedCodes:
        twin = self.fresh()
        twin.rows = self.rows
        twin._parts = {name: buffer.clone() for name, buffer in self._parts.items()}
        return twin

    def take(self, index: Tensor) -> None:
        for buffer in self._parts.values():
            buffer.take(index)

    def reset(self) -> None:
        self.rows = 0
        for buffer in self._parts.values():
            buffer.reset()

    def to(self, device: torch.device | str) -> None:
        for buffer in self._parts.values():
            buffer.to(device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._parts.values())
