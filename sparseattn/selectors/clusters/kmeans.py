"""k-means, SAAP's symmetric baseline: a query visits the buckets of its nearest centroids.

https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sparseattn.core.step_cost import Scan, products
from sparseattn.selectors.clusters.bucket_table import Parameters, Partitioned
from sparseattn.selectors.parameters.saap_partition import Partition


class KMeans(Partitioned):
    """Ranks the buckets by `softmax(<q,c> / sqrt(D))`, q the query and c a centroid; with roped or de-roped vectors, as
    the artefact was trained.

    The paper does not say how a group combines its ranks: by default as SAAP does, by the sum of probabilities
    (`group="softmax"`); "sum" is the sum of the raw products. Other arguments: see `Partitioned`.
    """

    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> Tensor:
        return own.plain(query, positions[:, None]) @ own.partition.centroids.mT / self.temperature(query.shape[-1])

    def ranking_scan(self, query: Tensor, sealed: int, partition: Partition) -> Scan:
        centroids = partition.centroids  # which a step reads in float32
        buckets, read = centroids.shape[1], 4 * centroids[0].numel()
        return Scan(buckets, read, (replace(products(query, buckets, query.shape[3]), bytes=query.shape[1] * read),))
