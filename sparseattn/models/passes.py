"""The forward passes of one cache: which is in progress, and the way back from one that was cut short."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import DynamicLayer, DynamicSlidingWindowLayer

_BEGINNING = threading.Lock()  # of the thread that looks whether a cache is in a pass


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass, by what the cache held before it.

    Args:
        held: tokens.
        rows: what each layer said of its rows, for comparing.
        sliding: what layers with a sliding window consisted of, by number: they drop rows when they take new ones, in
            tensors that they replace and never change.
        thread: the one that it runs in.
    """

    held: int
    rows: list[Any]
    sliding: dict[int, dict[str, Any]]
    thread: threading.Thread = field(default_factory=threading.current_thread)

    @property
    def elsewhere(self) -> bool:
        """Whether another thread is in it."""
        return self.thread is not threading.current_thread() and self.thread.is_alive()


class Passes:
    """The passes of one cache, whose layers every method is given.

    Args:
        alike: numbers of the layers that take in every token, if they take any.
    """

    def __init__(self, alike: Collection[int]) -> None:
        self._alike = frozenset(alike)
        self.forget()

    def forget(self) -> None:
        """The layers are whole, and none of them is in a pass."""
        self._running: _Pass | None = None
        self._cut: _Pass | None = None  # until that is mended

    def clone(self) -> Passes:
        """Those of a copy of the cache, which is in no pass."""
        twin = Passes(self._alike)
        twin._cut = self._cut
        return twin

    def begin(self, layers: Sequence[Any]) -> None:
        """A pass begins.

        Raises:
            RuntimeError: another thread runs one, or an earlier one has left the layers unequal.
        """
        with _BEGINNING:
            if self._running is not None and self._running.elsewhere:
                raise RuntimeError(
                    "this SparseCache is in a forward pass of another thread: give each thread a SparseCache of its own"
                )
            self.cut_short(layers)  # where the end of a pass was cut short itself
            if not self.whole(layers):
                raise RuntimeError(self._remedy(layers))
            sliding = {i: dict(vars(x)) for i, x in enumerate(layers) if type(x) is DynamicSlidingWindowLayer}
            self._running = _Pass(max(self._lengths(layers), default=0), [_rows(x) for x in layers], sliding)

    def end(self, layers: Sequence[Any]) -> None:
        """The pass has come to its end.

        Raises:
            RuntimeError: a layer was given rows and has not attended to them.
        """
        for index, layer in enumerate(layers):
            if isinstance(layer, SparseLayer) and layer.left:
                raise RuntimeError(
                    f"layer {index} took its attention past this SparseCache, so what came out is void: while the pass "
                    f"ran the model was given back (restore), or its attention was set"
                )
        self._running = None

    def cut_short(self, layers: Sequence[Any]) -> None:
        """The pass was ended by an error, or by Ctrl-C. Where it has left traces no other one begins."""
        running = self._running
        if running is not None and [_rows(layer) for layer in layers] != running.rows:
            self._cut = running
        self._running = None

    def _lengths(self, layers: Sequence[Any]) -> list[int]:
        """Tokens in each layer that takes in all of them."""
        return [
            layer.get_seq_length()
            for index, layer in enumerate(layers)
            if isinstance(layer, SparseLayer) or (index in self._alike and getattr(layer, "is_initialized", False))
        ]

    def whole(self, layers: Sequence[Any]) -> bool:
        """Whether no pass was cut short, and all layers hold as many tokens."""
        return self._cut is None and len(set(self._lengths(layers))) <= 1

    def _common(self, layers: Sequence[Any]) -> int:
        """Tokens that all layers hold whole."""
        least = min(self._lengths(layers), default=0)
        return least if self._cut is None else min(least, self._cut.held)

    def _remedy(self, layers: Sequence[Any]) -> str:
        lengths, common = self._lengths(layers), self._common(layers)
        shown = ", ".join(map(str, lengths)) if len(lengths) <= 8 else f"{min(lengths)} to {max(lengths)}"
        remedy = f"crop(0) goes back to the {common} that all of them hold whole" if common else "reset() it"
        return (
            f"a forward pass of this SparseCache was cut short, by an error or Ctrl-C, and its layers hold {shown} "
            f"tokens: {remedy}, or make a new SparseCache"
        )

    def left(self, layers: Sequence[Any], tokens_to_remove: int) -> int:
        """Tokens that are left of layers that are not whole once so many are removed, or (positive) so many are kept:
        at most what all of them hold."""
        longest = max(self._lengths(layers), default=0)
        wanted = longest + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        return max(min(wanted, self._common(layers)), 0)

    def take_back(self, layers: Sequence[Any], tokens: int, counts: Tensor) -> None:
        """Takes all layers back to so many tokens, at most what all of them hold; `counts` `[B]` of them are real.

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
    """What changes when a layer takes rows in, or may have changed."""
    if isinstance(layer, SparseLayer):
        return layer.stored
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        parts = vars(layer).values()
        return [part.shape if isinstance(part, Tensor) else part for part in parts if isinstance(part, (int, Tensor))]
    return object() if vars(layer) else None  # a state that is changed in place, of which nothing can be told


def _shorten(layer: Any, tokens: int) -> None:
    """Takes a layer of transformers' own, whose end may be torn, back to its first `tokens`.

    Raises:
        RuntimeError: it does not keep what it held before.
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
