"""Choose the candidates with the highest scores, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

ROWS = Operation(__package__, "torch", "numba", "triton")
PAGES = Operation(__package__, "torch", "numba", "triton")


def best(scores: Tensor, count: int) -> Tensor:
    """Return the `count` highest of `[B,Hs,N]`, best first: `[B,Hs,S]` int64, -1 for a score of -inf. S <= N."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return torch.where(top.values.isneginf(), -1, top.indices)


def best_rows(scores: Tensor, count: int, impl: str | None = None) -> Tensor:
    """Return the candidates with the `count` highest scores, in no order.

    Args:
        scores: `[B,Hs,N]`, -inf for what must not be chosen.
        impl: "torch", "numba", which takes float32, or "triton", see `implementations`.

    Returns:
        `[B,Hs,S]` int32, S = min(count, N); -1 where there are fewer. Of candidates with the same score any may be
        chosen.
    """
    torch_only = scores.dtype != torch.float32 or scores.requires_grad
    return ROWS.pick(impl, scores.device, scores.dtype, torch_only).best_rows(scores, count)


def best_pages(scores: Tensor, count: int, page: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the rows of the pages with the `count` highest scores, in no order.

    Args:
        scores: `[B,Hs,P]`, -inf for a page that must not be chosen.
        page: rows of a page.
        impl: "torch", "numba", which takes float32, or "triton", see `implementations`.

    Returns:
        start, length `[B,Hs,S]` int32, S = min(count, P); length 0 where there are fewer pages. Of pages with the same
        score any may be chosen.
    """
    torch_only = not scores.is_cuda and (scores.dtype != torch.float32 or scores.requires_grad)
    return PAGES.pick(impl, scores.device, scores.dtype, torch_only).best_pages(scores, count, page)
