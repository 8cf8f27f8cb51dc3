"""The rows of chosen buckets as spans, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

SPANS = Operation(__package__, "torch", "numba", "triton")


def bucket_spans(
    ids: Tensor, edges: Tensor, span: int, budget: int, slots: int, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows of some buckets, best first, as spans, stopped at `budget` rows.

    Args:
        ids: `[B,Hs,P]` int64, different buckets, Hs a multiple of H.
        edges: `[B,H,R,C+2]` int32: the rows of bucket c in segment r are `edges[c]` to `edges[c + 1]`.
        span: longest span, a power of two.
        budget: rows per selection head. What does not fit in `slots` is left out.
        slots: S.
        impl: see `implementations`.

    Returns:
        start, length `[B,Hs,S]` int32, the oldest rows of a bucket first.
    """
    return SPANS.pick(impl, ids.device, torch.float32).spans(ids, edges, span, budget, slots)
