"""What selectors share that score every row by something shorter than its key, and read the best rows one by one."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.kernels.topk.dispatch import best_rows
from sparseattn.selectors.abilities import EstimatesMass, SharesScores
from sparseattn.selectors.base import Rows, Selector, StepContext, vote
from sparseattn.selectors.checks import check_group

LEARNED_HERE = "its parameters are learned from the first rows that it is shown, and each process shows it others"


class Ranked(EstimatesMass, SharesScores, Selector):
    """Reads the rows with the largest approximate logits.

    A method may learn parameters of a sequence (`learn`): from the first real rows that it seals, its prompt's, or from
    a file. They lie in row buffers that grow along dimension 2, and rows sealed later do not change them.

    Attributes:
        page: rows that are chosen together, a power of two, by the sum of their weights: 1, or what the method sets as
            its span besides.
        by_row: names of the row buffers that hold something of every row.
        known: `[B,1]` bool, a sequence has its parameters; of methods that learn.
    """

    operators = 12
    page = 1
    by_row: tuple[str, ...]
    known: RowBuffer

    def __init__(self, group: str) -> None:
        self.group = check_group(group)

    @abstractmethod
    def logits(self, query: Tensor, valid: Tensor) -> Tensor:
        """Return approximate logits `[B,H,G,N]` float32 of the stored rows for queries `[B,H,G,D]`, -inf where `valid`
        `[B,N]` is False. A new tensor."""

    @abstractmethod
    def reads(self, query: Tensor) -> tuple[int, int]:
        """Return the bytes that scoring a row for `query` `[B,H,G,D]` reads, of which shape and dtype count alone; and
        those read once for all rows of a KV head."""

    @abstractmethod
    def scoring(self, query: Tensor, sealed: int) -> Launch:
        """Return the launch that scores so many rows, without its bytes."""

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        """Return the parameters of one sequence, by the names of their row buffers: `[H,..]` each.

        Args:
            rows: its first rows, real ones alone: keys `[1,H,n,D]`, n >= 1. They may be views of the cache's, not to be
                written to or kept.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing")

    def learn(self, rows: Rows) -> None:
        """Keep what is `learned` of the sequences whose first real rows these are."""
        real = rows.positions >= 0
        if not self.known.rows:
            self.known.append(torch.zeros_like(real[:, :1]))
        fresh = real.any(1) & ~self.known.data[:, 0]
        for b in fresh.nonzero()[:, 0].tolist():
            for name, made in self.learned(_alone(rows, b)).items():
                buffer: RowBuffer = getattr(self, name)
                if not buffer.rows:
                    buffer.capacity = made.shape[1]
                    buffer.append(made.new_zeros(len(real), *made.shape))
                buffer.data[b] = made
        self.known.data[:, 0] |= fresh

    def fix(self, rows: int, seal: int) -> None:
        for _, buffer in self.buffers():
            if isinstance(buffer, RowBuffer):
                buffer.fix()
        for name in self.by_row:
            getattr(self, name).fix(rows)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return self.best(self.masses(self.logits(query, step.valid)), budget)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        logits = self.masses(self.logits(query, step.valid))
        means = logits - math.log(self.page) if self.page > 1 else logits  # of a page's exponentiated logits
        return Weighed.of(self.best(logits, budget), self.fitted(means), self.page)

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return self.masses(self.logits(query, step.valid))

    def masses(self, logits: Tensor) -> Tensor:
        """Return the logarithms of the sums of exponentiated `logits` `[B,H,G,N]` of each page: `[B,H,G,P]`."""
        return logits if self.page == 1 else logits.unflatten(3, (-1, self.page)).logsumexp(4)

    def best(self, logits: Tensor, budget: int) -> Selection:
        """Return the best rows, or pages, of a `budget` of rows by `logits` `[B,H,G,P]` and the group's vote."""
        return Selection.pages(best_rows(vote(logits, self.group), budget // self.page), self.page)

    def bytes_read(self, query: Tensor, sealed: int) -> int:
        """Return the bytes of the index that a query reads of a KV head's `sealed` rows."""
        row, once = self.reads(query)
        return sealed * row + once

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = Scan(sealed, self.bytes_read(query, sealed))
        scoring = replace(self.scoring(query, sealed), bytes=query.shape[0] * query.shape[1] * scan.read)
        counts = sealed // self.page, min(budget, sealed) // self.page
        return self.ranked(query, scan, [scoring], counts, group=self.group, page=self.page)


def _alone(rows: Rows, b: int) -> Rows:
    """Return the real rows of sequence b, and their queries; views where nothing is padding."""
    real = _real(rows.positions[b])
    keys, values = (part[b : b + 1, :, real] for part in (rows.keys, rows.values))
    if rows.queries is None or rows.query_positions is None:
        return Rows(keys, values, rows.positions[b : b + 1, real])
    sampled = _real(rows.query_positions[b])
    at = rows.query_positions[b : b + 1, sampled]
    return Rows(keys, values, rows.positions[b : b + 1, real], rows.queries[b : b + 1, :, :, sampled], at)


def _real(positions: Tensor) -> Tensor | slice:
    """Return what picks those of `positions` `[n]` that are no padding."""
    real = positions >= 0
    return slice(None) if bool(real.all()) else real
