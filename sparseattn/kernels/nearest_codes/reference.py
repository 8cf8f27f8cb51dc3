"""Names of the nearest centroids, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import codebooks

CHUNK = 1 << 20  # numbers that are turned at a time: few enough to be in the processor's caches when they are named


def names(keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """As `dispatch.names`."""
    batch, heads, _, size = keys.shape
    parts = keys.split(max(1, CHUNK // (batch * heads * size)), 2)
    return torch.cat([codebooks.nearest(_turned(part, turn), books) for part in parts], 2).mT


def paired_names(keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """As `dispatch.paired_names`."""
    return codebooks.paired(names(keys, books, turn).mT).mT


def _turned(keys: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
    if turn is None:
        return keys.float()
    matrix, moved = turn
    flat = torch.baddbmm(moved[:, :, None].flatten(0, 1), keys.float().flatten(0, 1), matrix.float().mT.flatten(0, 1))
    return flat.view(keys.shape)
