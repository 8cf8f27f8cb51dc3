"""Buckets ranked by what the context's own keys in them are like: their mean and variance. Ours; no paper's method.

The buckets are SAAP's, https://arxiv.org/abs/2502.08246.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.selectors.base import Rows
from sparseattn.selectors.clusters.bucket_table import CHUNK, Parameters, Partitioned
from sparseattn.selectors.parameters.saap_artefact import AUTO
from sparseattn.selectors.parameters.saap_partition import Partition
from sparseattn.selectors.saved_state import Loaded, Wanted, check_finite

SPREAD = 0.5  # weight of the variance's part; 1 were right for Gaussian keys of independent dimensions (see the log)


class KeyMoments(RowBuffer):
    """Mean, variance and number of the keys of every bucket, as attention sees them: `[B,H,C,2D+1]` float32."""

    def __init__(self) -> None:
        super().__init__(2)

    def fresh(self) -> KeyMoments:
        return KeyMoments()

    def add(self, keys: Tensor, bucket: Tensor, buckets: int) -> None:
        """Take in keys `[B,H,n,D]` of buckets `bucket` `[B,H,n]` int64, C = `buckets` for padding."""
        batch, heads, new, size = keys.shape
        if not self.rows:
            self.append(keys.new_zeros(batch, heads, buckets, 2 * size + 1, dtype=torch.float32))
        step = max(CHUNK // (batch * heads * size), 1)
        for first in range(0, new, step):
            part = slice(first, first + step)
            self._merge(keys[:, :, part].float(), bucket[:, :, part], buckets)

    def _merge(self, keys: Tensor, bucket: Tensor, buckets: int) -> None:
        """Merge means of sets by their difference (Chan et al. 1979): squares of long keys would cancel."""
        place = bucket[..., None].expand_as(keys)

        def summed(terms: Tensor) -> Tensor:  # [B,H,C+1,..], the padding's last
            zeros = terms.new_zeros(*terms.shape[:2], buckets + 1, terms.shape[-1])
            return zeros.scatter_add_(2, place[..., : terms.shape[-1]], terms)

        number = summed(torch.ones_like(keys[..., :1]))
        mean = summed(keys) / number.clamp(min=1)
        spread = summed((keys - mean.gather(2, place)).square())
        number, mean, spread = number[:, :, :-1], mean[:, :, :-1], spread[:, :, :-1]
        old_mean, old_variance, old_number = self.parts()
        total = (old_number + number).clamp(min=1)
        change = mean - old_mean
        spread = spread + old_variance * old_number + change.square() * old_number * number / total
        self.data.copy_(torch.cat([old_mean + change * number / total, spread / total, old_number + number], -1))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and variance `[B,H,C,D]`, number `[B,H,C,1]`."""
        size = self.data.shape[-1] // 2
        mean, variance, number = self.data.split([size, size, 1], -1)
        return mean, variance, number

    def logits(self, query: Tensor, temperature: float) -> Tensor:
        """Return about the logarithm of the mean weight of a bucket's row for `query` `[B,H,G,D]`: `[B,H,G,C]`, -inf if
        the bucket is empty.

        The logarithm of the mean of `exp(q.k / temperature)` over Gaussian keys of independent dimensions is its mean
        exponent plus half the exponent's variance. Weight by row, not by bucket: a budget is of rows.
        """
        mean, variance, number = self.parts()
        scaled = query.float() / temperature
        logits = scaled @ mean.mT + SPREAD / 2 * scaled.square() @ variance.mT
        return logits.masked_fill(number.mT == 0, -torch.inf)

    @staticmethod
    def wanted(rows: Rows, buckets: int) -> Wanted:
        """Return the dtype and shape for `rows` in C = `buckets`, under the name that methods give it."""
        batch, heads, _, size = rows.keys.shape
        return {"moments": (torch.float32, (batch, heads, buckets, 2 * size + 1))}

    @staticmethod
    def check(state: Loaded) -> None:
        """Refuse loaded moments that do not belong to the loaded edges: ValueError."""
        check_finite(state, "moments")
        moments, size = state["moments"], state["moments"].shape[-1] // 2
        if bool((moments[..., size : 2 * size] < 0).any()):
            raise ValueError("moments have a negative variance")
        if bool((moments[..., -1] != state["edges"][:, :, 0].diff()[..., :-1]).any()):
            raise ValueError("moments count other rows than the buckets hold")

    @staticmethod
    def read(size: int, buckets: int) -> int:
        """Return the bytes that a KV head of head_dim `size` reads of its sequence's moments."""
        return 4 * buckets * (2 * size + 1)

    @classmethod
    def launch(cls, query: Tensor, buckets: int) -> Launch:
        """Return the launch that makes `logits`; every sequence has its own moments."""
        size = query.shape[3]
        return products(query, buckets, 2 * size, cls.read(size, buckets))


class Moments(Partitioned):
    """Ranks buckets by the mean weight that their rows would have if keys were Gaussian within a bucket.

    Mean and diagonal variance are of the context's own keys, after RoPE, so that near and far and what is particular to
    this prompt count, which no classifier trained beforehand can know. It needs SAAP's centroids, not its classifier.
    Arguments: see `Partitioned`; `group="softmax"` sums what each query head's weights are after normalisation.

    `scan_bytes`: 8 bytes for each bucket and dimension, 4 for each bucket, and the table's (see `Partitioned`).
    """

    def __init__(self, artefact: str = AUTO, probes: int = 32, group: str = "softmax", span: int = 16) -> None:
        super().__init__(artefact, probes, group, span)
        self.moments = KeyMoments()

    def joined(self, rows: Rows, bucket: Tensor, own: Parameters) -> None:
        self.moments.add(rows.keys, bucket, own.buckets)

    def wanted(self, rows: Rows, buckets: int) -> Wanted:
        return KeyMoments.wanted(rows, buckets)

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        super().check_state(state, rows, order)
        KeyMoments.check(state)

    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> Tensor:
        return self.moments.logits(query, self.temperature(query.shape[-1]))

    def ranking_scan(self, query: Tensor, sealed: int, partition: Partition) -> Scan:
        buckets = partition.centroids.shape[1]
        return Scan(buckets, KeyMoments.read(query.shape[3], buckets), (KeyMoments.launch(query, buckets),))
