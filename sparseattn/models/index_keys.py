"""Sparse layers of models that have an index of their own: they keep that index's keys, as transformers' layers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.models.sparse_layer import SparseLayer


class KeepsIndex(SparseLayer):
    """A sparse layer that the model's own indexer finds its keys in.

    Args:
        parts, impl: as of a `SparseLayer`.
        capacity: keys of the index to allocate at once.
    """

    def __init__(self, parts: Sequence[SparseHeads], impl: str | None = None, capacity: int = 0) -> None:
        super().__init__(parts, impl)
        self._capacity = capacity
        self._index: RowBuffer | None = None
        self._positions: Tensor | None = None

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Store keys `[B,n,D]` of the index and return all of them: DeepSeek-V3.2 and its kin, and QSA."""
        return self._grown(keys, 1)

    def update_index(self, keys: Tensor) -> Tensor:
        """Store keys `[B,1,n,D]` of the index and return all of them: MiniMax-M3."""
        return self._grown(keys, 2)

    def _grown(self, keys: Tensor, dim: int) -> Tensor:
        if self._index is None:
            self._index = RowBuffer(dim, self._capacity)
        self._shorten_index()  # a pass that was cut short has left some
        self._index.append(keys)
        return self._index.data

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """`[3,B,N]` positions of the tokens taken in, which QSA keeps in its first layer; None without any."""
        return None if self._positions is None or not self.columns else self._positions[..., : self.columns]

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self._positions = positions

    def _shorten_index(self) -> None:
        """Keep what is of the tokens taken in."""
        if self._index is not None and self._index.rows > self.columns:
            self._index.resize(self.columns)

    def _buffers(self) -> dict[str, RowBuffer]:
        """Return what holds a row of each token beside the parts, by name."""
        return {} if self._index is None else {"index": self._index}

    def kept(self) -> dict[str, Tensor]:
        """Return what it holds of the tokens taken in, beside the rows of its parts, for a file."""
        buffers = self._buffers().items()
        tensors = {name: buffer.data.narrow(buffer.dim, 0, self.columns) for name, buffer in buffers}
        return tensors if self.indexer_position_ids is None else {**tensors, "positions": self.indexer_position_ids}

    def keep(self, tensors: Mapping[str, Tensor], columns: int, device: torch.device) -> None:
        """Take up what `kept` gave of so many tokens, in an empty layer.

        Raises:
            KeyError, ValueError: other tensors than it holds.
        """
        left = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._positions = left.pop("positions", None)
        if (keys := left.get("index")) is not None:
            self._index = RowBuffer(keys.ndim - 2, self._capacity)  # [B,N,D] or [B,1,N,D]
        for name, buffer in self._buffers().items():
            buffer.append(left.pop(name))
            if buffer.rows != columns:
                raise ValueError(f"{name} of a layer has {buffer.rows} rows, and {columns} tokens were taken in")
        if left:
            raise ValueError(f"a layer keeps no {', '.join(left)} here")
        self.columns = columns

    def crop_rows(self, tokens: int, drop: Tensor) -> None:
        super().crop_rows(tokens, drop)
        self._shorten_index()

    def take_back(self, tokens: int, counts: Tensor) -> None:
        super().take_back(tokens, counts)
        self._shorten_index()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.columns:
            super().reorder_cache(beam_idx)
            if self._index is not None:
                self._index.take(beam_idx.long())
            if self._positions is not None:
                self._positions = self._positions.index_select(1, beam_idx.to(self._positions.device))

    def reset(self) -> None:
        super().reset()
        self._index = self._positions = None

    def append_from(self, other: SparseLayer) -> None:
        super().append_from(other)
        if isinstance(other, KeepsIndex):
            self._copy_index(other)

    def clone(self) -> KeepsIndex:
        twin = super().clone()
        assert isinstance(twin, KeepsIndex)
        twin._copy_index(self)
        return twin

    def _copy_index(self, other: KeepsIndex) -> None:
        self._index = None if other._index is None else other._index.clone()
        self._positions = other._positions  # replaced, never changed in place
