"""Stores the token of a step in one compiled call, where rows lie as most do; `StoredRows.store` is for all."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.cache.rows import CUT_SHORT, StoredRows
from sparseattn.kernels.token_rows.dispatch import Storage, TokenWriter, token_writer


class TokenStore:
    """Stores one more token of every sequence.

    Args:
        stored: the rows of the cache.
    """

    def __init__(self, stored: StoredRows) -> None:
        self.stored = stored
        self._shape = torch.Size(())  # of a token's keys, where tokens can go
        self.let_go()

    def __getstate__(self) -> StoredRows:
        """Leave out what was looked up: a copy looks up where its own rows lie."""
        return self.stored

    def __setstate__(self, stored: StoredRows) -> None:
        self.__init__(stored)  # type: ignore[misc]

    def put(self, keys: Tensor, values: Tensor) -> bool:
        """Store `[B,H,1,D]` on a CPU.

        Returns:
            Whether it did: where the sequences end at one row and at one position, there is room, and the rows are
            finite tensors such as are stored. `StoredRows.store` takes all others, behind the checks of `input_checks`.
        """
        stored, room = self.stored, self._room
        if room is None or not self._holds(room):
            room = self._look()
        if room is None or self._write is None or stored.broken or not (type(keys) is type(values) is Tensor):
            return False
        like, shape = room.keys, keys.shape
        if shape != self._shape or shape != values.shape or not keys.dtype == values.dtype == like.dtype:
            return False
        if keys.requires_grad or values.requires_grad or not keys.device == values.device == like.device:
            return False
        if (at := stored.zones.next_row()) is None:
            return False
        row, position = at
        if row >= min(like.shape[2], room.positions.shape[1]):
            return False
        stored.broken = CUT_SHORT
        if done := self._write(keys, values, row, position):
            stored.note_token(row, position)
        stored.broken = ""
        return done

    def let_go(self) -> None:
        """Keep no storage alive that is about to be replaced."""
        self._room: Storage | None = None  # where tokens go, and
        self._write: TokenWriter | None = None  # what writes them there

    def _holds(self, room: Storage) -> bool:
        """Whether the rows lie there still: storage is replaced where it grows, and with other sequences."""
        stored = self.stored
        return (
            room.keys is stored.keys.storage
            and room.values is stored.values.storage
            and room.positions is stored.positions.storage
            and room.rows is stored.bounds.rows
            and room.newest is stored.newest
        )

    def _look(self) -> Storage | None:
        """Look where tokens go, and keep that in mind."""
        self.let_go()
        room = self._room = self._room_there()
        if room is not None:
            self._write = token_writer(room)
            self._shape = torch.Size((*room.keys.shape[:2], 1, room.keys.shape[3]))
        return room

    def _room_there(self) -> Storage | None:
        """Where tokens go; None where they cannot so: on a GPU, in storage of a fixed size, before the first row."""
        stored = self.stored
        keys, values, positions = stored.keys.storage, stored.values.storage, stored.positions.storage
        if (
            stored.fixed
            or keys is None
            or values is None
            or positions is None
            or keys.is_cuda
            or not stored.zones.count
        ):
            return None
        if not (keys.is_contiguous() and values.is_contiguous() and stored.bounds.rows.device == keys.device):
            return None
        if keys.shape != values.shape or len(stored.bounds.rows) != len(keys):
            return None
        return Storage(keys, values, positions, stored.bounds.rows, stored.newest)
