"""Scissorhands: the rows that most often weighed more than an even share, of the last queries, and the newest ones.

https://arxiv.org/abs/2305.17118
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.selectors.abilities import Observes
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.eviction.attention_received import QueryBlock, received
from sparseattn.selectors.eviction.base import Evicting, every_row, last_of, left
from sparseattn.selectors.newest import newest

BYTE = 8


class Scissorhands(Observes, Evicting):
    """Holds the rows that were pivotal for the largest share of the last queries that saw them, and the newest rows.

    A row is pivotal for a query that attends to t rows if it weighs `1/t` or more, in the mean over its query group. Of
    rows with equal shares the newest are held.

    Args:
        history: queries that count, a multiple of 8; 400 in the paper.
        recent: newest rows that are held whatever they weigh; 10 in the paper.

    One choice per KV head. The paper has no public code: the rule is cold-compress' (AnswerDotAI,
    `KVCacheHeavyHitter` with thresholds), which names the paper's numbers. Departures from it: the prompt's last
    queries count one by one, where that code counts all of them as one; as there, one row goes for each that comes,
    where the paper drops half of its budget at a time. A row that is sealed after the first seal has been seen by its
    own query, if it was the token of the step and all that was not sealed (`Scissorhands.paper()`), and by none in any
    other setting: its share is of the queries since then.

    It keeps, for every row, a bit of each query that counts, and 8 bytes.

    Raises:
        ValueError: a history that is no multiple of 8, or numbers below 8 and 0.
    """

    operators = 60

    def __init__(self, history: int = 400, recent: int = 10) -> None:
        super().__init__()
        check_least(history=(history, BYTE), recent=(recent, 0))
        if history % BYTE:
            raise ValueError(f"history is a multiple of {BYTE} queries, got {history}")
        self.history, self.recent = history, recent
        self.last_queries = history
        self.marks = RowBuffer(2, spare=0)  # [B,H,N,history/8] uint8: query p has bit p % 8 of byte p % history // 8
        self.since = RowBuffer(2, spare=0)  # [B,H,N] int32, the position of the first query that saw the row
        self.shown = RowBuffer(1)  # [B,1] int64, real rows sealed
        self.asked = RowBuffer(1)  # [B,1] int64, the position of the step's query
        self.own = RowBuffer(1)  # [B,1,H] bool, whether that query's own row was pivotal for it
        self.own_at = RowBuffer(1)  # [B,1] int64, that row's position; -1: it was not all that was not sealed

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink; the token of the step is on top of the
        budget."""
        return {"selector": cls(), "sink": 0, "window": 1, "seal": 1}

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        for buffer in (self.marks, self.since):
            buffer.fix(rows)
        for buffer in (self.shown, self.asked, self.own, self.own_at):
            buffer.fix()

    def keep(self, ids: Tensor) -> None:
        for buffer in (self.worth, self.marks, self.since):
            buffer.keep(ids)

    def first(self, rows: Rows) -> Tensor:
        """Return how often new rows were pivotal so far; their marks are kept."""
        at, real = rows.positions, rows.positions >= 0
        shape = rows.keys.shape[:3]
        if not self.shown.rows:
            marks = self._of_prompt(rows)
            since = at[:, None].expand(shape)
            self.shown.append(real.sum(-1, keepdim=True))
            for buffer in (self.asked, self.own_at):
                buffer.append(torch.full_like(at[:, :1], -1))
            self.own.append(torch.zeros(shape[0], 1, shape[1], dtype=torch.bool, device=at.device))
        else:
            known = (at == self.own_at.data) & real  # [B,n]
            marks = torch.zeros(*shape, self.history // BYTE, dtype=torch.uint8, device=at.device)
            bit = (known[:, None] & self.own.data[:, 0, :, None]).to(torch.uint8) << (at % BYTE)[:, None].to(
                torch.uint8
            )
            place = (at % self.history // BYTE).clamp(min=0)[:, None, :, None].expand(*shape, 1)
            marks.scatter_(3, place, bit[..., None])
            since = torch.where(known, at, self.asked.data + 1)[:, None].expand(shape)
            self.shown.data.add_(real.sum(-1, keepdim=True))
        self.marks.append(marks)
        self.since.append(since.int())
        return _bits(marks)

    def _of_prompt(self, rows: Rows) -> Tensor:
        """`[B,H,n,history/8]` uint8: the marks by the prompt's last queries."""
        queries, at = last_of(rows, self.history)
        every = every_row(rows)
        marks = []
        for byte in range(self.history // BYTE):
            mine = torch.where(at % self.history // BYTE == byte, at, -1)
            which = (mine >= 0).any(0).nonzero()[:, 0]  # of no sequence another byte's, which -1 leaves out
            counts = received(queries[:, :, :, which], mine[:, which], every, self.layer_context.scale, _pivotal)[0]
            marks.append(counts.to(torch.uint8))
        return torch.stack(marks, -1)

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        seen = (self.asked.data[:, :, None] - self.since.visible).clamp(1, self.history)  # queries before this one
        share = worth.double() / seen
        rank = share.argsort(dim=-1, stable=True).argsort(dim=-1).float()  # of equal shares, the newer the more
        there = worth > -torch.inf
        last = newest(there, min(self.recent, budget))
        return rank.masked_fill(~there, -torch.inf).masked_fill(last, torch.inf), 0

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        self.asked.data[:, 0] = step.positions
        return super().select(query, step, budget)

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        got = weights[..., 0].unflatten(1, (self.kv, -1)).float()  # [B,H,G,S]
        query_places, worth = self.asked.data[:, 0], self.worth.visible
        beside = query_places + 1 - self.shown.data[:, 0]  # [B] rows that are not sealed, and the sink's
        even = 1 / (selection.attended + beside[:, None])  # [B,H]
        self.own.data[:, 0] = left(got).mean(2) >= even
        self.own_at.data[:, 0] = torch.where(beside == 1, query_places, -1)
        pivotal = (selection.length > 0) & (got.mean(2) >= even[..., None])
        read = torch.zeros_like(worth).scatter_add_(2, selection.start.long(), pivotal.float()) > 0
        place = (query_places % self.history // BYTE)[:, None, None, None].expand(*worth.shape, 1)
        bit = (1 << query_places % BYTE).to(torch.uint8)[:, None, None]
        marked = self.marks.visible.gather(3, place)[..., 0]
        self.marks.visible.scatter_(3, place, torch.where(read, marked | bit, marked & ~bit)[..., None])
        worth.add_(read.float() - ((marked & bit) > 0).float())


def _pivotal(logits: Tensor, block: QueryBlock) -> Tensor:
    """`[1,m,n]` float32: what a mark of the query weighs in its byte, where a row is pivotal for it."""
    pivotal = logits.softmax(-1).mean(0) >= 1 / (block.asked[:, None] + 1)
    return (pivotal * (1 << block.asked % BYTE)[:, None]).float()[None]


def _bits(marks: Tensor) -> Tensor:
    """`[B,H,n]` float32: how many bits of `[B,H,n,K]` are set."""
    each = marks[..., None] >> torch.arange(BYTE, dtype=torch.uint8, device=marks.device) & 1
    return each.sum((-2, -1)).float()
