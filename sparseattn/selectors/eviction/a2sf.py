"""A2SF: H2O's sums of attention weights, which every further query multiplies by a forgetting factor.

https://arxiv.org/abs/2407.20485
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.selectors.eviction.attention_received import QueryBlock, weights
from sparseattn.selectors.eviction.summed_base import Summed


class A2SF(Summed):
    """Holds the rows with the largest sums of attention weights, in which old weights count less, and the newest rows.

    A weight that a query gave t queries ago counts `forget^t` of itself, so that rows have no advantage of having been
    seen by many queries. With `forget=1` it is H2O.

    Args:
        forget: the forgetting factor, above 0 and up to 1; 0.99 in the authors' runs of Llama 2.
        recent: share of the budget for the newest rows, 0 to 1; half in these runs.

    One choice per KV head, by the sum over its query group, as in the authors' code. What a row gets in the cache's
    window is not seen, see `H2O`: compare with `A2SF.paper()`, at equal total rows. The authors' later code
    (Dirac-Notation/A2SF) chooses once, at the end of the prompt, with 16 newest rows, and holds every row of the
    answer; here every step's weights count, as in the paper's formula.

    Raises:
        ValueError: a factor or share out of its range.
    """

    def __init__(self, forget: float = 0.99, recent: float = 0.5) -> None:
        super().__init__(recent)
        if not 0 < forget <= 1:
            raise ValueError(f"forget is a factor above 0 and up to 1, which is H2O, got {forget}")
        self.forget = forget

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: half of the budget by sums, half newest rows, no sink;
        the token of the step is on top of the budget."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": 1}

    def gives(self, logits: Tensor, block: QueryBlock) -> Tensor:
        ago = (block.newest - block.asked)[:, None].double()
        return weights(logits, block) * (self.forget**ago).float()

    def of_step(self, got: Tensor, own: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        self.worth.visible.mul_(self.forget)
        self.waiting.data.mul_(self.forget)
        return got, own
