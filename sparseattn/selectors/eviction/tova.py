"""TOVA: the row to which the current query gives the least attention is dropped. https://arxiv.org/abs/2401.06104"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.abilities import ComparesHeads, WeighsUnsealed
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_query_heads
from sparseattn.selectors.eviction.attention_received import received
from sparseattn.selectors.eviction.base import Observing, every_row, last_of


class TOVA(ComparesHeads, WeighsUnsealed, Observing):
    """Holds the rows with the largest weight of the newest query, in the mean over all heads of the layer.

    The prompt's last query chooses among the prompt's rows; each step's query, among those that are left. All heads
    hold the same rows. A row whose weight is not known yet is held until it is: it has left the cache's window since
    the last step. With `TOVA.paper()` there is none: compare with that (`--sink 0 --window 1 --seal 1`), at equal total
    rows. Of rows that are appended together after the first seal, such as a second turn's, the newest query is the next
    step's.

    A token's weight on itself is computed from its own logit, as in the authors' code: what the rows read leave of 1
    would be lost in rounding where attention is peaked. So every step first weighs the rows that are not sealed, which
    reads their keys once more: one row in the paper's setting. Nothing but the newest weights is kept. As in the paper,
    no row is safe, the first and the newest ones neither; a cache with sink and window keeps these on top of the
    budget.

    Where a fused kernel attends, the weights of a step are computed after it, from the keys of the rows selected, which
    are read twice. `scan_bytes` does not count that.
    """

    last_queries = 1

    def __init__(self) -> None:
        super().__init__()
        self.near = RowBuffer(1)  # [B,1,H,G] float32, the log-sum-exp of the step's rows that are not sealed

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        self.near.fix()

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink; the token of the step is on top of the
        budget."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": 1}

    def of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        sealed, rest = received(*last_of(rows, 1), every_row(rows), self.layer_context.scale)
        assert rows.unsealed_positions is not None
        assert rows.last_queries is not None
        self.near.append(torch.full_like(rows.last_queries[:, None, :, :, 0, 0], -torch.inf, dtype=torch.float32))
        return sealed.mean(1, keepdim=True), rest.mean(1, keepdim=True), rows.unsealed_positions

    def unknown(self, positions: Tensor) -> Tensor:
        return 1e6 + positions  # above every weight

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        check_query_heads(query, self.near.data.shape[3])
        assert step.unsealed_lse is not None
        self.near.data[:, 0] = step.unsealed_lse
        return super().select(query, step, budget)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count the key of the step's own row, which is all that is not sealed in the paper's setting."""
        scan = super().scan(query, sealed, budget)
        own = query.shape[3] * self.bytes_of(query)
        return replace(scan, scanned=scan.scanned + 1, read=scan.read + own)

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        got = weights[..., 0].unflatten(1, (self.kv, -1)).float()  # [B,H,G,S]
        self.waiting_at.data[:, :-1] = -1  # what earlier queries gave counts no more
        # Summed over the group, as the prompt's: G times the mean over all heads ranks alike.
        self.waiting.data[:, :, -1] = (self.near.data[:, 0] - total).exp().sum(2).mean(1, keepdim=True)
        worth = self.worth.visible
        got = got.sum(2).mean(1, keepdim=True)  # [B,1,S]
        now = torch.zeros_like(worth).scatter_add_(2, selection.start[:, :1].long(), got)
        worth.copy_(torch.where(worth > -torch.inf, now, -torch.inf))
