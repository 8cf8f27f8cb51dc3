"""StreamingLLM's window, longer by the budget; without a limit, every row. https://arxiv.org/abs/2309.17453"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.selectors.abilities import SharesScores
from sparseattn.selectors.base import Rows, Selector, StepContext, best
from sparseattn.selectors.checks import check_least


class Recent(SharesScores, Selector):
    """Reads the newest sealed rows up to the budget, in whole pages, the same for every head.

    It reads nothing to choose: StreamingLLM at as many rows as other methods read. At an unlimited budget it is
    full attention, by the road of all other methods: what a head is that stays dense in a layer where others do not
    (`roles`).

    Args:
        page: rows of a slot, a power of two; the cache seals whole pages, and a budget is cut to them.
    """

    group = "max"

    def __init__(self, page: int = 16) -> None:
        check_least(page=(page, 1))
        if page & (page - 1):
            raise ValueError(f"page is a power of two (8, 16, ...), got {page}")
        self.page = self.span = page

    def fix(self, rows: int, seal: int) -> None:
        return None

    def append(self, rows: Rows) -> None:
        return None

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        valid = step.valid[:, :: self.page]  # padding comes in whole pages
        age = torch.arange(valid.shape[1], dtype=torch.float32, device=valid.device).expand_as(valid)
        pages = best(age.masked_fill(~valid, -torch.inf)[:, None], budget // self.page)  # [B,1,S]
        return Selection.pages(pages.expand(-1, query.shape[1], -1), self.page)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        assert step.deal is not None
        valid, numbers = (part[:, :: self.page] for part in (step.valid, step.deal.numbers(step.valid)))
        age = (numbers // self.page).float().masked_fill(~valid, -torch.inf)
        return age[:, None, None].expand(-1, query.shape[1], -1, -1)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        pages = min(budget, sealed) // self.page
        sort = Launch("sort", entries=sorted_best(len(query), sealed // self.page, pages))
        launches = sort, Launch("operator", count=self.operators)
        return Scan(0, 0, launches, query.shape[1], pages * self.page, pages)
