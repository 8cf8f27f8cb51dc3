"""What KDEformer and Reformer share: rows in the order of a hash, cut into equal bins; a query visits its own."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import ChoiceCost, Launch, Scan, products
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.hashing.projection_base import Hashed

NONE = (1 << 31) - 1  # the hash of padding, behind all others


class Binned(Hashed):
    """Reads the rows of the bin into which the query's hash falls, and of bins beside it as far as the budget goes.

    All rows of a KV head are kept in the order of their hashes, those of one hash by position: a list of row numbers,
    the rows themselves stay where they are. Every seal sorts its rows in, so there is one order at any time. Bin i
    is the places `i * rows` to `(i + 1) * rows` of that order; the last one may be shorter. A query's place is found by
    binary search. Every query head visits a bin of its own.

    An index row takes 8 bytes for each KV head.

    `scanned`: hashes that the search looks at, of a search among the real rows alone. `scan_bytes`: these, the row
    numbers it reads, and the directions once per KV head.
    """

    operators = 50

    def __init__(self, rows: int, seed: int) -> None:
        check_least(rows=(rows, 0))
        super().__init__(seed)
        self.rows = rows
        self.hashes = RowBuffer(2, spare=NONE)  # [B,H,N] int32, rising
        self.order = RowBuffer(2, spare=0)  # [B,H,N] int32, the rows in that order
        self.count_valid = RowBuffer(1, capacity=1)  # [B,1] int64, rows that are no padding

    @abstractmethod
    def hashed(self, x: Tensor) -> Tensor:
        """`[B,H,n]` int32, 0 or more and below `NONE`: the hash of `x` `[B,H,n,D]`, keys or queries."""

    @abstractmethod
    def begin(self, low: Tensor, high: Tensor, real: Tensor, rows: int, take: Tensor) -> Tensor:
        """The first of `take` consecutive places that a query visits; the places go on at 0 behind the last.

        Args:
            low, high: `[B,H,G]` int64, the places `[low, high)` of the rows that have the query's hash; where there are
                none, both are where it would be.
            real: `[B,1,1]` int64, rows that are no padding, 0 or more.
            rows: of a bin.
            take: `[B,1,1]` int64, the budget or all real rows.

        Returns:
            `[B,H,G]` int64, any integers.
        """

    def fix(self, rows: int, seal: int) -> None:
        self.hashes.fix(rows)
        self.order.fix(rows)
        self.count_valid.fix(1)

    def append(self, rows: Rows) -> None:
        self.draw(rows.keys)
        real = rows.positions >= 0
        if not self.count_valid.rows:
            self.count_valid.append(torch.zeros_like(rows.positions[:, :1]))
        self.count_valid.data.add_(real.sum(1, keepdim=True))
        hashes = self.hashed(rows.keys).masked_fill(~real[:, None], NONE)  # [B,H,n]
        before, new = self.order.rows, hashes.shape[2]
        order = torch.arange(before, before + new, dtype=torch.int32, device=hashes.device).expand_as(hashes)
        if before:
            hashes, order = torch.cat([self.hashes.data, hashes], 2), torch.cat([self.order.data, order], 2)
        hashes, at = hashes.sort(dim=2, stable=True)
        order = order.gather(2, at)
        for buffer, made in ((self.hashes, hashes), (self.order, order)):
            buffer.resize(before + new, made)
            buffer.data.copy_(made)
        # The search is over all of the storage, which is contiguous: it would copy a part of it at every step.
        self.hashes.full[..., self.hashes.rows :].fill_(NONE)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        hashes, order = self.hashes.full, self.order.visible  # [B,H,N]
        real = self.count_valid.visible[..., None]  # [B,1,1]
        hashed = self.hashed(query)  # [B,H,G]
        low, high = (torch.searchsorted(hashes, hashed, right=right) for right in (False, True))
        take = real.clamp(max=budget)
        first = self.begin(low, high, real, self.rows or budget, take)
        slot = torch.arange(min(budget, order.shape[2]), device=order.device)
        place = (first[..., None] + slot) % real.clamp(min=1)[..., None]  # [B,H,G,S]
        ids = order.gather(2, place.flatten(2)).view_as(place)
        return Selection.tokens(torch.where(slot < take[..., None], ids, -1).flatten(1, 2))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        (heads, group, size), looks = query.shape[1:], 2 * math.ceil(math.log2(sealed + 1))  # of two searches
        return Scan(looks, 4 * group * (looks + min(budget, sealed)) + self.directions_read(heads, size))

    def cost(self, query: Tensor, sealed: int, budget: int) -> ChoiceCost:
        (heads, group, size), rows = query.shape[1:], min(budget, sealed)
        hashing = products(query, self.count, size, self.scan(query, sealed, budget).read)
        return ChoiceCost((hashing, Launch("operator", count=self.operators)), heads * group, rows, rows)
