"""Names of the nearest centroids, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import codebooks

CHUNK = 1 << 20  # numbers that are turned at a time: few enough to be in the processor's caches when they are named


def names(
    keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None, errors: Tensor | None = None
) -> Tensor:
    """As `dispatch.names`."""
    batch, heads, _, size = keys.shape
    few, found = max(1, CHUNK // (batch * heads * size)), []
    for first, part in zip(range(0, max(keys.shape[2], 1), few), keys.split(few, 2), strict=True):
        turned = _turned(part, turn)
        found.append(codebooks.nearest(turned, books))
        if errors is not None:
            errors[:, :, first : first + few] = (turned - codebooks.decoded(found[-1], books)).square().sum(3)
    return torch.cat(found, 2).mT


def paired_names(
    keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None, errors: Tensor | None = None
) -> Tensor:
    """As `dispatch.paired_names`."""
    return codebooks.paired(names(keys, books, turn, errors).mT).mT


def _turned(keys: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
    if turn is None:
        return keys.float()
    matrix, moved = turn
    flat = torch.baddbmm(moved[:, :, None].flatten(0, 1), keys.float().flatten(0, 1), matrix.float().mT.flatten(0, 1))
    return flat.view(keys.shape)
