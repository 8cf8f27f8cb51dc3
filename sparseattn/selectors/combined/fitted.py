"""A selector whose estimates were fitted to what full attention weighs, so that a mass holds what it promises. Ours."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.core.selection import Weighed
from sparseattn.selectors.base import Rows, Selector
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.parameters.logit_fit import Estimates, EstimatesError, shared
from sparseattn.selectors.saved_state import Loaded, of_parts
from sparseattn.utils.hashing import file_hash

Self = TypeVar("Self", bound="Fitted")


class Fitted(Wrapper):
    """Chooses as another selector does, and weighs by its estimates, scaled and shifted for each query head.

    For budgets by mass: bounds such as Quest's promise too much, partial products too much or too little. Which rows
    come first in a page or a vote stays as it is; how many of them are read does not.

    Args:
        inner: a selector that estimates, or its name.
        artefact: a file of `sparseattn calibrate --method mass --selector INNER`, fitted on traces of this model.

    Raises:
        ValueError: an inner selector that does not estimate; a file that is not there or was fitted to another one; in
            `for_layer`, a layer that it lacks; in `check_shape`, one of other heads.
    """

    estimates = True

    def __init__(self, inner: Selector | str, artefact: str) -> None:
        super().__init__(inner)
        self.artefact = artefact
        if not self.inner.estimates:
            raise ValueError(f"{self.inner!r} does not estimate what its rows weigh, so that nothing is fitted to it")
        self._held: Estimates = shared(artefact)
        if self._held.selector != repr(self.inner):
            raise EstimatesError(
                f"{artefact} was fitted to {self._held.selector}, and this is {self.inner!r}: sparseattn calibrate "
                f"--method mass --selector ..."
            )
        self.inner.fit = self._held.layers.get(self.layer)

    def for_layer(self: Self, layer: int, rope: Rope | None = None) -> Self:
        fresh = super().for_layer(layer, rope)
        fresh.inner.fit = fresh._held.of(layer)
        return fresh

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        every = heads if self.heads is None else self.heads.of
        given = tuple(self._held.of(self.layer)[0].shape)
        if given != (every, group or given[1]):
            found = f"{every}" if group is None else f"{every} with {group}"
            raise EstimatesError(
                f"{self.artefact} is of {given[0]} KV heads with {given[1]} query heads each, layer {self.layer} has "
                f"{found}"
            )

    def label(self, *, knob: bool = True) -> str:
        """With the artefact's file name alone."""
        return f"{type(self).__name__}(inner={self.inner.label()}, artefact={Path(self.artefact).name!r})"

    def source(self) -> str:
        return f"{super().source()} {file_hash(self.artefact)[:16]}"

    def append(self, rows: Rows) -> Tensor | None:
        self._held.of(self.layer)  # raises where it lacks the layer
        return self.inner.append(rows)

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        self.inner.check_state(of_parts(state, "inner")["inner"], rows, order)

    def weigh(self, query: Tensor, positions: Tensor, budget: int) -> Weighed:
        return self.inner.weigh(query, positions, budget)

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        if self.inner.fit is not None:
            scale, offset = self.inner.fit
            self.inner.fit = scale.to(device), offset.to(device)
