"""Codebooks of product quantisation by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.utils.hashing import stream

KMEANS = Operation(__package__, "torch", "numba")


def product_codebooks(
    keys: Tensor, parts: int, bits: int, seed: int, weights: Tensor | None = None, impl: str | None = None
) -> Tensor:
    """Return `[H,S,2^bits,d]` float32: k-means centroids of keys in each of S parts of d = D / S channels.

    Keys drawn at random are the first centroids. Fewer keys than centroids are their own.

    Args:
        keys: `[H,n,D]`.
        parts: S.
        bits: of a name.
        seed: of the first centroids.
        weights: `[H,n]` float32, what a key counts for in the mean of its centroid; None: 1.
        impl: see `implementations`.
    """
    centroids, keys = 1 << bits, keys.float()
    count = keys.shape[1]
    if count <= centroids:
        first = torch.arange(centroids, device=keys.device).clamp(max=count - 1)
    else:
        first = torch.randperm(count, generator=stream(seed, "centroids"))[:centroids].to(keys.device)
    books = keys[:, first].unflatten(2, (parts, -1)).transpose(1, 2).contiguous()
    if count <= centroids:
        return books
    weights = torch.ones_like(keys[..., 0]) if weights is None else weights
    return KMEANS.pick(impl, keys.device, keys.dtype).product_kmeans(keys, books, weights)
