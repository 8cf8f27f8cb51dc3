"""What KDEformer and Reformer share: rows in the order of a hash, cut into equal bins; a query visits its own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products
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

    `scanned`: hashes that the search looks at, of a search among the valid rows alone. `scan_bytes`: these, the row
    numbers it reads, and the directions once per KV head.
    """

    operators = 50

    def __init__(self, rows: int | None, seed: int) -> None:
        check_least(rows=(rows or 0, 0))
        super().__init__(seed)
        self.rows = rows
        self.hashes = RowBuffer(2, spare=NONE)  # [B,H,N] int32, rising
        self.order = RowBuffer(2, spare=0)  # [B,H,N] int32, the rows in that order

    @abstractmethod
    def hashed(self, x: Tensor) -> Tensor:
        """Return the hash of `x` `[B,H,n,D]`, keys or queries: `[B,H,n]` int32, 0 or more and below `NONE`."""

    @abstractmethod
    def begin(self, low: Tensor, high: Tensor, valid: Tensor, rows: int, take: Tensor) -> Tensor:
        """Return the first of `take` consecutive places that a query visits; the places go on at 0 behind the last.

        Args:
            low, high: `[B,H,G]` int64, the places `[low, high)` of the rows that have the query's hash; where there are
                none, both are where it would be.
            valid: `[B,1,1]` int64, how many rows are no padding, 0 or more.
            rows: of a bin.
            take: `[B,1,1]` int64, the budget or all valid rows.

        Returns:
            `[B,H,G]` int64, any integers.
        """

    def fix(self, rows: int, seal: int) -> None:
        self.hashes.fix(rows)
        self.order.fix(rows)

    def append(self, rows: Rows) -> None:
        self.sort_in(self.hashes_of(rows))

    def hashes_of(self, rows: Rows) -> Tensor:
        """Return the hash of each new row, `[B,H,n]` int32; `NONE` for padding."""
        self.draw(rows.keys)
        return self.hashed(rows.keys).masked_fill((rows.positions < 0)[:, None], NONE)

    def sort_in(self, hashes: Tensor) -> None:
        """Put new rows of hashes `[B,H,n]` in their places of the order."""
        before, new = self.order.rows, hashes.shape[2]
        order = torch.arange(before, before + new, dtype=torch.int32, device=hashes.device).expand_as(hashes)
        if before:
            hashes, order = torch.cat([self.hashes.data, hashes], 2), torch.cat([self.order.data, order], 2)
        hashes, at = hashes.sort(dim=2, stable=True)
        order = order.gather(2, at)
        for buffer, sorted_rows in ((self.hashes, hashes), (self.order, order)):
            buffer.resize(before + new, sorted_rows)
            buffer.data.copy_(sorted_rows)
        self._close()

    def resume(self, keys: Tensor) -> None:
        super().resume(keys)
        if self.hashes.rows:
            self._close()

    def _close(self) -> None:
        """Let no search end behind the rows: it is over all of the storage, which is contiguous, as it would copy a
        part of it at every step."""
        self.hashes.full[..., self.hashes.rows :].fill_(NONE)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        hashes, order = self.hashes.full, self.order.visible  # [B,H,N]
        valid = step.valid.sum(1)[:, None, None]  # [B,1,1]
        hashed = self.hashed(query)  # [B,H,G]
        low, high = (torch.searchsorted(hashes, hashed, right=right) for right in (False, True))
        take = valid.clamp(max=budget)
        first = self.begin(low, high, valid, self.rows or budget, take)
        slot = torch.arange(min(budget, order.shape[2]), device=order.device)
        place = (first[..., None] + slot) % valid.clamp(min=1)[..., None]  # [B,H,G,S]
        ids = order.gather(2, place.flatten(2)).view_as(place)
        return Selection.tokens(torch.where(slot < take[..., None], ids, -1).flatten(1, 2))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        (heads, group, size), rows = query.shape[1:], min(budget, sealed)
        looked_at = 2 * sealed.bit_length()  # by two binary searches
        read = 4 * group * (looked_at + rows) + self.directions_read(heads, size)
        launches = products(query, self.count, size, read), Launch("operator", count=self.operators)
        return Scan(looked_at, read, launches, heads * group, rows, rows)
