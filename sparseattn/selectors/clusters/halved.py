"""Balanced clusters of keys: halved along the channel that varies most, until so many rows are left together."""

from __future__ import annotations

import torch
from torch import Tensor


def halved(keys: Tensor, real: Tensor, rows: int) -> Tensor:
    """Return the rows in an order in which every `rows` of them are a cluster.

    A run of clusters is sorted by the channel that has the largest variance among its real rows, and cut in the middle,
    the lower half of the clusters first. Rows that are not real come last.

    Args:
        keys: `[..,n,W]` float32, n a multiple of `rows`.
        real: `[..,n]` bool.
        rows: of a cluster.

    Returns:
        `[..,n]` int64, a permutation.
    """
    count = keys.shape[-2] // rows
    order = torch.arange(keys.shape[-2], device=keys.device).expand(real.shape).contiguous()
    runs = [(0, count)]
    while any(length > 1 for _, length in runs):
        for length in {length for _, length in runs if length > 1}:
            starts = torch.tensor([first for first, of in runs if of == length], device=keys.device) * rows
            place = (starts[:, None] + torch.arange(length * rows, device=keys.device)).flatten()
            _sort(keys, real, order, place, length * rows)
        runs = [half for run in runs for half in _halves(*run)]
    return order


def _halves(first: int, length: int) -> list[tuple[int, int]]:
    """Return a run of clusters as the two that it is cut into; itself where it is one cluster."""
    if length == 1:
        return [(first, length)]
    return [(first, length // 2), (first + length // 2, length - length // 2)]


def _sort(keys: Tensor, real: Tensor, order: Tensor, place: Tensor, size: int) -> None:
    """Sort each run of `size` rows at the places `place` of `order`, in place."""
    own = order[..., place]  # [..,R*size]
    points = keys.gather(-2, own[..., None].expand(*own.shape, keys.shape[-1])).unflatten(-2, (-1, size))
    there = real.gather(-1, own).unflatten(-1, (-1, size))  # [..,R,size]
    many = there.sum(-1).clamp(min=1)[..., None]
    points = points.masked_fill(~there[..., None], 0.0)
    mean = points.sum(-2) / many
    variance = ((points - mean[..., None, :]) * there[..., None]).square().sum(-2) / many  # [..,R,W]
    channel = variance.argmax(-1)[..., None, None].expand(*points.shape[:-1], 1)
    along = points.gather(-1, channel)[..., 0].masked_fill(~there, torch.inf)
    turn = along.argsort(dim=-1, stable=True)
    order[..., place] = own.unflatten(-1, (-1, size)).gather(-1, turn).flatten(-2)
