"""Attention over disjoint sets of rows combines exactly: (out, lse) is a monoid.

The same three lines serve the splits of a kernel, a CPU part and a GPU part, and shards on several ranks
(RetrievalAttention, https://arxiv.org/abs/2409.10516, appendix; FlashDecoding).
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of P disjoint sets of rows, from the attention over each.

    Args:
        out: `[P,...,D]` attention outputs; of an empty set, 0.
        lse: `[P,...]` natural logarithms of the sums of exponentiated logits; of an empty set, -inf.

    Returns:
        out `[...,D]` in `out`'s dtype, lse `[...]`; 0 and -inf where every set is empty.
    """
    if out.shape[:-1] != lse.shape:
        raise ValueError(f"merge takes out [P,...,D] and lse [P,...], got {list(out.shape)} and {list(lse.shape)}")
    total = torch.logsumexp(lse, 0)
    weight = torch.exp(lse - torch.where(total.isinf(), 0.0, total))
    return (weight[..., None] * out).sum(0).to(out.dtype), total
