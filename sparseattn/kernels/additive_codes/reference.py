"""Names of the centroids whose sum is nearest to a key, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 21  # numbers of beams and centroids held at a time


def sums(keys: Tensor, less: Tensor, halves: Tensor, grams: Tensor, codes: int, beams: int) -> Tensor:
    """Return names `[B,H,M,n]` uint8, see `dispatch.names`.

    Args:
        keys: `[B,H,n,D]`.
        less: `[B,H,M*K,D]` float32, the centroids of all codebooks as keys meet them, taken from 0.
        halves: `[B,H,M*K]` float32, what each adds to half the squared distance beside its product with a key.
        grams: `[B,H,M*K,M*K]` float32, the products of centroids with centroids.
        codes: M.
        beams: partial sums that are kept; of equally near ones those of the first beams and centroids.
    """
    entries = less.shape[2] // codes
    once = max(CHUNK // (beams * entries), 1)
    found = []
    for own, matrix, half, gram in zip(*(part.flatten(0, 1) for part in (keys, less, halves, grams)), strict=True):
        blocks = gram.view(codes, entries, codes, entries)
        parts = [_nearest(part.float() @ matrix.mT + half, blocks, beams) for part in own.split(once)]
        found.append(torch.cat(parts, 1) if parts else own.new_zeros(codes, 0, dtype=torch.uint8))
    return torch.stack(found).unflatten(0, keys.shape[:2])


def _nearest(alone: Tensor, grams: Tensor, beams: int) -> Tensor:
    """Return names `[M,n]` uint8; alone: `[n,M*K]`, half a squared distance of each centroid by itself; grams:
    `[M,K,M,K]`."""
    codes, entries = grams.shape[:2]
    alone = alone.view(-1, codes, entries)
    far = alone.new_zeros(len(alone), 1)
    names = alone.new_zeros(len(alone), 1, 0, dtype=torch.long)
    for m in range(codes):
        each = (alone[:, m, None] + far[..., None]).contiguous()  # [n,b,K]
        for j in range(m):
            each += grams[j, :, m][names[:, :, j]]
        far, place = each.flatten(1).topk(min(beams, each.shape[1] * entries), 1, largest=False)
        source = (place // entries)[..., None].expand(-1, -1, m)
        names = torch.cat([names.gather(1, source), (place % entries)[..., None]], 2)
    return names[:, 0].mT.to(torch.uint8)
