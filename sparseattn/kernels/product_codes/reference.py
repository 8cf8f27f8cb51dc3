"""Logits of rows, and the best rows, by product codes, in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.group_vote.reference import vote_softmax
from sparseattn.kernels.product_codes.codes import MORE, ProductCodes, Tables, rounded, sampled, spans


def names(codes: Tensor, bits: int, subspaces: int) -> Tensor:
    """Return the codes `[B,H,M,N]` int64 of bytes `[B,H,R,N]`."""
    if bits == 8:
        return codes.long()
    return torch.stack([codes & 15, codes >> 4], 3).flatten(2, 3)[:, :, :subspaces].long()


def sums(tables: Tensor, keys: ProductCodes) -> Tensor:
    """Return `[B,H,G,N]` of the tables' dtype, the sum of each row's M numbers."""
    subspaces = tables.shape[3]
    own_names = names(keys.codes, keys.bits, subspaces)[:, :, None]  # [B,H,1,M,N]
    total = tables.new_zeros(*tables.shape[:3], keys.codes.shape[3])
    for m in range(subspaces):
        total += tables[:, :, :, m].gather(3, own_names[:, :, :, m].expand_as(total))
    return total


def logits(tables: Tensor, keys: ProductCodes) -> Tensor:
    """As `dispatch.logits`."""
    return sums(tables, keys).masked_fill(~keys.valid[:, None, None], -torch.inf)


def best(tables: Tables, keys: ProductCodes, count: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best`."""
    bounds = tables.bounds()
    names, step, _ = rounded(tables.numbers(), bounds)
    whole = sums(names.float(), keys)
    if (added := tables.steps_beside(step, bounds)) is not None:
        whole += added
    distance = nearest(whole, step, keys.valid)
    last = distance.topk(min(MORE * count, distance.shape[2]), 2).values.amin(2, keepdim=True)
    candidate = (distance >= last) & (distance > -torch.inf)
    votes = step[:, :, None, None] * whole
    return spans(first_of_best(vote_softmax(votes.masked_fill(~candidate[:, :, None], -torch.inf)), count))


def first_of_best(votes: Tensor, count: int) -> Tensor:
    """Return the places `[B,H,S]` int32 of the largest votes `[B,H,n]`, of equal ones the first, -1 for a vote of -inf.

    Rounded sums are often equal. So what is chosen does not depend on how many rows there is room for.
    """
    ordered = votes.sort(dim=-1, descending=True, stable=True)
    places = ordered.indices[..., :count].int()
    return places.masked_fill(ordered.values[..., :count].isneginf(), -1)


def offsets(whole: Tensor, step: Tensor, valid: Tensor) -> Tensor:
    """Return the logarithm of each query head's sum of exponentials of a sample, `[B,H,G]` float32, in whole steps.

    Args:
        whole: `[B,H,G,n]`, rounded sums of the rows that `sampled` names.
        step: `[B,H]`, of a sum in a logit; where it is 0, so are the offsets.
        valid: `[B,n]` bool.
    """
    unit = step[:, :, None].clamp(min=torch.finfo(torch.float32).tiny)
    logits = (unit[..., None] * whole).masked_fill(~valid[:, None, None], -torch.inf)
    rounded = (logits.logsumexp(3) / unit).round()
    return torch.where(rounded.isfinite() & (step[:, :, None] > 0), rounded, 0)


def nearest(whole: Tensor, step: Tensor, valid: Tensor) -> Tensor:
    """Return by how much rows exceed the query heads' `offsets`, at the head where that is most: `[B,H,N]` float32,
    -inf where a row is not valid. Arguments: as of `offsets`, of all rows."""
    among = sampled(whole.shape[3], whole.device)
    far = whole - offsets(whole[..., among], step, valid[:, among])[..., None]
    return far.amax(2).masked_fill(~valid[:, None], -torch.inf)
