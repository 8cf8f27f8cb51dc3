"""The estimation zone: groups of rows that stand in, by mean key and mean value, for those of their rows not read.

RetroInfer, https://arxiv.org/abs/2505.02922; Double-P, https://arxiv.org/abs/2602.05191. Letters: P groups.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.selection import Selection, Tail
from sparseattn.selectors.base import best, vote

CHUNK = 1 << 24  # numbers made at once of the rows of a seal: 64 MiB


def summed(rows: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the sums of the rows `[B,H,n,D]` by their group `[B,H,n]` int64: `[B,H,P,D]` float32; rows of group
    P = `groups` and above are left out."""
    batch, heads, new, size = rows.shape
    total = rows.new_zeros(batch, heads, groups + 1, size, dtype=torch.float32)
    step = max(CHUNK // (batch * heads * size), 1)
    for first in range(0, new, step):
        part = rows[:, :, first : first + step].float()
        place = group[:, :, first : first + step].clamp(max=groups)
        total.scatter_add_(2, place[..., None].expand_as(part), part)
    return total[:, :, :groups]


def check_zone(zone: float) -> float:
    """Return `zone` if it is a share of the groups that can take part, else ValueError."""
    if not 0 < zone <= 1:
        raise ValueError(f"zone is the share of the groups that stand in, above 0 and up to 1, got {zone}")
    return zone


def taking_part(groups: Tensor, zone: float) -> Tensor:
    """Return how many of so many `groups` `[B]` take part, rounded up: `[B]` int64."""
    return (groups.double() * zone).ceil().long()


def outside(count: Tensor, left: Tensor, zone: float) -> Tensor:
    """Return how many groups have their mean keys read to rank them but take no part, so that no tail counts them.

    Args:
        count: `[B,H,P]` rows of each group, 0 where there is none.
        left: `[B,Hs,P]` how many of them are not read.
        zone: share of the groups that take part.

    Returns:
        `[B,H]` int64.
    """
    groups = (count > 0).sum(-1)  # [B,H]
    part = (left > 0).sum(-1).unflatten(1, (count.shape[1], -1)).amin(2)
    return groups - part.minimum(taking_part(groups, zone))


def estimated(
    query: Tensor, keys: Tensor, values: Tensor, count: Tensor, left: Tensor, zone: float, temperature: float
) -> Tail:
    """Return the groups as rows of a tail: mean key, mean value, and as bias the logarithm of how many rows each stands
    for.

    Args:
        query: `[B,H,G,D]`.
        keys, values: `[B,H,P,D]`, means; anything where a group has no row.
        count: `[B,H,P]` int32, rows of each group.
        left: `[B,Hs,P]` integers, how many of them are not read; a group without takes no part.
        zone: share of the groups that take part, those whose rows not read weigh most by this estimate; a selection
            for KV heads ranks them by the sum of its query heads' shares. 1: all.
        temperature: what products are divided by.
    """
    (heads, groups), chosen = keys.shape[1:3], left.shape[1]
    weight = left.clamp(min=1).float().log()  # [B,Hs,P]
    if zone < 1:
        logits = query.float() @ keys.float().mT / temperature  # [B,H,G,P]
        logits = logits + weight.unflatten(1, (heads, -1))  # of one selection head, or of each query head's own
        none = (left <= 0).unflatten(1, (heads, -1))
        ranks = vote(logits.masked_fill(none, -torch.inf), "softmax" if chosen == heads else "each")
        ids = best(ranks, math.ceil(groups * zone))  # [B,Hs,K]
        many = taking_part((count > 0).sum(-1), zone).repeat_interleave(chosen // heads, 1)  # [B,Hs]
        ids = ids.masked_fill(torch.arange(ids.shape[2], device=ids.device) >= many[..., None], -1)
        weight = weight.gather(2, ids.clamp(min=0))
    else:
        ids = torch.arange(groups, device=left.device).expand(left.shape)
        ids = ids.masked_fill(left <= 0, -1)
    return Tail(keys.to(query.dtype), values.to(query.dtype), Selection.tokens(ids, bias=weight))
