"""Products of query heads with every key, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def row_scores(query: Tensor, keys: Tensor) -> Tensor:
    """As `dispatch.row_scores`."""
    wide = torch.promote_types(torch.promote_types(query.dtype, keys.dtype), torch.float32)
    return query.to(wide) @ keys.to(wide).mT
