"""PyramidKV: SnapKV with budgets that fall from the first layer to the last. https://arxiv.org/abs/2406.02069"""

from __future__ import annotations

import math
from typing import Any

from sparseattn.selectors.base import LayerContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.snapkv import SnapKV


class PyramidKV(SnapKV):
    """SnapKV that reads fewer rows the higher its layer: the budget given is that of layer 0, which has the largest.

    Budgets fall evenly to `1 / (2 * beta - 1)` of it in the last layer. Their mean over the layers is `beta / (2 * beta
    - 1)` of it, 0.51 at beta 20: give `2 - 1 / beta` times the mean that is meant. The paper states the mean, and reads
    more than that in low layers, which a budget does not allow. To state the mean, give plain `snapkv` the budgets of
    `pyramid(layers, budget)` by layer, as roles. The shares are of the budget as given, also where it is above the
    context; with None every layer reads all.

    The authors' code holds the same rows in every layer of a prompt shorter than twice the mean. Not here: sequences of
    a batch share one budget. It steps from layer to layer by a whole number of rows, up to 27 rows
    fewer in a layer in our comparison; here each layer is rounded.

    Args:
        layers: layers of the model; None (default): as many as `SparseCache` or the trace says it has. A trace that
            does not say is refused, and a number that differs from what is said, too.
        beta: how steep, 1 for SnapKV; 20 in the paper's code.
        window, kernel, pool: as SnapKV's.
    """

    def __init__(
        self, layers: int | None = None, beta: float = 20.0, window: int = 32, kernel: int = 7, pool: str = "max"
    ) -> None:
        super().__init__(window, kernel, pool)
        check_least(layers=(1 if layers is None else layers, 1))
        if not 1 <= beta < math.inf:
            raise ValueError(f"beta is 1 (every layer alike) or more, got {beta}")
        self.layers, self.beta = layers, beta

    @classmethod
    def paper(cls, answer: int = 4096, layers: int | None = None) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`, as `SnapKV.paper()`; the budget is layer 0's."""
        made = cls(layers)
        return {"selector": made, "sink": 0, "window": made.window, "seal": answer}

    def bind(self, context: LayerContext) -> None:
        if self.layers is not None and context.layer >= self.layers:
            raise ValueError(
                f"{self} is for layers 0 to {self.layers - 1}, and this is layer {context.layer}: layers is how many "
                f"the model has"
            )
        super().bind(context)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        super().check_shape(heads, group, size)
        depth = self.layer_context.depth
        if self.layers is not None and depth not in (None, self.layers):
            raise ValueError(f"{self} is for a model of {self.layers} layers, and this one has {depth}")
        self._last()

    def _last(self) -> int:
        """Return the model's last layer."""
        layers = self.layer_context.depth if self.layers is None else self.layers
        if layers is None and self.layer:
            raise ValueError(
                f"{self} shares a budget among the layers of a model, and how many it has is not known here: give "
                f"layers, as in pyramidkv:layers=32"
            )
        return (layers or 1) - 1

    def allowed(self, budget: int) -> int:
        """Return rows of its layer where layer 0 has `budget`."""
        least = budget / (2 * self.beta - 1)
        return max(round(budget - (budget - least) * self.layer / max(self._last(), 1)), 1)
