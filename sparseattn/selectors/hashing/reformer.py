"""Reformer's hash: rows in the order of the direction that is nearest to their key, cut into equal chunks.

https://arxiv.org/abs/2001.04451, as in Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.hashing.bins import Binned


class Reformer(Binned):
    """Reads the rows of the chunk into which the query's bucket falls, and of the chunks before it.

    A key's bucket is the largest of its products with `buckets / 2` random directions and their opposites. Rows are
    sorted by bucket and then by position, and cut into chunks of equal size. The query is the newest of its bucket: it
    visits the chunk of its bucket's last row, then those before that as far as the budget goes, the first one's
    predecessor being the last. A budget below a chunk reads the chunk's last rows.

    Args:
        buckets: even, 2 or more. The paper has chunks of twice the mean bucket: 64 rows at 4,096 rows in 128 buckets.
        rows: of a chunk; 0: as many as the budget, so that a query reads its own chunk alone, as in SAAP's Figure 5.
        seed: of the directions, any integer.

    Departures. In the paper queries are the keys, and every row is hashed by its query; here a key is hashed as it is.
    The paper goes one chunk back, repeats the whole with several hashes, and its models are trained with it; here there
    is one hash, as in SAAP's comparison, and the budget says how far back. All rows of a visited chunk are read,
    whatever their bucket. See `Binned` for how rows of later seals come in and what it costs.
    """

    def __init__(self, buckets: int = 128, rows: int = 64, seed: int = 0) -> None:
        if buckets < 2 or buckets % 2:
            raise ValueError(f"buckets is an even number, 2 or more, got {buckets}")
        super().__init__(rows, seed)
        self.buckets = buckets

    @property
    def count(self) -> int:
        return self.buckets // 2

    def hashed(self, x: Tensor) -> Tensor:
        products = self.projected(x)
        return torch.cat([products, -products], -1).argmax(-1).int()

    def begin(self, low: Tensor, high: Tensor, valid: Tensor, rows: int, take: Tensor) -> Tensor:
        own = (high - 1).clamp(min=0) // rows * rows  # where its chunk begins
        return (own + rows).minimum(valid) - take
