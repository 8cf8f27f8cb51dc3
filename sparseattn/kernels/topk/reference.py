"""The candidates with the highest scores in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def best_rows(scores: Tensor, count: int) -> Tensor:
    """As `dispatch.best_rows`."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    return torch.where(top.values.isneginf(), -1, top.indices).int()


def best_pages(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_pages`."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    return (top.indices * page).int(), top.values.ne(-torch.inf).int() * page
