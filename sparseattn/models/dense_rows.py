"""Rows of layers that are not sparse, each token's written behind the last: transformers copies all of them at each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.rows_in_place import RowsInPlace
from sparseattn.models.transformers_classes import DynamicLayer, DynamicSlidingWindowLayer

LEAST, SHARE = 64, 8  # room for new rows, at least, and what part of the rows that are there: their window's all


class _Held:
    """The rows of one layer.

    Args:
        keys, values: `[B,H,n,D]`, which are there.
        window: of the layer, in tokens; 0: all of them.
    """

    def __init__(self, keys: Tensor, values: Tensor, window: int) -> None:
        (batch, heads, count, size), self.dtype = keys.shape, keys.dtype
        room = max(LEAST, window or count // SHARE)
        self.rows, self.window, self.most = RowsInPlace(keys, values, room), window, window or count + room
        self.token = torch.Size((batch, heads, 1, size))
        self.kept: tuple[Any, Any] = (None, None)  # keys and values that the layer keeps, views
        self.read: tuple[Any, Any] = (None, None)  # what the newest token reads, views

    def of(self, layer: Any) -> bool:
        """Whether the layer's rows are these, and there is room for one more."""
        return bool(self.rows.room) and self.kept[0] is layer.keys and self.kept[1] is layer.values

    def append(self, keys: Tensor, values: Tensor, before: int, past: bool) -> None:
        """Store a token's rows behind the `before` that the layer kept; past: whether it keeps those before its
        window."""
        self.rows.append(keys, values)
        many = read = kept = before + 1
        if self.window:
            read = min(many, self.window)
            kept = many if past else min(many, self.window - 1)
        self.read = self.rows.newest(read)
        self.kept = self.read if kept == read else self.rows.newest(kept)


class DenseRows:
    """The rows of one cache's layers of transformers, by number.

    A layer keeps views of what is stored here, and is as transformers' own `update` would leave it. Where its tensors
    are no longer these views, as after a crop, its rows are stored anew; so nothing that somebody else holds changes.
    """

    def __init__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Keep no storage."""
        self._held: dict[int, _Held] = {}
        self._mask: tuple[Any, bool] = (None, False)  # the last that was looked at, and whether it hides nothing

    def put(self, index: int, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Do what the layer's `update` does with a token's `[B,H,1,D]` and return what it does, or None where that is
        left to it: of other layers, passes of several tokens, first rows, gradients, rows on a GPU."""
        held, shape = self._held.get(index), keys.shape
        if shape[2] != 1 or keys.requires_grad or values.requires_grad or shape != values.shape:
            return None
        if (held is None or not held.of(layer)) and (held := self._taken_in(index, layer, keys)) is None:
            return None
        if shape != held.token or keys.dtype != held.dtype:
            return None
        held.append(keys, values, layer.keys.shape[2], getattr(layer, "record_past", False))
        layer.keys, layer.values = held.kept
        if held.window:
            layer.cumulative_length += 1
        return held.read

    def _taken_in(self, index: int, layer: Any, keys: Tensor) -> _Held | None:
        """Store a layer's rows here, to be followed by a token's `keys`; None where they are left to the layer."""
        self._held.pop(index, None)
        kind, stored = type(layer), layer.keys
        window = layer.sliding_window if kind is DynamicSlidingWindowLayer else 0
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer) or window == 1 or torch.compiler.is_compiling():
            return None
        if keys.device.type != "cpu" or stored is None or stored.ndim != 4 or not stored.numel():
            return None
        if stored.requires_grad or layer.values.requires_grad or stored.shape != layer.values.shape:
            return None
        held = self._held[index] = _Held(stored, layer.values, window)
        return held

    def attend(self, index: int, query: Tensor, read: tuple[Tensor, Tensor], scale: float) -> Tensor | None:
        """Return the attention `[B,H,G,D]` of a token over keys and values that `put` has returned; None where these
        are others, or no compiled code is for them."""
        held = self._held.get(index)
        if held is None or held.read[0] is not read[0] or held.read[1] is not read[1]:
            return None
        return held.rows.attend(query, read[0].shape[2], held.most, scale)

    def hides_nothing(self, mask: Any) -> bool:
        """Return whether a pass's mask, bool or what is added to logits, lets a token see every row. The layers of a
        pass are given the same one."""
        if mask is None:
            return True
        if mask is not self._mask[0]:
            whole = mask.all() if mask.dtype == torch.bool else not mask.any()
            self._mask = mask, bool(whole)
        return self._mask[1]
