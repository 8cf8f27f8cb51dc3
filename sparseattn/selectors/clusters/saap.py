"""SAAP: keys in k-means buckets, queries sent to buckets by a trained classifier. https://arxiv.org/abs/2502.08246"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.step_cost import Launch, Scan, products
from sparseattn.kernels.implementations import choose
from sparseattn.kernels.linear.dispatch import FEW
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import Rows
from sparseattn.selectors.clusters.bucket_table import Parameters, Partitioned
from sparseattn.selectors.clusters.moments import KeyMoments
from sparseattn.selectors.parameters.saap_artefact import AUTO
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.selectors.saved_state import Loaded, Wanted


class SAAP(Partitioned):
    """Ranks the buckets by the probabilities that a classifier gives them, summed over the query group (Eq. 2).

    The classifier learns which share of a query's attention falls in each bucket. It is computed in float32 with batch
    normalisation folded in; its weights are rounded to a 16-bit model's dtype where numba's code reads them. The
    paper's setting is sink 1, window 2047, layer 0 dense: the first two are the cache's, the last is the caller's
    choice. `group="each"` is the paper's ablation of independent queries.

    Args:
        artefact, probes, group, span: see `Partitioned`.
        context: ours: share of the ranking that goes to the moments of the context's own keys (see `Moments`) instead
            of the classifier, 0 (the paper) to 1. Logits are mixed; 0.8 found most on the reference model.

    Raises:
        ValueError: see `Partitioned`; a context that is no share; an artefact without a classifier, in `select`.
    """

    def __init__(
        self,
        artefact: str = AUTO,
        probes: int = 32,
        group: str = "softmax",
        span: int = 16,
        context: float = 0.0,
    ) -> None:
        super().__init__(artefact, probes, group, span)
        if not 0 <= context <= 1:
            raise ValueError(f"context is a share, 0 (the classifier alone) to 1 (the context's keys), got {context}")
        self.context = context
        self.moments = KeyMoments()

    def joined(self, rows: Rows, bucket: Tensor, own: Parameters) -> None:
        if self.context:
            self.moments.add(rows.keys, bucket, own.buckets)

    def wanted(self, rows: Rows, buckets: int) -> Wanted:
        return KeyMoments.wanted(rows, buckets) if self.context else {}

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        super().check_state(state, rows, order)
        if self.context:
            KeyMoments.check(state)

    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> Tensor:
        classifier, share = own.partition.classifier, self.context
        assert classifier is not None
        batch, heads, group, size = query.shape
        plain = own.plain(query, positions[:, None])
        logits = classifier.logits(plain.reshape(batch, len(classifier.w1), -1, size))  # [B,H or H*G,G or 1,C]
        logits = logits.view(batch, heads, group, -1)
        if not share:
            return logits
        return (1 - share) * logits + share * self.moments.logits(query, self.temperature(size))

    def ranking_scan(self, query: Tensor, sealed: int, partition: Partition) -> Scan:
        classifier = partition.classifier
        assert classifier is not None
        (_, heads, _, size), (_, buckets, hidden) = query.shape, classifier.w2.shape
        read, queries = self._classifier_bytes(classifier, heads), query.shape[:3].numel()
        numbers = sum(part.numel() for part in classifier.tensors().values())
        many = queries // len(classifier.w1) > FEW[min(query.dtype.itemsize, 4)]
        kind, flops = "network" if many else "classifier", 2.0 * queries * hidden * (size + buckets)
        launch = Launch(kind, bytes=heads * read, flops=flops, entries=numbers)
        if self.context:
            moments = KeyMoments.launch(query, buckets)
            launch = replace(launch, bytes=launch.bytes + moments.bytes, flops=flops + moments.flops)
            read += KeyMoments.read(size, buckets)
        return Scan(buckets, read, (launch,))

    def _classifier_bytes(self, classifier: Classifier, heads: int) -> int:
        """Return the bytes of one of so many KV heads; where keys count as 16 bits weights count as `_used` would keep
        them then."""
        narrow, parts = self.layer_context.key_bytes == 2, classifier.tensors().values()
        return sum(part.numel() * (2 if narrow and part.ndim == 3 else part.element_size()) for part in parts) // heads

    def _used(self, partition: Partition, like: Tensor) -> Partition:
        classifier = partition.classifier
        if classifier is None:
            raise ValueError(
                f"the artefact of {self.trained().meta.get('model', 'a model')} holds no query classifier for layer "
                f"{self.layer}, which SAAP needs: train one, or use KMeans"
            )
        if like.element_size() == 2 and choose(None, like.device, like.dtype) == "numba":
            # Weights are most of what a step reads. In the model's own 16 bits they are half of it.
            weights = {name: part.to(like.dtype) for name, part in classifier.tensors().items() if part.ndim == 3}
            classifier = replace(classifier, **weights)
        return Partition(partition.centroids, classifier)


class PerfectBuckets(ReadsKeys, Partitioned):
    """Ranks the buckets by the attention that they hold: SAAP with a perfect classifier. For measuring only.

    Scores every sealed key, so that what SAAP loses to a classifier and what to the partition are told apart. A group
    sums the shares that its query heads' attention to the sealed rows has in a bucket. No bound of what can be found:
    where a budget cuts, an order by share per row would be better still.
    Arguments: see `Partitioned`.
    """

    def fix(self, rows: int, seal: int) -> None:
        raise ValueError(f"{self} looks up every row's bucket on the host: build the KVCache without fixed=True")

    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> Tensor:
        keys, bucket, buckets = self.stored_keys(), self._stored(), own.buckets
        padding = bucket == buckets  # [B,H,N]
        logits = query.double() @ keys.double().mT / self.temperature(query.shape[-1])  # float64: small shares rank too
        weights = logits.masked_fill(padding[:, :, None], -torch.inf).softmax(-1).nan_to_num(0.0)  # [B,H,G,N]
        share = weights.new_zeros(*query.shape[:3], buckets + 1)
        share.scatter_add_(3, bucket[:, :, None].expand_as(weights), weights)
        return share[..., :-1].log()

    def ranking_scan(self, query: Tensor, sealed: int, partition: Partition) -> Scan:
        read = sealed * query.shape[3] * self.bytes_of(query)
        return Scan(sealed, read, (products(query, sealed, query.shape[3], read),))
