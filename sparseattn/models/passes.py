"""The forward passes of one cache: which one is in progress, and the way back from one that was cut short."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import DynamicLayer, DynamicSlidingWindowLayer

_BEGINNING = threading.Lock()  # held by the thread that looks whether a cache is in a pass


@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass, by what the cache held before it.

    Args:
        tokens: how many it held.
        rows: what the layers of transformers said of their rows, by number, for comparing.
        sliding: the attributes of layers with a sliding window, by number. They drop rows when they take new ones, in
            tensors that they replace and never change.
        thread: the one that it runs in.
    """

    tokens: int
    rows: dict[int, Any]
    sliding: dict[int, dict[str, Any]]
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def elsewhere(self) -> bool:
        """Whether another thread is in it."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()

    def changed(self, index: int, layer: Any) -> bool:
        """Whether the pass has left rows in a layer, whole or not."""
        if isinstance(layer, SparseLayer):
            return layer.unattended is not None or layer.columns != self.tokens
        return bool(_rows(layer) != self.rows[index])


class Passes:
    """The passes of one cache. Every method takes the cache's layers.

    Args:
        alike: numbers of the layers that take in every token, if they take any.
    """

    def __init__(self, alike: Collection[int]) -> None:
        self._alike = frozenset(alike)
        self.forget()

    def forget(self) -> None:
        """Note that the layers are whole and that no pass is in progress."""
        self._running: _Pass | None = None
        self._cut: _Pass | None = None  # a pass that was cut short and is not mended yet

    def clone(self) -> Passes:
        """Return those of a copy of the cache, which is in no pass."""
        twin = Passes(self._alike)
        twin._cut = self._cut
        return twin

    def begin(self, layers: Sequence[Any]) -> None:
        """Note that a pass begins.

        Raises:
            RuntimeError: another thread runs one, or an earlier one has left the layers unequal.
        """
        with _BEGINNING:
            if self._running is not None:
                if self._running.elsewhere:
                    raise RuntimeError(
                        "this SparseCache is in a forward pass of another thread: give each thread a SparseCache of "
                        "its own"
                    )
                self.cut_short(layers)  # the end of that pass was cut short itself
            lengths = self._lengths(layers)
            if self._cut is not None or len(set(lengths)) > 1:
                raise RuntimeError(self._remedy(layers))
            rows, sliding = {}, {}
            for index, layer in enumerate(layers):
                if not isinstance(layer, SparseLayer):
                    rows[index] = _rows(layer)
                    if type(layer) is DynamicSlidingWindowLayer:
                        sliding[index] = dict(vars(layer))
            self._running = _Pass(lengths[0] if lengths else 0, rows, sliding)

    def end(self, layers: Sequence[Any]) -> None:
        """Note that the pass has come to its end.

        Raises:
            RuntimeError: a layer was given rows and has not attended to them.
        """
        for index, layer in enumerate(layers):
            if isinstance(layer, SparseLayer) and layer.unattended is not None:
                raise RuntimeError(
                    f"layer {index} took its attention past this SparseCache, so what came out is void: while the pass "
                    f"ran the model was given back (restore), or its attention was set"
                )
        self._running = None

    def cut_short(self, layers: Sequence[Any]) -> None:
        """Note that the pass was ended by an error or by Ctrl-C. If it has left rows, no other pass begins."""
        running = self._running
        if running is not None and any(running.changed(index, layer) for index, layer in enumerate(layers)):
            self._cut = running
        self._running = None

    def _lengths(self, layers: Sequence[Any]) -> list[int]:
        """Return the number of tokens in each layer that takes in all of them."""
        lengths = []
        for index, layer in enumerate(layers):
            if isinstance(layer, SparseLayer):
                lengths.append(layer.columns)
            elif index in self._alike and getattr(layer, "is_initialized", False):
                lengths.append(layer.get_seq_length())
        return lengths

    def whole(self, layers: Sequence[Any]) -> bool:
        """Whether no pass was cut short, and all layers hold as many tokens."""
        return self._cut is None and len(set(self._lengths(layers))) <= 1

    def _common(self, layers: Sequence[Any]) -> int:
        """Return how many tokens all layers hold whole."""
        least = min(self._lengths(layers), default=0)
        return least if self._cut is None else min(least, self._cut.tokens)

    def _remedy(self, layers: Sequence[Any]) -> str:
        lengths, common = self._lengths(layers), self._common(layers)
        shown = ", ".join(map(str, lengths)) if len(lengths) <= 8 else f"{min(lengths)} to {max(lengths)}"
        remedy = f"crop(0) goes back to the {common} that all of them hold whole" if common else "reset() it"
        return (
            f"a forward pass of this SparseCache was cut short, by an error or Ctrl-C, and its layers hold {shown} "
            f"tokens: {remedy}, or make a new SparseCache"
        )

    def tokens_after_crop(self, layers: Sequence[Any], tokens_to_remove: int) -> int:
        """Return how many tokens layers that are not whole keep: at most those that all of them hold.

        Args:
            layers: of the cache.
            tokens_to_remove: as `SparseCache.crop` takes it.
        """
        longest = max(self._lengths(layers), default=0)
        tokens = longest + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        return max(min(tokens, self._common(layers)), 0)

    def take_back(self, layers: Sequence[Any], tokens: int, counts: Tensor) -> None:
        """Take all layers back to `tokens`, which all of them hold and which are `counts` `[B]` rows of each sequence.

        Raises:
            ValueError, RuntimeError: a layer cannot go back.
        """
        sliding = {} if self._cut is None else self._cut.sliding
        for index, layer in enumerate(layers):
            try:
                if isinstance(layer, SparseLayer):
                    layer.take_back(tokens, counts)
                else:
                    vars(layer).update(sliding.get(index, {}))
                    _shorten(layer, tokens)
            except (ValueError, RuntimeError) as error:
                kind = ValueError if isinstance(error, ValueError) else RuntimeError
                raise kind(
                    f"layer {index} cannot go back to {tokens} tokens, so make a new SparseCache or reset() this one: "
                    f"{error}"
                ) from error
        self.forget()


def _rows(layer: Any) -> Any:
    """Return what changes when a layer of transformers takes rows in."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        parts = vars(layer).values()
        return [part.shape if isinstance(part, Tensor) else part for part in parts if isinstance(part, (int, Tensor))]
    return object() if vars(layer) else None  # a state that is changed in place: nothing equals it


def _shorten(layer: Any, tokens: int) -> None:
    """Take a layer of transformers, whose last rows may be torn, back to its first `tokens`.

    Raises:
        RuntimeError: the layer does not keep what it held before.
    """
    if not vars(layer):
        return
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
        raise RuntimeError("it changes a state in place and keeps no earlier one")
    if not layer.is_initialized:
        return
    if type(layer) is DynamicSlidingWindowLayer:
        if more := layer.get_seq_length() - tokens:
            layer.crop(-more)
    else:
        layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


def sparse_tokens(sparse_from: int | None, stored: int, new: int, logits: int) -> int:
    """Return how many of the last of `new` tokens behind `stored` are decoded sparsely.

    Args:
        sparse_from: position from which all are; None: a token that comes alone, and drafts.
        logits: how many of the last tokens the model returns logits of; 0: all.
    """
    if sparse_from is not None:
        return min(max(stored + new - sparse_from, 0), new)
    if stored and new == max(logits, 1):  # one token, or the last one and its drafts
        return new
    return max(logits - 1, 0) if logits < new else 0
