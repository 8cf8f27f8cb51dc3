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
from sparseattn.selectors.base import Rows, Selector, best


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

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads = query.shape[:2]
        rows = min(budget, sealed)
        sort = Launch("sort", entries=sorted_best(batch * heads, sealed, rows))
        draw = Launch("product", bytes=8 * batch * sealed, entries=batch * heads * sealed)
        return Scan(0, (draw, sort, Launch("operator", count=self.operators)), heads, rows, rows)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads = query.shape[:2]
        if self.at.rows == 0:
            return Selection.none(batch, heads, query.device)
        at = self.at.visible
        draw = draws(streams(self.seed, self.layer, self.numbers(heads), at.device), positions, at)  # [B,H,N]
        uniform = (draw >> 11).double().masked_fill((at < 0)[:, None], -torch.inf)
        scanned = torch.zeros(batch, heads, dtype=torch.int64, device=at.device)
        return Selection.tokens(best(uniform, budget), scanned, scanned)
