"""k-means of the parts of keys, in torch on their device, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import codebooks

ROUNDS = 25  # of k-means, faiss's own number
NEAR = 1 + 1 / 1024  # times a centroid: where a second one beside it begins


def product_kmeans(keys: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """Return the centroids after 25 rounds, or as soon as no key's nearest one changes.

    A centroid without a key is put beside a full one: the first of them beside the fullest, each beside another one.

    Args:
        keys: `[H,n,S*d]` float32.
        first: `[H,S,K,d]` float32, the centroids to begin with.
        weights: `[H,n]` float32, what a key counts for in the mean of its centroid.
    """
    parts = first.shape[1]
    cut = keys.unflatten(2, (parts, -1)).transpose(1, 2)  # [H,S,n,d]
    counts_for = weights[:, None].expand(cut.shape[:3])
    weighted = cut * counts_for[..., None]
    books, last = first, None
    for _ in range(ROUNDS):
        name = codebooks.nearest(keys[None], books[None])[0].long().transpose(1, 2)  # [H,S,n]
        count = torch.zeros_like(books[..., 0]).scatter_add_(2, name, counts_for)
        total = torch.zeros_like(books).scatter_add_(2, name[..., None].expand_as(cut), weighted)
        mean = total / torch.where(count > 0, count, 1)[..., None]
        order = count.argsort(dim=2, descending=True, stable=True)
        empty = count == 0
        turn = empty.cumsum(2) - 1
        source = order.gather(2, turn.clamp(min=0))[..., None].expand_as(mean)
        books = torch.where(empty[..., None], mean.gather(2, source) * NEAR, mean)
        if last is not None and torch.equal(name, last):
            break
        last = name
    return books
