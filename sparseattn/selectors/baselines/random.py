"""Uniform sampling without replacement: the control that a method must beat.

The control of Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.base import Rows, Selector, StepContext, best


class Random(Selector):
    """Reads rows drawn at random for every query, one draw per KV head.

    The draw is a hash of (seed, layer, head, position of the query, position of the row): it does not depend on the
    batch, on padding or on how the rows were appended.

    Args:
        seed: any integer.
    """

    operators = 70

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.at = RowBuffer(1, spare=-1)  # [B,N] int64 positions of the rows

    def fix(self, rows: int, seal: int) -> None:
        self.at.fix(rows)

    def append(self, rows: Rows) -> None:
        self.at.append(rows.positions)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        at = self.at.visible
        random = streams(self.seed, self.layer, self.head_numbers(query.shape[1]), at.device)
        uniform = (draws(random, step.positions, at) >> 11).double()  # [B,H,N]
        return Selection.tokens(best(uniform.masked_fill((at < 0)[:, None], -torch.inf), budget))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads = query.shape[:2]
        rows = min(budget, sealed)
        sort = Launch("sort", entries=sorted_best(batch * heads, sealed, rows))
        draw = Launch("product", bytes=8 * batch * sealed, entries=batch * heads * sealed)
        return Scan(0, 0, (draw, sort, Launch("operator", count=self.operators)), heads, rows, rows)
