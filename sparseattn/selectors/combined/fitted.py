"""A selector whose estimates were fitted to what full attention weighs, so that a mass holds what it promises. Ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.selection import Weighed
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import LayerContext, Rows, Selector, StepContext
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.parameters.logit_fit import Estimates, EstimatesError, shared
from sparseattn.selectors.saved_state import Loaded, of_parts
from sparseattn.utils.hashing import file_hash


class Fitted(EstimatesMass, Wrapper):
    """Chooses as another selector does, and weighs by its estimates, scaled and shifted for each query head.

    For budgets by mass: bounds such as Quest's promise too much, partial products too much or too little. Which rows
    come first in a page or a vote stays as it is; how many of them are read does not.

    Args:
        inner: a selector that estimates, or its name.
        artefact: a file of `sparseattn train --method mass --selector INNER`, fitted on traces of this model.

    Raises:
        ValueError: an inner selector that does not estimate; a file that is not there or was fitted to another one; in
            `for_layer`, a layer that it lacks; in `check_shape`, one of other heads.
    """

    def __init__(self, inner: Selector | str, artefact: str) -> None:
        super().__init__(inner)
        self.artefact = artefact
        if not self.inner.estimates:
            raise ValueError(f"{self.inner} does not estimate what its rows weigh, so that nothing is fitted to it")
        self._held: Estimates = shared(artefact)
        if self._held.selector != repr(self.inner):
            raise EstimatesError(
                f"{artefact} was fitted to {self._held.selector}, and this is {self.inner!r}: sparseattn train "
                f"--method mass --selector ..."
            )
        self._estimator.fit = self._held.layers.get(self.layer)

    @property
    def _estimator(self) -> EstimatesMass:
        assert isinstance(self.inner, EstimatesMass)  # the constructor refuses others
        return self.inner

    def bind(self, context: LayerContext) -> None:
        super().bind(context)
        self._estimator.fit = self._held.of(context.layer)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        every = heads if self.layer_context.heads is None else self.layer_context.heads.of
        given = tuple(self._held.of(self.layer)[0].shape)
        if given != (every, group or given[1]):
            shape = f"{every}" if group is None else f"{every} with {group}"
            raise EstimatesError(
                f"{self.artefact} is of {given[0]} KV heads with {given[1]} query heads each, layer {self.layer} has "
                f"{shape}"
            )

    def index_arguments(self) -> dict[str, Any]:
        """Return those of the inner selector, whose index it is whatever was fitted to it."""
        return {name: value for name, value in super().index_arguments().items() if name != "artefact"}

    def source(self) -> str:
        return f"{super().source()} {file_hash(self.artefact)[:16]}"

    def append(self, rows: Rows) -> Tensor | None:
        self._held.of(self.layer)  # raises where it lacks the layer
        return self.inner.append(rows)

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        self.inner.check_state(of_parts(state, "inner")["inner"], rows, order)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        return self._estimator.weigh(query, step, budget)

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        if (fit := self._estimator.fit) is not None:
            scale, offset = fit
            self._estimator.fit = scale.to(device), offset.to(device)
