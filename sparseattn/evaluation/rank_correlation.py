"""Spearman's rank correlation."""

from __future__ import annotations

import torch
from torch import Tensor


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's rank correlation of `[...,n]` with `[...,n]` over the last dimension: `[...]` float64.

    Equal numbers have the mean of their ranks. NaN where one side is constant, as n < 2 is: it has no order.
    """
    x, y = (ranks - ranks.mean(-1, keepdim=True) for ranks in (_ranks(a), _ranks(b)))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


def _ranks(values: Tensor) -> Tensor:
    """From 0, `[...,n]` float64: the mean of the first and the last place that each number has in order."""
    values = values.contiguous()
    ordered = values.sort(dim=-1).values
    first, after = (torch.searchsorted(ordered, values, right=right) for right in (False, True))
    return (first + after - 1).double() / 2
