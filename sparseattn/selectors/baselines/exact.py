"""Exact top-k by inner product: the oracle that every approximate method is measured against."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Scan, products
from sparseattn.kernels.row_scores.dispatch import row_scores
from sparseattn.selectors.abilities import ComparesHeads, EstimatesMass, ReadsKeys, SharesScores
from sparseattn.selectors.base import Rows, Selector, StepContext, best, vote
from sparseattn.selectors.checks import check_group

LAYER = "layer"


class Exact(ComparesHeads, ReadsKeys, EstimatesMass, SharesScores, Selector):
    """Scores every sealed key and reads the best: with `group="each"`, recall@k is 1 for every k up to the budget.

    Args:
        group: "each" (default): every query head takes its own top rows; "softmax", "sum", "max": one choice per KV
            head from the group's summed probabilities, summed scores or best score; "layer": one list for all heads,
            of the largest probability that any query head gives (OmniKV's filter layers).
        refresh: choose anew at every `refresh`-th query and keep the choice in between; 1 is the oracle. The fixed set
            of RetrievalAttention's Figure 2 (https://arxiv.org/abs/2409.10516) is `refresh` = the tokens replayed.

    With a `Mass` as budget it is the reference of every budget that follows the data: by true weights, the fewest rows
    with which a head holds the share.
    """

    page = 1
    best_first = True

    def __init__(self, group: str = "each", refresh: int = 1) -> None:
        if refresh < 1:
            raise ValueError(f"refresh is 1 or more queries, got {refresh}")
        self.group, self.refresh = group if group == LAYER else check_group(group), refresh
        self.kept = RowBuffer(2)  # [B,Hs,S] the choice in force, best first
        self.queries_seen = 0

    def has(self, ability: type) -> bool:
        if ability is ComparesHeads:
            return self.group == LAYER
        # A choice that is kept was weighed for another query, and one for all heads of a layer would be cut apart.
        weighs = self.refresh == 1 and self.group != LAYER
        return super().has(ability) and (weighs or ability not in (EstimatesMass, SharesScores))

    def fix(self, rows: int, seal: int) -> None:
        if self.refresh > 1:
            raise ValueError(f"{self} counts queries on the host: with fixed=True refresh is 1")

    def append(self, rows: Rows) -> None:
        return None

    def reset(self) -> None:
        super().reset()
        self.queries_seen = 0

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if self.refresh == 1:
            return Selection.tokens(self._best(self._scores(query, step), budget))
        fresh = self.queries_seen % self.refresh == 0
        self.queries_seen += 1
        if fresh:
            self.kept = RowBuffer(2)
            self.kept.append(self._best(self._scores(query, step), budget))
        selection = Selection.tokens(self.kept.data[..., :budget])
        if fresh or not step.counted:
            return selection
        nothing = torch.zeros(selection.start.shape[:2], dtype=torch.int64, device=query.device)
        return replace(selection, scanned=nothing, scan_bytes=nothing[:, : query.shape[1]])

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count the scan of a step that chooses."""
        scan = Scan(sealed, sealed * query.shape[3] * self.bytes_of(query))
        scoring = products(query, sealed, query.shape[3], scan.read)
        expected = "" if self.refresh == 1 else "every step chooses again"
        group = "max" if self.group == LAYER else self.group
        return self.ranked(query, scan, [scoring], (sealed, min(budget, sealed)), group=group, expected=expected)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        scores = self._scores(query, step)
        selection = Selection.tokens(best(vote(scores, self.group), budget))
        return Weighed.of(self.counted(selection, query, step, budget), self.fitted(scores))

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return self._scores(query, step).float()

    def _best(self, scores: Tensor, budget: int) -> Tensor:
        """`[B,Hs,S]`: the best rows, where their scores are `[B,H,G,N]`."""
        if self.group != LAYER:
            return best(vote(scores, self.group), budget)
        shared = vote(scores.flatten(1, 2)[:, :, None], "softmax").amax(1, keepdim=True)  # [B,1,N] log probabilities
        return best(shared, budget).expand(-1, scores.shape[1], -1)

    def _scores(self, query: Tensor, step: StepContext) -> Tensor:
        """`[B,H,G,N]`: the logits of the sealed rows, -inf for padding."""
        scores = row_scores(query, self.stored_keys())
        scores /= self.temperature(query.shape[-1])
        return scores.masked_fill_(~step.valid[:, None, None], -torch.inf)
