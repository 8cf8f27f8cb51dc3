"""Codebooks of product quantisation, by k-means in each part of the channels: by faiss, or in torch without it.

https://doi.org/10.1109/TPAMI.2010.57
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels import codebooks
from sparseattn.kernels.nearest import in_threads, load_faiss
from sparseattn.utils.hashing import stream

ROUNDS = 25  # of k-means, faiss's own number


def product_codebooks(keys: Tensor, parts: int, bits: int, seed: int, weights: Tensor | None = None) -> Tensor:
    """Return `[H,S,2^bits,d]` float32: k-means centroids of keys in each of S parts of d = D / S channels.

    faiss finds them for tensors in host memory where it is installed, torch otherwise. Fewer keys than centroids are
    their own.

    Args:
        keys: `[H,n,D]`.
        parts: S.
        bits: of a name.
        seed: of the first centroids.
        weights: `[H,n]` float32, what a key counts for in the mean of its centroid; None: 1.
    """
    heads, count, size = keys.shape
    centroids = 1 << bits
    if count <= centroids:
        own = keys[:, torch.arange(centroids, device=keys.device).clamp(max=count - 1)]
        return own.unflatten(2, (parts, -1)).transpose(1, 2).float().contiguous()
    if keys.device.type != "cpu" or importlib.util.find_spec("faiss") is None:
        return by_torch(keys.float(), parts, centroids, seed, weights)
    books = torch.empty(heads, parts, centroids, size // parts)

    def learn(h: int) -> None:
        if weights is None:
            books[h] = _by_faiss(keys[h].float(), parts, bits, seed)
        else:
            for s, part in enumerate(keys[h].float().chunk(parts, 1)):
                books[h, s] = _weighted_by_faiss(part, weights[h], bits, seed)

    in_threads(learn, range(heads))
    return books


def _by_faiss(keys: Tensor, parts: int, bits: int, seed: int) -> Tensor:
    """Return `[S,2^bits,d]` of keys `[n,D]`."""
    faiss = load_faiss()
    trained: Any = faiss.ProductQuantizer(keys.shape[1], parts, bits)
    trained.cp.seed, trained.cp.min_points_per_centroid = seed, 1  # below the minimum faiss prints a warning
    trained.cp.max_points_per_centroid = len(keys)  # what it is given is the sample
    trained.train(keys.contiguous().numpy())
    return torch.from_numpy(faiss.vector_to_array(trained.centroids)).view(parts, 1 << bits, -1)


def _weighted_by_faiss(keys: Tensor, weights: Tensor, bits: int, seed: int) -> Tensor:
    """Return `[2^bits,d]` of keys `[n,d]` with weights `[n]`."""
    trained: Any = load_faiss().Kmeans(
        keys.shape[1],
        1 << bits,
        niter=ROUNDS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(keys),
    )
    trained.train(keys.contiguous().numpy(), weights=weights.contiguous().numpy())
    return torch.from_numpy(trained.centroids)


def by_torch(keys: Tensor, parts: int, centroids: int, seed: int, weights: Tensor | None = None) -> Tensor:
    """Return `[H,S,centroids,d]` of keys `[H,n,D]` float32, n more than the centroids, on their device.

    Keys drawn at random are the first centroids. One that loses all of its keys takes a key of the fullest.
    """
    first = torch.randperm(keys.shape[1], generator=stream(seed, "centroids"))[:centroids].to(keys.device)
    cut = keys.unflatten(2, (parts, -1)).transpose(1, 2).contiguous()  # [H,S,n,d]
    books = cut[:, :, first]
    counts_for = torch.ones_like(cut[..., 0]) if weights is None else weights[:, None].expand(cut.shape[:3])
    weighted = cut * counts_for[..., None]
    for _ in range(ROUNDS):
        name = codebooks.nearest(keys[None], books[None])[0].long().transpose(1, 2)  # [H,S,n]
        count = torch.zeros_like(books[..., 0]).scatter_add_(2, name, counts_for)
        total = torch.zeros_like(books).scatter_add_(2, name[..., None].expand_as(cut), weighted)
        mean = total / torch.where(count > 0, count, 1)[..., None]
        # As many of the fullest centroids as are empty are split: both halves are near the centroid, on either side.
        order = count.argsort(dim=2, descending=True, stable=True)
        empty = count == 0
        turn = empty.cumsum(2) - 1
        source = order.gather(2, turn.clamp(min=0))[..., None].expand_as(mean)
        books = torch.where(empty[..., None], mean.gather(2, source) * (1 + 1 / 1024), mean)
    return books
