"""KVMerger: runs of rows with similar keys become one row, by a Gaussian kernel about the heaviest of them.

https://arxiv.org/abs/2407.08454
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.base import Rows
from sparseattn.selectors.eviction.attention_received import received
from sparseattn.selectors.eviction.base import every_row
from sparseattn.selectors.eviction.merging_base import Merging, listed
from sparseattn.selectors.eviction.summed_base import prompt_queries


class KVMerger(Merging):
    """Cuts the rows held into as many runs of neighbours as the budget has rows, and holds one row for each run.

    Cuts are where the cosines of neighbouring keys are smallest, so that every pair of neighbours that is joined is at
    least as similar as every pair that is not: the paper's threshold, as high as the budget allows. A run's place is
    that of the row with the largest sum of the prompt's attention weights. Its key and value are means of the run's,
    with weights `exp(-d^2 / 2 s)`, for d the distance of a key from that row's, s the mean of d^2 over the run's other
    rows.

    Args:
        weigh: see `Merging`.

    The paper has a threshold for a model, and keeps rows apart that have got most attention. Its text could not be had
    whole, and no code of the authors was found: after others' code (Attention Matching, `kvmerger.py`), which meets a
    number of rows by a search for the threshold. Both leave the paper's width s open, which is circular as they have
    it; the mean above is that code's first guess. Rows of the answer have no sum, so that a run of them and of the
    prompt's lies where the prompt's does.
    """

    compares = True

    def __init__(self, weigh: bool = False) -> None:
        super().__init__()
        self.weigh = weigh
        self.queries_share, self.last_queries = 1.0, 1

    def first(self, rows: Rows) -> Tensor:
        late = (-1.0 - rows.positions)[:, None].expand(-1, rows.keys.shape[1], -1)  # of these the oldest
        if rows.queries is None or rows.last_queries is None:
            return late
        queries, at = prompt_queries(rows)
        return received(queries, at, every_row(rows), self.layer_context.scale)[0]

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        rank, more = super().preferred(worth, query, budget)
        there = worth > -torch.inf
        if not bool((there.sum(2) > budget).any()):
            return rank, more
        rank = rank.clone()
        for b, of_sequence in enumerate(there):
            for h, kept in enumerate(listed(of_sequence)):
                if len(kept) <= budget:
                    continue
                run, mine = self._runs(self.keys.data[b, h][kept], budget), worth[b, h, kept]
                order = mine.argsort(descending=True, stable=True)
                order = order[run[order].argsort(stable=True)]  # run by run, the heaviest of each first
                later = torch.nn.functional.pad(run[order][1:] == run[order][:-1], (1, 0))
                rank[b, h, kept[order[later]]] = -torch.inf
        return rank, more

    @staticmethod
    def _runs(keys: Tensor, runs: int) -> Tensor:
        """`[n]` int64, rising from 0: the run of each of keys `[n,D]` in order."""
        units = torch.nn.functional.normalize(keys.float(), dim=1)
        cosine = (units[1:] * units[:-1]).sum(1)
        cuts = cosine.argsort(stable=True)[: runs - 1] + 1
        return torch.zeros(len(keys), dtype=torch.int64, device=keys.device).scatter(0, cuts, 1).cumsum(0)

    def merge(self, b: int, gone: Tensor, stay: Tensor) -> None:
        for h, (out, pivots) in enumerate(zip(listed(gone), listed(stay), strict=True)):
            if not len(out):
                continue
            keys, values, count = (part.data[b, h] for part in (self.keys, self.values, self.count))
            every = torch.cat([out, pivots]).sort().values
            run = self._runs(keys[every], len(pivots))
            into = pivots[run]  # a run has one pivot, and both rise
            square = (keys[every].float() - keys[into].float()).square().sum(1)
            sums = torch.zeros(len(pivots), device=keys.device)
            many = sums.index_add(0, run, torch.ones_like(square)) - 1
            width = sums.index_add(0, run, square) / many.clamp(min=1)
            weight = (-square / (2 * width[run]).clamp(min=torch.finfo(torch.float32).tiny)).exp()
            share = weight / sums.index_add(0, run, weight)[run]
            joined = many > 0
            for rows in (keys, values):
                new = torch.zeros(len(pivots), rows.shape[1], device=rows.device)
                new.index_add_(0, run, rows[every].float() * share[:, None])
                rows[pivots[joined]] = new[joined].to(rows.dtype)
            count.index_add_(0, into[(into != every)], count[every[(into != every)]])
