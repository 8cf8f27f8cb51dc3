"""Logits of rows, and the best rows, by product codes, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.group_vote.reference import vote_softmax
from sparseattn.kernels.product_codes.codes import MORE, ProductCodes, rounded
from sparseattn.kernels.topk.dispatch import best_rows


def names(codes: Tensor, bits: int, subspaces: int) -> Tensor:
    """Return the codes `[B,H,M,N]` int64 of bytes `[B,H,R,N]`."""
    if bits == 8:
        return codes.long()
    return torch.stack([codes & 15, codes >> 4], 3).flatten(2, 3)[:, :, :subspaces].long()


def sums(tables: Tensor, keys: ProductCodes) -> Tensor:
    """Return `[B,H,G,N]` of the tables' dtype, the sum of each row's M numbers."""
    subspaces = tables.shape[3]
    found = names(keys.codes, keys.bits, subspaces)[:, :, None]  # [B,H,1,M,N]
    total = tables.new_zeros(*tables.shape[:3], keys.codes.shape[3])
    for m in range(subspaces):
        total += tables[:, :, :, m].gather(3, found[:, :, :, m].expand_as(total))
    return total


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    return sums(tables, keys).masked_fill(~keys.valid[:, None, None], -torch.inf)


def relative(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.relative`."""
    unreal = ~keys.valid[:, None, None]
    whole = sums(rounded(tables)[0].int(), keys).masked_fill(unreal, -1)
    below = whole - whole.amax(3, keepdim=True)
    return below.amax(2).float().masked_fill(unreal[:, 0], -torch.inf)


def best(tables: Tensor, keys: ProductCodes, count: int) -> Tensor:
    """As `dispatch.best`."""
    candidates = best_rows(relative(tables, keys), MORE * count)  # [B,H,C]
    place = candidates.clamp(min=0).long()
    every = logits(tables, keys)
    listed = every.gather(3, place[:, :, None].expand(-1, -1, every.shape[2], -1))
    votes = vote_softmax(listed.masked_fill((candidates < 0)[:, :, None], -torch.inf))
    chosen = best_rows(votes, count)
    return candidates.gather(2, chosen.clamp(min=0).long()).masked_fill(chosen < 0, -1)
