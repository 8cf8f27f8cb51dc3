"""Evicting methods that add up what every query gives to a row, and hold the newest rows besides.

H2O (https://arxiv.org/abs/2306.14048) is the first of them. What a query gives is all that the others change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.selectors.base import Rows
from sparseattn.selectors.eviction.attention_received import QueryBlock, received, weights
from sparseattn.selectors.eviction.base import Observing, every_row, left
from sparseattn.selectors.newest import newest


class Summed(Observing):
    """Holds the rows with the largest sums of what queries gave them, and a share of the budget's newest rows.

    Args:
        recent: share of the budget for the newest rows, 0 to 1.

    A KV head chooses once, by the sum over its query group. Sums begin with every query of the prompt. What a row gets
    from a step's query while it lies in the cache's window is not counted, but for the step's own token where that is
    all that is not sealed.
    """

    def __init__(self, recent: float) -> None:
        super().__init__()
        if not 0 <= recent <= 1:
            raise ValueError(f"recent is the share of the budget for the newest rows, 0 to 1, got {recent}")
        self.recent = recent
        self.queries_share, self.last_queries = 1.0, 1  # so every query: those of rows not sealed come with it

    def gives(self, logits: Tensor, block: QueryBlock) -> Tensor:
        """Return what queries of the prompt give to rows, of their logits `[G,m,n]`; by default their weights."""
        return weights(logits, block)

    def of_step(self, got: Tensor, own: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
        """Return what a step's query gives to the rows read and to its own token, of the weights `[B,H,G,S]` that they
        got and of what these leave `[B,H,G]`; by default just that. Sums so far may be changed here."""
        return got, own

    def of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor] | None:
        assert rows.unsealed_positions is not None
        queries, at = prompt_queries(rows)
        sealed, rest = received(queries, at, every_row(rows), self.layer_context.scale, self.gives)
        return sealed, rest, rows.unsealed_positions

    def unknown(self, positions: Tensor) -> Tensor:
        return 1e-30 * (1.0 + positions)

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        return worth.masked_fill(newest(worth > -torch.inf, int(budget * self.recent)), torch.inf), 0

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        got = weights[..., 0].unflatten(1, (self.kv, -1)).float()  # [B,H,G,S]
        got, own = self.of_step(got, left(got), selection)
        self.waiting.data[:, :, -1] += own.sum(2)
        self.worth.visible.scatter_add_(2, selection.start.long(), got.sum(2))


def prompt_queries(rows: Rows) -> tuple[Tensor, Tensor]:
    """Every query of the prompt `[B,H,G,m,D]`, in any order, and their positions `[B,m]`, negative where there is none.

    Those of the sink's rows are missing, which see nothing but the sink.
    """
    assert rows.queries is not None
    assert rows.query_positions is not None
    assert rows.last_queries is not None
    assert rows.last_positions is not None
    last, last_at = rows.last_queries, rows.last_positions
    latest = rows.query_positions.max(1, keepdim=True).values
    last_at = last_at.masked_fill(last_at <= latest, -1)  # these are among the others
    return torch.cat([rows.queries, last], 3), torch.cat([rows.query_positions, last_at], 1)
