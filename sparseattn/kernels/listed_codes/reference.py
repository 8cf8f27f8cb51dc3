"""Logits of listed rows by product codes, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.product_codes.codes import ProductCodes
from sparseattn.kernels.product_codes.reference import logits as logits_of_all


def logits(tables: Tensor, keys: ProductCodes, rows: Tensor) -> Tensor:
    """As `dispatch.logits`."""
    (batch, heads, group), (lists, count) = tables.shape[:3], rows.shape[1:]
    stored = keys.codes.shape[3]
    if not stored:
        return tables.new_full((batch, heads, group, count), -torch.inf)
    inside = (rows >= 0) & (rows < stored)
    place = torch.where(inside, rows, 0).long()  # [B,L,C]
    repeated = keys.codes.repeat_interleave(lists // heads, 1) if lists > heads else keys.codes
    codes = repeated.gather(3, place[:, :, None].expand(-1, -1, repeated.shape[2], -1))  # [B,L,R,C]
    own = tables.reshape(batch, lists, -1, *tables.shape[3:])  # [B,L,1 or G,M,K]
    every = torch.ones(batch, count, dtype=torch.bool, device=rows.device)
    summed = logits_of_all(own, ProductCodes(codes, keys.bits, every))
    valid = inside & keys.valid.gather(1, place.flatten(1)).view_as(place)
    return summed.masked_fill(~valid[:, :, None], -torch.inf).view(batch, heads, group, count)
