"""StreamingLLM: attention sinks and a recent window, nothing else. https://arxiv.org/abs/2309.17453"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.abilities import SharesScores
from sparseattn.selectors.base import Rows, Selector, StepContext


class Window(SharesScores, Selector):
    """Reads nothing beyond the cache's sink and window, whatever the budget.

    Rows keep their original positions; the paper's re-indexing of positions inside the cache is not done, because the
    keys of the cache carry RoPE already.
    """

    uses_budget = False
    group, page = "max", 1

    def fix(self, rows: int, seal: int) -> None:
        return None

    def append(self, rows: Rows) -> None:
        return None

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return Selection.none(query.shape[0], query.shape[1], query.device)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return query.new_full((*query.shape[:2], 1, step.valid.shape[1]), -torch.inf, dtype=torch.float32)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        return Scan(0, 0, (), query.shape[1])
