"""Codebooks whose sums stand for keys: residual k-means, then least squares for all codebooks together.

Additive quantisation, https://doi.org/10.1109/CVPR.2014.124; least squares by turns with a beam search is its training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.additive_codes import dispatch as additive_codes
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks

ROUNDS = 2  # of least squares; two more find about as much (the log, 2026-11-30)
RIDGE = 1e-3  # of a centroid's mean weight: one that few keys name stays where it was


def additive_books(keys: Tensor, codes: int, bits: int, seed: int, weights: Tensor | None = None) -> Tensor:
    """Return `[H,M,2^bits,D]` float32, one centroid of each of which is a key's.

    Args:
        keys: `[H,n,D]` float32.
        codes: M.
        bits: of a name.
        seed: of the first centroids.
        weights: `[H,n]` float32, what a key's error counts for; None: 1.
    """
    weights = torch.ones_like(keys[..., 0]) if weights is None else weights
    left, books = keys, []
    for m in range(codes):
        book = product_codebooks(left, 1, bits, seed + m, weights)  # [H,1,K,D]
        named = additive_codes.names(left[None], book[None], beams=1)[0, :, 0].long()  # [H,n]
        left = left - book[:, 0].gather(1, named[..., None].expand_as(left))
        books.append(book)
    found = torch.cat(books, 1)
    for _ in range(ROUNDS):
        named = additive_codes.names(keys[None], found[None])[0].long()  # [H,M,n]
        found = torch.stack([_fitted(*of_head) for of_head in zip(keys, named, found, weights, strict=True)])
    return found


def _fitted(keys: Tensor, named: Tensor, books: Tensor, weights: Tensor) -> Tensor:
    """Return the codebooks `[M,K,D]` with the least weighted squared error of keys `[n,D]` named `[M,n]`."""
    codes, entries, size = books.shape
    every = codes * entries
    counts = weights.double()
    together = torch.zeros(codes, entries, codes, entries, dtype=torch.double, device=keys.device)
    wanted = torch.zeros(codes, entries, size, dtype=torch.double, device=keys.device)
    for i in range(codes):
        wanted[i].index_add_(0, named[i], counts[:, None] * keys)
        for j in range(i + 1):
            pairs = torch.bincount(named[i] * entries + named[j], counts, entries**2).view(entries, entries)
            together[i, :, j], together[j, :, i] = pairs, pairs.mT
    together, wanted = together.view(every, every), wanted.view(every, size)
    ridge = (RIDGE * counts.sum() / entries).clamp(min=torch.finfo(torch.float32).tiny)
    together += ridge * torch.eye(every, dtype=torch.double, device=keys.device)
    fitted = torch.linalg.solve(together, wanted + ridge * books.flatten(0, 1))
    return fitted.view(books.shape).float()
