"""Budgets by mass: of the rows a selector would read, the heaviest until all that is attended holds a share.

Twilight, https://arxiv.org/abs/2502.02770, prunes a choice to a share of its own weight so; here the share is of the
whole softmax, what is not chosen and the rows that every query reads among it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from sparseattn.core.selection import Selection, Weighed


class Promise(NamedTuple):
    """What a step by mass was asked for, and says of itself.

    Args:
        wanted: the share of the softmax over everything that the rows attended are to hold.
        held: `[B,H*G]` float32, the share that those of each query head hold by the selector's estimate; less than
            `wanted` where the budget's `most` binds.
    """

    wanted: float
    held: Tensor


def heaviest(shares: Tensor, dense: Tensor, wanted: float) -> Tensor:
    """Which slots make up the smallest set with which `wanted` is held.

    Args:
        shares: `[B,Hs,S]`, what each slot holds; 0 for one that is not used.
        dense: `[B,Hs]`, what is held without any of them.
        wanted: in (0, 1]; 1 takes every slot, however little it holds.

    Returns:
        `[B,Hs,S]` bool.
    """
    if wanted >= 1:
        return torch.ones_like(shares, dtype=torch.bool)
    order = shares.argsort(dim=-1, descending=True)
    ranked = shares.gather(-1, order)
    before = dense[..., None] + ranked.cumsum(-1) - ranked  # with the heavier slots
    return torch.zeros_like(shares, dtype=torch.bool).scatter(-1, order, before < wanted)


def cut(weighed: Weighed, unsealed_lse: Tensor, wanted: float) -> tuple[Selection, Promise]:
    """Drop the lightest slots that it does not take for a share of the softmax over everything.

    A choice for a whole query group is cut where the mean of its query heads holds the share.

    Args:
        weighed: a selection and what it weighs.
        unsealed_lse: `[B,H,G]`, natural logarithm of the sum of exponentiated logits of sink and unsealed rows.
        wanted: the share, in (0, 1].

    Returns:
        The selection with a length of 0 in slots that are dropped, all else as it was; and what it holds.
    """
    selection, group = weighed.selection, unsealed_lse.shape[2]
    dense = unsealed_lse.float().flatten(1)  # [B,H*G]
    total = torch.stack([weighed.weights.logsumexp(-1), weighed.rest, dense]).logsumexp(0)
    total = torch.where(total.isinf(), 0.0, total)  # no row at all
    shares, dense = (weighed.weights - total[..., None]).exp(), (dense - total).exp()
    if selection.start.shape[1] == unsealed_lse.shape[1] != shares.shape[1]:
        mean, dense_mean = (part.unflatten(1, (-1, group)).mean(2) for part in (shares, dense))
        kept = heaviest(mean, dense_mean, wanted)
        of_each = kept[:, :, None].expand(-1, -1, group, -1).flatten(1, 2)
    else:
        kept = of_each = heaviest(shares, dense, wanted)
    length = torch.where(kept, selection.length, 0)
    return dataclasses.replace(selection, length=length), Promise(wanted, dense + (shares * of_each).sum(-1))
