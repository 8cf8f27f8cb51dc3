"""k-means, SAAP's symmetric baseline: a query visits the buckets of its nearest centroids.

https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sparseattn.core.step_cost import Launch, products
from sparseattn.selectors.base import StepContext
from sparseattn.selectors.clusters.bucket_table import Parameters, Partitioned
from sparseattn.selectors.parameters.saap_artefact import Partition


class KMeans(Partitioned):
    """Ranks the buckets by `softmax(<q,c> / sqrt(D))`, q the query and c a centroid; with roped or de-roped vectors, as
    the artefact was trained.

    The paper does not say how a group combines its ranks: by default as SAAP does, by the sum of probabilities
    (`group="softmax"`); "sum" is the sum of the raw products. Other arguments: see `Partitioned`.
    """

    def rank(self, query: Tensor, step: StepContext, own: Parameters) -> tuple[Tensor, int, int]:
        centroids = own.partition.centroids
        products = own.plain(query, step.positions[:, None]) @ centroids.mT  # [B,H,G,C]
        return products / self.temperature(query.shape[-1]), own.buckets, _bytes(centroids)

    def model(self, query: Tensor, partition: Partition) -> tuple[int, Launch]:
        read, buckets = _bytes(partition.centroids), partition.centroids.shape[1]
        launch = products(query, buckets, query.shape[3])
        return read, replace(launch, bytes=query.shape[1] * read)


def _bytes(centroids: Tensor) -> int:
    """Of those of one of the KV heads of `[H,C,D]`, which a step reads in float32."""
    return 4 * centroids[0].numel()
