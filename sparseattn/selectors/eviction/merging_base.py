"""Evicting methods that merge what they drop into rows that they hold, so that a row stands for several."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.abilities import HasTail
from sparseattn.selectors.base import Rows, StepContext, best
from sparseattn.selectors.eviction.base import Evicting


class Merging(HasTail, Evicting):
    """Holds rows as an evicting method does, and changes those that others were merged into.

    A step names the rows held that stand for themselves. Those that stand for several are its tail, so that both
    together are no more than the budget. With `weigh` such a row has a bias, the logarithm of how many it stands for.
    The papers have none.

    The cache still stores every row as it came, and a merged row needs its values too. So this keeps a copy of all keys
    and values that it was shown, until `KVCache.compact` frees what it dropped.

    Merging goes through the heads one by one and waits for their choice: no fixed storage, and no CUDA graph.

    Attributes:
        compares: whether keys of rows held are read to find what a row is merged into.
        keys, values: `[B,H,N,D]`, as merged.
        count: `[B,H,N]` float32, how many rows each stands for.
    """

    compares = False
    weigh: bool

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.keys, self.values, self.count = RowBuffer(2), RowBuffer(2), RowBuffer(2)

    @abstractmethod
    def merge(self, b: int, gone: Tensor, stay: Tensor) -> None:
        """Merge rows that sequence b has just dropped, `gone` `[H,N]` bool, into those that `stay` `[H,N]` bool."""

    def fix(self, rows: int, seal: int) -> None:
        raise ValueError(f"{self} merges rows head by head, on the host's word: build the KVCache without fixed=True")

    def append(self, rows: Rows) -> None:
        super().append(rows)
        for buffer, part in ((self.keys, rows.keys), (self.values, rows.values)):
            buffer.append(part)
        self.count.append(torch.ones(rows.keys.shape[:3], device=rows.keys.device))

    def preferred(self, worth: Tensor, query: Tensor, budget: int) -> tuple[Tensor, int]:
        rank, more = super().preferred(worth, query, budget)
        return rank, more + self._key_bytes(query)

    def _key_bytes(self, query: Tensor) -> int:
        return query.shape[3] * self.bytes_of(query) if self.compares else 0

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Predict a step as if every step dropped a row, whose key is compared with those of all rows held."""
        scan = super().scan(query, sealed, budget)
        return replace(scan, read=scan.read + scan.rows * self._key_bytes(query))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        self._query = query  # of this step: `observe` weighs the tail's rows by it
        before = self.held()
        chosen = super().select(query, step, budget)
        stay = self.held()
        gone = before & ~stay
        for b in gone.flatten(1).any(1).nonzero()[:, 0].tolist():
            self.merge(b, gone[b], stay[b])
        alone = self.count.data.gather(2, chosen.start.long()) == 1
        return replace(chosen, length=chosen.length * alone.int())

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        ids = self._merged(selection.start.shape[2])
        if not bool((ids >= 0).any()):
            return None
        bias = self.count.data.gather(2, ids.clamp(min=0)).log() if self.weigh else None
        return Tail(self.keys.data, self.values.data, Selection.tokens(ids, bias=bias))

    def _merged(self, most: int) -> Tensor:
        """`[B,H,S]` int64: the rows held that stand for several, -1 for none."""
        several = (self.count.data > 1) & self.held()
        return best(torch.where(several, 0.0, -torch.inf), most)

    def with_tail(self, selection: Selection, weights: Tensor, total: Tensor) -> tuple[Selection, Tensor]:
        """Return what `observe` is told, with the rows of the tail and what they weighed among it."""
        ids = self._merged(selection.start.shape[2])
        heads, size = self._query.shape[1], self._query.shape[3]
        keys = self.keys.data.gather(2, ids.clamp(min=0)[..., None].expand(-1, -1, -1, size))
        logits = self._query.float() @ keys.float().mT / self.temperature(size)  # [B,H,G,S]
        if self.weigh:
            logits = logits + self.count.data.gather(2, ids.clamp(min=0)).log()[:, :, None]
        got = (logits - total[..., None]).exp().masked_fill((ids < 0)[:, :, None], 0.0)
        both = torch.cat([weights[..., 0].unflatten(1, (heads, -1)).float(), got], 3)
        start = torch.cat([selection.start, ids.clamp(min=0).int()], 2)
        return Selection(start, torch.cat([selection.length, (ids >= 0).int()], 2), 1), both.flatten(1, 2)[..., None]

    def average(self, b: int, h: int, out: Tensor, into: Tensor, weights: Tensor) -> None:
        """Put, in the place of each row named by `into` `[m]`, the mean of itself and of the rows `out` `[m]` that are
        merged into it, these times `weights` `[m]`."""
        targets, place = into.unique(return_inverse=True)
        many = 1 + torch.bincount(place, minlength=len(targets))
        for buffer in (self.keys, self.values):
            rows = buffer.data[b, h]
            total = rows[targets].float().index_add(0, place, rows[out].float() * weights[:, None])
            rows[targets] = (total / many[:, None]).to(rows.dtype)
        count = self.count.data[b, h]
        count.index_add_(0, into, count[out])

    def keep(self, ids: Tensor) -> None:
        super().keep(ids)
        for buffer in (self.keys, self.values, self.count):
            buffer.keep(ids)


def listed(which: Tensor) -> list[Tensor]:
    """Return, of `which` `[H,N]` bool, the rows of each head, rising."""
    return [mine.nonzero()[:, 0] for mine in which]
