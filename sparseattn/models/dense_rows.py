"""Rows of layers that are not sparse, each token's written behind the last: transformers copies all of them at each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.rows_in_place import RowsInPlace
from sparseattn.models.transformers_classes import DynamicLayer, DynamicSlidingWindowLayer

LEAST, SHARE = 64, 8  # room for new rows: so many, or one for so many that are there; for a window its length


class _Held:
    """The rows of one layer.

    Args:
        keys, values: `[B,H,n,D]`, which are there.
        window: of the layer, in tokens; 0: all of them.
    """

    def __init__(self, keys: Tensor, values: Tensor, window: int) -> None:
        room = max(LEAST, window or keys.shape[2] // SHARE)
        self.rows, self.window, self.most = RowsInPlace(keys, values, room), window, window or keys.shape[2] + room
        self.token = torch.Size((*keys.shape[:2], 1, keys.shape[3]))  # of a token's keys, and of its values
        self.kept: tuple[Any, Any] = (keys, values)  # what the layer keeps: these, then views of what is stored
        self.read: tuple[Any, Any] = (None, None)  # what the newest token reads, views

    def of(self, layer: Any) -> bool:
        """Whether the layer's rows are these, and there is room for one more."""
        return bool(self.rows.room) and self.kept[0] is layer.keys and self.kept[1] is layer.values

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether a token's rows are such as are stored."""
        alike = keys.shape == values.shape == self.token and keys.dtype == values.dtype == self.kept[0].dtype
        return alike and keys.is_cpu and values.is_cpu

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

    Attributes:
        mask: the last that was looked at, of the pass in progress; None: none was.
    """

    mask: Any

    def __init__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Keep no storage."""
        self._held: dict[int, _Held] = {}
        self.mask, self._whole = None, True

    def put(self, index: int, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Give a layer a token's `[B,H,1,D]`, as its `update` would, and return all that the token reads. None, and
        nothing has changed: `update` is to do it. That is so of layers of other classes, of several tokens, of a
        layer's first rows, of rows on a GPU, and where gradients may be asked for."""
        held = self._held.pop(index, None)  # until the layer is whole: a pass may be cut short here
        if keys.shape[2] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if held is None or not (held.of(layer) and held.takes(keys, values)):
            if not _fits(layer, keys, values):
                return None
            held = _Held(layer.keys, layer.values, layer.sliding_window if layer.is_sliding else 0)
        held.append(keys, values, layer.keys.shape[2], getattr(layer, "record_past", False))
        if held.window:
            layer.cumulative_length += 1
        layer.keys, layer.values = held.kept
        self._held[index] = held
        return held.read

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
        if mask is not self.mask:
            whole = mask.all() if mask.dtype == torch.bool else not mask.any()
            self.mask, self._whole = mask, bool(whole)
        return self._whole


def _fits(layer: Any, keys: Tensor, values: Tensor) -> bool:
    """Whether a layer of transformers keeps rows in host memory to which a token's belong."""
    kind = type(layer)
    if not (kind is DynamicLayer or (kind is DynamicSlidingWindowLayer and layer.sliding_window > 1)):
        return False
    stored, others = layer.keys, layer.values
    if keys.device.type != "cpu" or stored is None or stored.ndim != 4 or not stored.numel():
        return False
    if not (stored.dtype == others.dtype == keys.dtype == values.dtype and stored.shape == others.shape):
        return False
    (batch, heads, _, size), token = stored.shape, keys.shape
    return token == values.shape and (batch, heads, size) == (token[0], token[1], token[3])
