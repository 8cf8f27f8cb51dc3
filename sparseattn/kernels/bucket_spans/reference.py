"""The rows of buckets as spans in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection


def spans(ids: Tensor, edges: Tensor, span: int, budget: int, slots: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.bucket_spans`."""
    (batch, chosen, probed), (heads, segments) = ids.shape, edges.shape[1:3]
    place = ids.reshape(batch, heads, 1, -1).expand(-1, -1, segments, -1)
    start = edges.gather(3, place)  # [B,H,R,each*P]
    length = edges.gather(3, place + 1) - start
    start, length = (  # [B,Hs,P*R], best bucket first, its oldest rows first
        x.unflatten(3, (-1, probed)).permute(0, 1, 3, 4, 2).reshape(batch, chosen, -1) for x in (start, length)
    )
    runs = Selection.runs(start, length, span, min(budget, slots * span))
    unused = max(slots - runs.start.shape[2], 0)  # fewer rows than slots
    start, length = (torch.nn.functional.pad(x[..., :slots], (0, unused)) for x in (runs.start, runs.length))
    return start, length
