"""Quest's scores of pages in torch, which is the specification. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.group_vote.reference import vote
from sparseattn.kernels.page_bounds.bounds import PageBounds


def page_bounds(query: Tensor, minimum: Tensor, maximum: Tensor) -> Tensor:
    """Return an upper bound `[B,H,G,P]` of `q . k` over the keys of each page.

    Args:
        query: `[B,H,G,D]`.
        minimum, maximum: `[B,H,P,D]`, the least and the largest of the page's keys in every channel.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide)
    # max(q M, q m) is q M where q >= 0 and q m elsewhere, because m <= M: two matrix products.
    return q.clamp(min=0) @ maximum.to(wide).mT + q.clamp(max=0) @ minimum.to(wide).mT


def scores(query: Tensor, bounds: PageBounds, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores`."""
    assert bounds.valid is not None
    bound = page_bounds(in_steps(query, bounds.step), bounds.minimum, bounds.maximum) / temperature
    return vote(bound.masked_fill(~bounds.valid[:, None, None], -torch.inf), group)


def scores_at(query: Tensor, store: PageBounds, table: Tensor, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores_at`."""
    place = table.long().clamp(min=0)
    minimum, maximum = (part[place].transpose(1, 2) for part in (store.minimum, store.maximum))  # [B,H,P,D]
    return scores(query, PageBounds(minimum, maximum, table >= 0), group, temperature)


def in_steps(query: Tensor, step: Tensor | None) -> Tensor:
    """Return the query for bounds that are integers of `step`: its product with them is that with the numbers."""
    return query if step is None else query.to(torch.promote_types(query.dtype, torch.float32)) * step[:, :, None]
