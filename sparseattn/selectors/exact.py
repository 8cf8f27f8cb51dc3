"""Exact top-k by inner product: the oracle that every approximate method is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selection import Selection
from sparseattn.selectors.base import Rows, Selector, best, check_group, vote
from sparseattn.storage import RowBuffer


class Exact(Selector):
    """Scores every sealed key and reads the best: with `group="each"`, recall@k is 1 for every k up to the budget.

    Args:
        group: "each" (default): every query head takes its own top rows; "softmax", "sum", "max": one choice per KV
            head from the group's summed probabilities, summed scores or best score.
        refresh: choose anew at every `refresh`-th query and keep the choice in between; 1 is the oracle. The fixed set
            of RetrievalAttention's Figure 2 (https://arxiv.org/abs/2409.10516) is `refresh` = the tokens replayed.
    """

    reads_stored = True

    def __init__(self, group: str = "each", refresh: int = 1) -> None:
        if refresh < 1:
            raise ValueError(f"refresh is 1 or more queries, got {refresh}")
        self.group, self.refresh = check_group(group), refresh
        self.real = RowBuffer(1, spare=False)  # [B,N] bool, not padding
        self.kept = RowBuffer(2)  # [B,Hs,S] the choice in force, best first
        self.asked = 0

    def fix(self, rows: int, seal: int) -> None:
        if self.refresh > 1:
            raise ValueError(f"{self!r} counts queries on the host: with fixed=True refresh is 1")
        self.real.fix(rows)

    def append(self, rows: Rows) -> None:
        self.real.append(rows.positions >= 0)

    def reset(self) -> None:
        super().reset()
        self.asked = 0

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        chosen = heads * group if self.group == "each" else heads
        fresh = self.asked % self.refresh == 0
        self.asked += 1
        if fresh:
            self.kept = RowBuffer(2)
            if self.real.rows:
                self.kept.append(best(vote(self._scores(query), self.group), budget))
        if not self.kept.rows:
            return Selection.none(batch, heads, query.device)
        scanned = self.real.visible.sum(-1)[:, None] * int(fresh)  # [B,1]
        read = scanned * size * self.bytes_of(query)
        ids = self.kept.data[..., :budget]
        return Selection.tokens(ids, scanned.expand(-1, chosen), read.expand(-1, heads))

    def _scores(self, query: Tensor) -> Tensor:
        """`[B,H,G,N]`: the logits of the sealed rows, -inf for padding."""
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ self.stored_keys().to(wide).mT / self.temperature(query.shape[-1])
        return scores.masked_fill(~self.real.visible[:, None, None], -torch.inf)
