"""Exact top-k by inner product: the oracle that every approximate method is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Scan, products
from sparseattn.selectors.base import Rows, Selector, best, check_group, vote

LAYER = "layer"


class Exact(Selector):
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

    reads_stored = True

    def __init__(self, group: str = "each", refresh: int = 1) -> None:
        if refresh < 1:
            raise ValueError(f"refresh is 1 or more queries, got {refresh}")
        self.group, self.refresh = group if group == LAYER else check_group(group), refresh
        self.real = RowBuffer(1, spare=False)  # [B,N] bool, not padding
        self.kept = RowBuffer(2)  # [B,Hs,S] the choice in force, best first
        self.asked = 0
        # A choice that is kept was weighed for another query, and one for all heads of a layer would be cut apart.
        self.estimates = refresh == 1 and group != LAYER

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
        fresh = self.asked % self.refresh == 0
        self.asked += 1
        if fresh:
            self.kept = RowBuffer(2)
            if self.real.rows:
                self.kept.append(self._best(self._scores(query), budget))
        if not self.kept.rows:
            return Selection.none(query.shape[0], query.shape[1], query.device)
        return self._named(query, self.kept.data[..., :budget], int(fresh))

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Of a step that chooses."""
        size = query.shape[3]
        read = sealed * size * self.bytes_of(query)
        scoring = products(query, sealed, size, read)
        expected = "" if self.refresh == 1 else "every step chooses"
        found = sealed, min(budget, sealed)
        return self.ranked_cost(
            query, [scoring], read, found, group="max" if self.group == LAYER else self.group, expected=expected
        )

    def weigh(self, query: Tensor, positions: Tensor, budget: int) -> Weighed:
        if not self.estimates:
            return super().weigh(query, positions, budget)
        if not self.real.rows:
            return Weighed.nothing(query)
        scores = self._scores(query)
        return Weighed.of(self._named(query, best(vote(scores, self.group), budget), 1), self.fitted(scores))

    def _named(self, query: Tensor, ids: Tensor, scans: int) -> Selection:
        """The rows `ids` `[B,Hs,S]`, chosen by so many scans of all keys."""
        heads, size = query.shape[1], query.shape[3]
        scanned = self.real.visible.sum(-1)[:, None] * scans  # [B,1]
        read = scanned * size * self.bytes_of(query)
        return Selection.tokens(ids, scanned.expand(-1, ids.shape[1]), read.expand(-1, heads))

    def _best(self, scores: Tensor, budget: int) -> Tensor:
        """`[B,Hs,S]`: the best rows, where their scores are `[B,H,G,N]`."""
        if self.group != LAYER:
            return best(vote(scores, self.group), budget)
        one = vote(scores.flatten(1, 2)[:, :, None], "softmax").amax(1, keepdim=True)  # [B,1,N] log probabilities
        return best(one, budget).expand(-1, scores.shape[1], -1)

    def _scores(self, query: Tensor) -> Tensor:
        """`[B,H,G,N]`: the logits of the sealed rows, -inf for padding."""
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ self.stored_keys().to(wide).mT / self.temperature(query.shape[-1])
        return scores.masked_fill(~self.real.visible[:, None, None], -torch.inf)
