"""Codes of sequences' rows from a shared store in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(store: Tensor, table: Tensor) -> Tensor:
    """As `dispatch.gather`."""
    return store[table.long().clamp(min=0)].permute(0, 2, 3, 1, 4).flatten(3)  # of [B,E,H,M,unit]


def gather_missed(store: Tensor, table: Tensor, width: int, unit: int) -> Tensor:
    """As `dispatch.gather_missed`."""
    listed = store[table.long().clamp(min=0)].transpose(1, 2).unflatten(3, (-1, width)).contiguous()  # [B,H,E,X,W]
    ids = listed[..., :4].view(torch.int32)[..., 0]
    ids += unit * torch.arange(table.shape[1], dtype=torch.int32, device=store.device)[:, None]
    ids.masked_fill_((table < 0)[:, None, :, None], -1)
    return listed.flatten(2, 3)
