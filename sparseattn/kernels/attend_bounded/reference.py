"""One after the other in torch, which is the specification."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen, Selection
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.page_bounds.bounds import VotedBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores
from sparseattn.kernels.topk.dispatch import best_pages


def bounded_step(
    query: Tensor, voted: VotedBounds, count: int, page: int, keys: Tensor, values: Tensor, bounds: Bounds, scale: float
) -> Callable[[Tensor, int], tuple[Tensor, Chosen] | None]:
    """As `dispatch.bounded_step`."""

    def step(query: Tensor, recent: int) -> tuple[Tensor, Chosen] | None:
        if not math.isfinite(query.sum()):
            return None
        scores = page_scores(query, voted.bounds, voted.group, "torch", voted.temperature)
        selection = Selection(*best_pages(scores, count, page, "torch"), page, whole=True)
        return attend(query, keys, values, selection, bounds, scale=scale, impl="gather")[0], Chosen.of(selection)

    return step
