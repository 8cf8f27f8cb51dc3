"""Elastic Cache: rows of the prompt of little worth are averaged into their neighbours; later, one place is given up.

https://arxiv.org/abs/2407.18121
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.selectors.abilities import ComparesHeads
from sparseattn.selectors.base import Rows
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.attention_received import received
from sparseattn.selectors.eviction.base import every_row
from sparseattn.selectors.eviction.merging_base import Merging, listed
from sparseattn.selectors.eviction.summed_base import prompt_queries

BEFORE, NOW, DONE = 0, 1, 2  # whether the prompt's rows were chosen among


class ElasticCache(ComparesHeads, Merging):
    """Holds, in all heads of a layer, the prompt's rows with the largest sums of attention weights, its anchors.

    Every other row of the prompt is merged into the nearest anchor by position, the earlier of two: keys and values
    become means. Of later rows one goes for each that comes, always from the same place, `distance` rows before the
    newest. So the first of what is held stays, and the newest `distance` slide.

    Args:
        distance: rows behind the place that is given up, 25 in the authors' code.
        weigh: see `Merging`.

    As the authors' code (liuzuyan/ElasticCache, `kv_cache.py`), with ranks of sums where that compares the numbers that
    a sort of the sums returns, and so keeps other rows. Its first row and its last of the prompt, which take in no row,
    are the cache's sink and window.
    """

    def __init__(self, distance: int = 25, weigh: bool = False) -> None:
        super().__init__()
        check_least(distance=(distance, 1))
        self.distance, self.weigh = distance, weigh
        self.queries_share, self.last_queries = 1.0, 1
        self.at = RowBuffer(2)  # [B,H,N] int64 positions
        self.stage = RowBuffer(1)  # [B,1] int64

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: a row of sink, the token of the step on top."""
        return {"selector": cls(), "sink": 1, "window": 1, "seal": 1}

    def append(self, rows: Rows) -> None:
        super().append(rows)
        self.at.append(rows.positions[:, None].expand(-1, rows.keys.shape[1], -1))
        if not self.stage.rows:
            self.stage.append(torch.full_like(rows.positions[:, :1], BEFORE))

    def first(self, rows: Rows) -> Tensor:
        late = (1.0 + rows.positions)[:, None].expand(-1, rows.keys.shape[1], -1)
        if rows.queries is None or rows.last_queries is None:
            return late
        queries, at = prompt_queries(rows)
        sums = received(queries, at, every_row(rows), self.layer_context.scale)[0].mean(1, keepdim=True)
        return (sums / (1 + sums.amax(2, keepdim=True))).expand_as(late)

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        rank, more = super().preferred(worth, query, budget)
        there, stage = worth > -torch.inf, self.stage.data
        many = there.sum(2, keepdim=True)
        begins = (stage == BEFORE) & (many > budget).any(1)
        stage.copy_(torch.where(begins, NOW, torch.where(stage == BEFORE, BEFORE, DONE)))
        age, place = there.cumsum(2) - 1, max(budget - self.distance, 0)
        given_up = there & (age >= place) & (age < place + (many - budget).clamp(min=0))
        return rank.masked_fill(given_up & (stage == DONE)[:, :, None], -torch.inf), more

    def merge(self, b: int, gone: Tensor, stay: Tensor) -> None:
        if int(self.stage.data[b]) != NOW:
            return
        for h, (out, kept) in enumerate(zip(listed(gone), listed(stay), strict=True)):
            if len(out) and len(kept):
                at = self.at.data[b, h]
                into = kept[(at[out][:, None] - at[kept]).abs().min(1).indices]
                self.average(b, h, out, into, torch.ones_like(out, dtype=torch.float32))

    def keep(self, ids: Tensor) -> None:
        super().keep(ids)
        self.at.keep(ids)
