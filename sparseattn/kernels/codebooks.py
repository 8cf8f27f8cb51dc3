"""Keys as bytes that name centroids: how they are chosen, packed and scored. In torch, which is the specification.

The channels are cut into subspaces of d consecutive ones, each with a codebook of its own: to 256 centroids, or 16, of
which a byte names two. So a key of M bytes is read as centroids behind each other (product quantisation,
https://doi.org/10.1109/TPAMI.2010.57), and a query's product with it is a sum of M numbers from tables of the query's
products with all centroids.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 16  # centroids of a codebook of which a byte names two
BYTE = 256  # that a byte names one of; names of more have 16 bits
CHUNK = 1 << 22  # distances held at a time, 16 MiB


def nearest(keys: Tensor, books: Tensor) -> Tensor:
    """`[B,H,n,S]` uint8, int16 with more than 256 centroids: of keys `[B,H,n,D]`, the nearest centroid in each of the S
    subspaces of `[B,H,S,K,d]`."""
    batch, heads, count, _ = keys.shape
    subspaces, centroids, size = books.shape[2:]
    flat = books.float().flatten(0, 2)  # [BHS,K,d]
    half = flat.square().sum(-1)[:, None] / 2  # [BHS,1,K]
    kind = torch.uint8 if centroids <= BYTE else torch.int16
    names = keys.new_empty(batch, heads, count, subspaces, dtype=kind)
    once = max(CHUNK // (len(flat) * centroids), 1)  # rows
    for part, out in zip(keys.split(once, 2), names.split(once, 2), strict=True):
        cut = part.float().unflatten(3, (subspaces, size)).transpose(2, 3).flatten(0, 2)  # [BHS,n,d]
        closest = torch.baddbmm(half, cut, flat.mT, alpha=-1).argmin(-1)  # half the distance less |k|^2 / 2
        out.copy_(closest.unflatten(0, (batch, heads, subspaces)).transpose(2, 3))
    return names


def decoded(names: Tensor, books: Tensor) -> Tensor:
    """Return the keys `[...,n,S*d]` that names `[...,n,S]` stand for in codebooks `[...,S,K,d]`."""
    placed = names.long().mT[..., None]  # [...,S,n,1]
    return books.gather(-2, placed.expand(*placed.shape[:-1], books.shape[-1])).transpose(-3, -2).flatten(-2)


def paired(names: Tensor) -> Tensor:
    """`[..,S/2]`: names `[..,S]` uint8 below 16, two a byte, the first in its low bits; a last one without a second
    stands alone."""
    low, high = torch.nn.functional.pad(names, (0, names.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpaired(names: Tensor, count: int) -> Tensor:
    """Return `[..,S]` of what `paired` made of them, S given as `count`."""
    return torch.stack([names & 15, names >> 4], -1).flatten(-2)[..., :count]


def products(query: Tensor, books: Tensor) -> Tensor:
    """`[B,H,G,S,K]` float32: the products of queries `[B,H,G,S*d]` with the centroids `[B,H,S,K,d]`, or of queries
    `[B,H,G,D]` with centroids `[B,H,S,K,D]` of all channels."""
    whole = query.float()
    if books.shape[4] == query.shape[3]:
        return (whole[:, :, None] @ books.float().mT).transpose(2, 3)
    cut = whole.unflatten(3, (books.shape[2], books.shape[4])).transpose(2, 3)  # [B,H,S,G,d]
    return (cut @ books.float().mT).transpose(2, 3)


def tables(query: Tensor, books: Tensor) -> Tensor:
    """Return what each byte adds to the product of a query with a key.

    Args:
        query: `[B,H,G,S*d]`.
        books: `[B,H,S,K,d]`, K to 256; 16: two a byte.

    Returns:
        `[B,H,G,M,K]` float32, M = S; with two a byte `[B,H,G,M,256]`, M half of it.
    """
    each = products(query, books)
    if each.shape[4] != HALF:
        return each
    low, high = torch.nn.functional.pad(each, (0, 0, 0, each.shape[3] % 2)).unflatten(3, (-1, 2)).unbind(4)
    return (high[..., None] + low[..., None, :]).flatten(4)


def logits(tables: Tensor, codes: Tensor, real: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the logits of rows by their codes.

    Args:
        tables: `[B,H,G,M,K]` float32, what a centroid adds to the logit.
        codes: `[B,H,N,M]` uint8 or int16, below K.
        real: `[B,N]` bool, or `[B,H,N]`.
        weights: `[B,H,N,M]` float32, by which each number from a table is multiplied; None: 1.

    Returns:
        `[B,H,G,N]` float32, -inf where a row is not real.
    """
    batch, heads, group, subspaces, entries = tables.shape
    place = torch.arange(batch * heads * subspaces, dtype=torch.int32, device=codes.device) * entries
    names = codes.int() + place.view(batch, heads, 1, subspaces)  # [B,H,N,M]
    flat = tables.permute(0, 1, 3, 4, 2).reshape(-1, group)  # [BHM*K,G]
    # Rows of a table summed: 1.6 times as fast as `gather` on a CPU (SmolLM2's shapes, 8,192 rows)
    sums = torch.nn.functional.embedding_bag(
        names.flatten(0, 2), flat, mode="sum", per_sample_weights=None if weights is None else weights.flatten(0, 2)
    )
    out = sums.view(batch, heads, -1, group).mT
    real = real[:, None] if real.ndim == 2 else real
    return out.masked_fill(~real[:, :, None], -torch.inf)
