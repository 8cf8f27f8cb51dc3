"""What selectors share that score every row by something shorter than its key, and read the best rows one by one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.kernels.topk.dispatch import best_rows
from sparseattn.selectors.base import Rows, Selector, check_group, vote


class Ranked(Selector):
    """Reads the rows with the largest approximate logits.

    A method may learn parameters of a sequence (`learn`): from the first real rows that it seals, its prompt's, or from
    a file. They lie in row buffers that grow along dimension 2, and rows sealed later do not change them.

    Attributes:
        by_row: names of the row buffers that hold something of every row, `real` aside.
        known: `[B,1]` bool, a sequence has its parameters; of methods that learn.
    """

    operators = 12
    by_row: tuple[str, ...]
    known: RowBuffer
    estimates = True

    def __init__(self, group: str) -> None:
        self.group = check_group(group)
        self.real = RowBuffer(1, spare=False)  # [B,N] bool, not padding

    @abstractmethod
    def logits(self, query: Tensor) -> Tensor:
        """`[B,H,G,N]` float32: approximate logits of the stored rows for queries `[B,H,G,D]`; -inf where a row is not
        real. A new tensor."""

    @abstractmethod
    def reads(self, query: Tensor) -> tuple[int, int]:
        """Bytes that scoring a row for `query` `[B,H,G,D]` reads, of which shape and dtype count alone; and those read
        once for all rows of a KV head."""

    @abstractmethod
    def scoring(self, query: Tensor, sealed: int) -> Launch:
        """The launch that scores so many rows, without its bytes."""

    def learned(self, rows: Rows) -> dict[str, Tensor]:
        """The parameters of one sequence, by the names of their row buffers: `[H,..]` each.

        Args:
            rows: its first rows, real ones alone: keys `[1,H,n,D]`, n >= 1.
        """
        raise NotImplementedError(f"{type(self).__name__} learns nothing")

    def learn(self, rows: Rows) -> None:
        """Keeps what is `learned` of the sequences whose first real rows these are."""
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
        for name in ("real", *self.by_row):
            getattr(self, name).fix(rows)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        if not self.real.rows:
            return Selection.none(query.shape[0], query.shape[1], query.device)
        return self.named(query, self.logits(query), budget)

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        row, once = self.reads(query)
        read, heads = sealed * row + once, query.shape[0] * query.shape[1]
        scoring = replace(self.scoring(query, sealed), bytes=heads * read)
        return self.ranked_cost(query, [scoring], read, (sealed, min(budget, sealed)), group=self.group)

    def weigh(self, query: Tensor, positions: Tensor, budget: int) -> Weighed:
        if not self.real.rows:
            return Weighed.nothing(query)
        logits = self.logits(query)
        return Weighed.of(self.named(query, logits, budget), self.fitted(logits))

    def named(self, query: Tensor, logits: Tensor, budget: int) -> Selection:
        """The `budget` best rows by `logits`, and what finding them cost."""
        heads, group = query.shape[1:3]
        ids = best_rows(vote(logits, self.group), budget)
        scanned = self.real.visible.sum(-1)[:, None]  # [B,1]
        chosen = heads * group if self.group == "each" else heads
        row, once = self.reads(query)
        read = scanned * row + (scanned > 0) * once
        return Selection.tokens(ids, scanned.expand(-1, chosen), read.expand(-1, heads))


def _alone(rows: Rows, b: int) -> Rows:
    """The real rows of sequence b, and their queries."""
    real = rows.positions[b] >= 0
    keys, values = (part[b : b + 1, :, real] for part in (rows.keys, rows.values))
    if rows.queries is None or rows.query_positions is None:
        return Rows(keys, values, rows.positions[b : b + 1, real])
    asked = rows.query_positions[b] >= 0
    at = rows.query_positions[b : b + 1, asked]
    return Rows(keys, values, rows.positions[b : b + 1, real], rows.queries[b : b + 1, :, :, asked], at)
