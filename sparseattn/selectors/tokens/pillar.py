"""PillarAttn: the rows to which the last pass of full attention gave the most weight.

SparseSpec: Accelerating Large-Scale Reasoning Model Inference via Sparse Self-Speculation,
https://arxiv.org/abs/2512.01278
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.kernels.weights_given.dispatch import log_sums, weights_given
from sparseattn.selectors.abilities import FollowsChecks, FollowsMoves, LearnsFromQueries, ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext, best
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.base import every_row, last_of


class Pillar(FollowsChecks, FollowsMoves, LearnsFromQueries, ReadsKeys, Selector):
    """Reads the rows that got the most weight when full attention last read all rows, and has no index of keys.

    It is for drafts, which full attention checks every few tokens (`generate_lossless`): a check's queries say what
    rows weigh, summed over its tokens and the heads of a group, and the drafts behind it read the heaviest. Every dense
    pass over stored rows is such a check: a plain dense step too, of one token, and a chunk of a prompt. Until the
    first one, the prompt's last queries say what rows weigh.

    Args:
        queries: how many of the prompt's newest queries choose the first rows; 0: none, and the newest rows are read
            until the first check, as in the authors' code.

    One choice per KV head, as in the paper. The weights are made by a pass of their own over the keys, as in the
    authors' code, and only once a draft asks for rows. Rows that are sealed later are weighed by the same queries as
    they come. Rejected tokens of a check count as well. Draft and accepted tokens count among the budget there and lie
    in the cache's window here.

    Raises:
        ValueError: fewer than 0 queries.
    """

    page = 1
    best_first = True
    operators = 1

    def __init__(self, queries: int = 16) -> None:
        check_least(queries=(queries, 0))
        self.queries = self.last_queries = queries
        self.weights = RowBuffer(2)  # [B,H,N] float32 of every sealed row; -inf for padding
        self.asked = RowBuffer(2)  # [B,H,M,D] the queries that gave them
        self.total = RowBuffer(2)  # [B,H,M] the log-sum-exp of these over all rows; +inf for padding
        self.chosen = RowBuffer(2)  # [B,H,S] the heaviest rows, the heaviest first; empty until a step asks
        self.stale = False  # whether the weights are those of queries before the last

    def append(self, rows: Rows) -> None:
        if self.queries and rows.last_queries is not None:
            self._ask(*self._of_prompt(rows))
        padding, heads = (rows.positions < 0)[:, None], rows.keys.shape[1]
        newest = rows.positions[:, None].expand(-1, heads, -1).float()  # until anything is asked
        given = self._given(rows.keys) if self.asked.rows else newest
        self.weights.append(given.masked_fill(padding, -torch.inf))
        self.chosen.reset()

    def checked(self, queries: Tensor, total: Tensor) -> None:
        self._ask(queries, total)
        self.chosen.reset()
        self.stale = True

    def reset(self) -> None:
        super().reset()
        self.stale = False

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        weights, read = self.weights.data, 0  # bytes for each row and KV head
        if self.stale:
            keys = self.stored_keys()
            asks = self.total.data.isfinite().any(2, keepdim=True)  # [B,H,1]: others had padding alone
            weights.copy_(torch.where(asks & ~weights.isneginf(), self._given(keys), weights))
            self.stale, read = False, keys.shape[3] * self.bytes_of(keys)
        if self.chosen.rows < min(budget, self.weights.rows):
            self.chosen.reset()
            self.chosen.append(best(weights.masked_fill(~step.valid[:, None], -torch.inf), budget))
            read += weights.element_size()
        selection = Selection.tokens(self.chosen.data[..., :budget])
        if not step.counted:
            return selection
        rows = torch.tensor(step.sealed, device=query.device)[:, None].expand(-1, query.shape[1])  # [B,H]
        return replace(selection, scanned=rows * (read > 0), scan_bytes=rows * read)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count a step that reads what an earlier one chose."""
        rows = min(budget, sealed)
        expected = "the first step behind a check reads every key and ranks what they weigh"
        return Scan(0, 0, lists=query.shape[1], rows=rows, runs=rows, expected=expected)

    def keep(self, ids: Tensor) -> None:
        self.weights.keep(ids)
        self.chosen.reset()

    def _of_prompt(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the prompt's newest queries `[B,H,M,D]` and their log-sum-exp `[B,H,M]` over all that each sees."""
        queries, asked_at = last_of(rows, self.queries)
        every = every_row(rows)
        keys, places = torch.cat([part for part, _ in every], 2), torch.cat([part for _, part in every], 1)
        seen = (places[:, None] <= asked_at[:, :, None]) & (places[:, None] >= 0)  # [B,m,N]
        group, flat = queries.shape[2], queries.flatten(2, 3)
        total = log_sums(flat, keys, seen.repeat(1, group, 1)[:, None], 1 / self.temperature(keys.shape[-1]))
        return flat, total.masked_fill((asked_at < 0).repeat(1, group)[:, None], torch.inf)

    def _ask(self, queries: Tensor, total: Tensor) -> None:
        for buffer, what in ((self.asked, queries), (self.total, total)):
            buffer.reset()
            buffer.append(what)

    def _given(self, keys: Tensor) -> Tensor:
        """Return what the queries in force give to keys `[B,H,n,D]`, `[B,H,n]`."""
        return weights_given(self.asked.data, self.total.data, keys, 1 / self.temperature(keys.shape[-1]))
