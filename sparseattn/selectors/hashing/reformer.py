"""Reformer's hash: rows in buckets by the direction that is nearest to their key. https://arxiv.org/abs/2001.04451

Also as in Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.selectors.base import Rows, StepContext
from sparseattn.selectors.hashing.bins import NONE, Binned


class Reformer(Binned):
    """Reads the newest rows of the query's bucket, and then the newest of all others.

    A key's bucket is the largest of its products with `buckets / 2` random directions and their opposites. The default
    is the rule by which the authors' code decodes (google/trax, `efficient_attention.py`,
    `_incremental_forward_unbatched`): rows of the query's bucket come first, the newest first, and the newest rows of
    other buckets fill the budget.

    With `rows` it is the rule of a whole prompt, as in SAAP's Figure 5: rows are sorted by bucket and then by position,
    and cut into chunks of equal size. The query is the newest of its bucket: it visits the chunk of its bucket's last
    row, then those before that as far as the budget goes, the first one's predecessor being the last. A budget below a
    chunk reads the chunk's last rows.

    Args:
        buckets: even, 2 or more. The paper has chunks of twice the mean bucket: 64 rows at 4,096 rows in 128 buckets.
        rows: None (default): the authors' decoding. Rows of a chunk; 0: as many as the budget, so that a query reads
            its own chunk alone, as in SAAP's Figure 5.
        seed: of the directions, any integer.

    An index row takes 8 bytes for each KV head, and 4 more by default.

    Departures. In the paper queries are the keys, and every row is hashed by its query; here a key is hashed as it is.
    The paper repeats the whole with several hashes, and its models are trained with it; here there is one hash, as in
    SAAP's comparison. With `rows` all rows of a visited chunk are read, whatever their bucket, and the budget says how
    many chunks. See `Binned` for how rows of later seals come in and what it costs.

    `scanned`: hashes that are looked at: by the search, and by default of the newest rows. `scan_bytes`: these, the row
    numbers read, and the directions once per KV head.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(self, buckets: int = 128, rows: int | None = None, seed: int = 0) -> None:
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets is an even number, 2 or more, got {buckets}")
        super().__init__(rows, seed)
        self.buckets = buckets
        self.bucket = RowBuffer(2, spare=NONE)  # [B,H,N] int32, of each row as stored; nothing where `rows` is given

    @property
    def count(self) -> int:
        return self.buckets // 2

    def hashed(self, x: Tensor) -> Tensor:
        products = self.projected(x)
        return torch.cat([products, -products], -1).argmax(-1).int()

    def begin(self, low: Tensor, high: Tensor, valid: Tensor, rows: int, take: Tensor) -> Tensor:
        own = (high - 1).clamp(min=0) // rows * rows  # where its chunk begins
        return (own + rows).minimum(valid) - take

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        self.bucket.fix(rows)

    def append(self, rows: Rows) -> None:
        hashes = self.hashes_of(rows)
        self.sort_in(hashes)
        if self.rows is None:
            self.bucket.append(hashes)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if self.rows is not None:
            return super().select(query, step, budget)
        order, bucket = self.order.visible, self.bucket.visible  # [B,H,N]
        hashed = self.hashed(query)  # [B,H,G]
        low, high = (torch.searchsorted(self.hashes.full, hashed, right=right) for right in (False, True))
        slot = torch.arange(min(budget, order.shape[2]), device=order.device)  # [S]
        place = high[..., None] - 1 - slot  # [B,H,G,S], of the bucket's rows, the newest first
        of_bucket = place >= low[..., None]
        own = order.gather(2, place.clamp(min=0).flatten(2)).view_as(place)
        row = torch.arange(order.shape[2], device=order.device)
        newest = torch.where(step.valid, row, -1).topk(len(slot), -1).values  # [B,S], of all buckets
        there = newest[:, None].expand(-1, bucket.shape[1], -1)  # [B,H,S]
        row_buckets = bucket.gather(2, there.clamp(min=0))
        others = ((row_buckets[:, :, None] != hashed[..., None]) & (there >= 0)[:, :, None]).expand_as(place)
        candidates = torch.cat([own, there[:, :, None].expand_as(place).to(own.dtype)], -1)  # [B,H,G,2S]
        fits = torch.cat([of_bucket, others], -1)
        first = fits.int().argsort(dim=-1, descending=True, stable=True)[..., : len(slot)]
        return Selection.tokens(candidates.gather(-1, first).masked_fill(~fits.gather(-1, first), -1).flatten(1, 2))

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        if self.rows is not None:
            return super().scan(query, sealed, budget)
        (heads, group, size), rows = query.shape[1:], min(budget, sealed)
        looked_at = 2 * sealed.bit_length() + rows  # by two binary searches, and of the newest rows
        read = 4 * group * (looked_at + rows) + self.directions_read(heads, size)
        launches = products(query, self.count, size, read), Launch("operator", count=self.operators)
        return Scan(looked_at, read, launches, heads * group, rows, rows)
