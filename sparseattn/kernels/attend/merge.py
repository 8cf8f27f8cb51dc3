"""Attention over disjoint sets of rows combines exactly: (out, lse) is a monoid.

The same three lines serve the splits of a kernel, a CPU part and a GPU part, and shards on several ranks
(RetrievalAttention, https://arxiv.org/abs/2409.10516, appendix; FlashDecoding).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Compute attention over the union of P disjoint sets of rows, from the attention over each.

    Args:
        out: `[P,...,D]` attention outputs; of an empty set, 0.
        lse: `[P,...]` natural logarithms of the sums of exponentiated logits; of an empty set, -inf.

    Returns:
        out `[...,D]` in `out`'s dtype, lse `[...]`; 0 and -inf where every set is empty.
    """
    if out.shape[:-1] != lse.shape:
        raise ValueError(f"merge takes out [P,...,D] and lse [P,...], got {list(out.shape)} and {list(lse.shape)}")
    total = torch.logsumexp(lse, 0)
    return (share(lse, total)[..., None] * out).sum(0).to(out.dtype), total


def share(lse: Tensor, total: Tensor) -> Tensor:
    """`[...]`: what a set of rows with the log-sum-exp `lse` weighs in a whole with `total`; 0 where that is empty."""
    return torch.exp(lse - torch.where(total.isinf(), 0.0, total))
