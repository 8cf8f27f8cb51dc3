"""Buckets ranked by what the context's own keys in them are like: their mean and variance. Ours; no paper's method.

The buckets are SAAP's, https://arxiv.org/abs/2502.08246.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.base import Rows
from sparseattn.selectors.buckets import Parameters, Partitioned
from sparseattn.storage import RowBuffer

SPREAD = 0.5  # weight of the variance's part; 1 were right for Gaussian keys of independent dimensions (see LOG.md)


class KeyMoments(RowBuffer):
    """Mean, variance and number of the keys of every bucket, as attention sees them: `[B,H,C,2D+1]` float32."""

    def __init__(self) -> None:
        super().__init__(2)

    def fresh(self) -> KeyMoments:
        return KeyMoments()

    def add(self, keys: Tensor, bucket: Tensor, buckets: int) -> None:
        """Takes in keys `[B,H,n,D]` of buckets `bucket` `[B,H,n]` int64, C = `buckets` for padding."""
        keys = keys.float()
        batch, heads, _, size = keys.shape
        terms = torch.cat([keys, keys.square(), torch.ones_like(keys[..., :1])], -1)
        sums = terms.new_zeros(batch, heads, buckets + 1, 2 * size + 1)
        sums.scatter_add_(2, bucket[..., None].expand_as(terms), terms)
        sums = sums[:, :, :-1]
        if self.rows:
            mean, variance, number = self.parts()
            sums += torch.cat([mean * number, (variance + mean.square()) * number, number], -1)
        first, second, number = sums.split([size, size, 1], -1)
        mean = first / number.clamp(min=1)
        variance = (second / number.clamp(min=1) - mean.square()).clamp_(min=0)
        self.resize(buckets, sums)
        self.data.copy_(torch.cat([mean, variance, number], -1))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and variance `[B,H,C,D]`, number `[B,H,C,1]`."""
        size = self.data.shape[-1] // 2
        mean, variance, number = self.data.split([size, size, 1], -1)
        return mean, variance, number

    def logits(self, query: Tensor) -> Tensor:
        """`[B,H,G,C]`: about the logarithm of the mean weight of a bucket's row for `query` `[B,H,G,D]`, -inf if empty.

        The logarithm of the mean of `exp(q.k / sqrt(D))` over Gaussian keys of independent dimensions is its mean
        exponent plus half the exponent's variance. Weight by row, not by bucket: a budget is of rows.
        """
        mean, variance, number = self.parts()
        asked = query.float() / query.shape[-1] ** 0.5
        logits = asked @ mean.mT + SPREAD / 2 * asked.square() @ variance.mT
        return logits.masked_fill(number.mT == 0, -torch.inf)

    @property
    def read(self) -> int:
        """Bytes of one KV head of one sequence."""
        return self.data[0, 0].nbytes


class Moments(Partitioned):
    """Ranks buckets by the mean weight that their rows would have if keys were Gaussian within a bucket.

    Mean and diagonal variance are of the context's own keys, after RoPE, so that near and far and what is particular to
    this prompt count, which no classifier trained beforehand can know. It needs SAAP's centroids, not its classifier.
    Arguments: see `Partitioned`; `group="softmax"` sums the query heads' shares.

    `scan_bytes`: 8 bytes a bucket and dimension, and the table.
    """

    def __init__(self, artefact: str = "reference", probes: int = 32, group: str = "softmax", span: int = 16) -> None:
        super().__init__(artefact, probes, group, span)
        self.moments = KeyMoments()

    def joined(self, rows: Rows, bucket: Tensor, own: Parameters) -> None:
        self.moments.add(rows.keys, bucket, own.buckets)

    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> tuple[Tensor, int, int]:
        return self.moments.logits(query), own.buckets, self.moments.read
