"""Products of query heads with listed keys in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(query: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """As `dispatch.listed_scores`."""
    batch, chosen = ids.shape[:2]
    b = torch.arange(batch, device=ids.device)[:, None, None]
    h = (torch.arange(chosen, device=ids.device) // query.shape[2])[None, :, None]
    rows = keys[b, h, ids.clamp(min=0)].float()  # [B,Hs,n,D]
    products = (rows @ query.float().reshape(batch, chosen, -1, 1))[..., 0]
    repeated = torch.nn.functional.pad(ids[..., 1:] == ids[..., :-1], (1, 0))
    return products.masked_fill(repeated | (ids < 0), -torch.inf)
