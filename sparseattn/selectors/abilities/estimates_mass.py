"""Methods that estimate what their rows weigh, so that a budget may be a mass (`core.budget.Mass`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparseattn.core.context import LayerContext, StepContext
from sparseattn.core.selection import Weighed


class EstimatesMass(ABC):
    """A method that says what the rows it chooses weigh, by an estimate of its own.

    Attributes:
        fit: scale and offset `[H,G]` of all of a layer's heads, that make estimates of logits hold what they promise
            (`Fitted`); None: estimates stay as they are.
    """

    fit: tuple[Tensor, Tensor] | None = None
    layer_context: LayerContext

    @abstractmethod
    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        """Choose as `select` does, and estimate what the rows chosen weigh.

        Of the rows named, the heaviest are read until a share of the softmax is held. So logits are those of the step
        (`Selector.temperature`), and an estimate is of a sum, not the bound of a logit.

        Args:
            query, step, budget: as `select` is given; of rows with the same score others may be chosen.
        """

    def fitted(self, logits: Tensor) -> Tensor:
        """Return estimates of logits `[B,H,G,P]`, scaled and shifted where a `fit` says how."""
        if self.fit is None:
            return logits
        scale, offset = (part.to(logits.device) for part in self.fit)
        if self.layer_context.heads is not None:
            scale, offset = (part[list(self.layer_context.heads.which)] for part in (scale, offset))
        return logits * scale[None, :, :, None] + offset[None, :, :, None]
