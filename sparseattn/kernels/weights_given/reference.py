"""What queries give to rows, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 8192  # whose logits lie in memory at a time


def weights_given(queries: Tensor, total: Tensor, keys: Tensor, scale: float) -> Tensor:
    """As `dispatch.weights_given`."""
    wide = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), torch.float32)
    asked = queries.to(wide) * scale
    parts = []
    for part in keys.split(ROWS, 2):
        above = (asked @ part.to(wide).mT - total[..., None]).clamp(max=0)
        parts.append(above.exp().sum(2).float())
    return torch.cat(parts, 2)
