"""Uniform sampling without replacement: the control that a method must beat.

The control of Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.kernels.drawn_places.dispatch import PLACES, places_drawn, tries
from sparseattn.kernels.implementations import choose
from sparseattn.kernels.random_draws import streams
from sparseattn.selectors.base import Rows, Selector, StepContext


class Random(Selector):
    """Reads rows drawn at random for every query, one draw per KV head.

    A permutation keyed by (seed, layer, head, position of the query) says which rows, so that the cost follows from the
    budget and not from the context. The draw does not depend on the batch, on padding or on how rows were appended.

    Args:
        seed: any integer.
    """

    operators = 120  # in torch
    operators_compiled = 20  # where numba draws

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.order = RowBuffer(1, spare=0)  # [B,N] int64: of rows that are no padding, then of the others
        self.count = RowBuffer(1, spare=0)  # [B,1] int64: how many are no padding

    def fix(self, rows: int, seal: int) -> None:
        self.order.fix(rows)
        self.count.fix(1)

    def append(self, rows: Rows) -> None:
        if not self.count.rows:
            self.count.append(torch.zeros_like(rows.positions[:, :1]))
        first, new = self.order.rows, rows.positions.shape[1]
        order, count = self.order.resize(first + new, like=rows.positions), self.count.data
        order[:, first : first + new] = 0
        padding, places = (rows.positions < 0).sort(dim=1, stable=True)
        order.scatter_(1, count + torch.arange(new, device=order.device), places + first)
        count += (~padding).sum(1, keepdim=True)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        order = self.order.visible
        heads = streams(self.seed, self.layer, self.head_numbers(query.shape[1]), order.device)
        drawn = places_drawn(heads, step.positions, self.count.visible[:, 0], min(budget, order.shape[1]))  # [B,H,K]
        rows = order.gather(1, drawn.clamp(min=0).flatten(1)).view(drawn.shape)
        return Selection.tokens(torch.where(drawn < 0, -1, rows))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads = query.shape[:2]
        rows = min(budget, sealed)
        draw = Launch("product", bytes=8 * batch * heads * rows, entries=batch * heads * tries(rows))
        compiled = choose(None, query.device, torch.float32, PLACES.names) == "numba"
        count = self.operators_compiled if compiled else self.operators
        return Scan(0, 0, (draw, Launch("operator", count=count)), heads, rows, rows)
