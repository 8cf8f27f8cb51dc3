"""Turn the scores of the query heads of a group into those of its selection heads."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.group_vote import reference
from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.topk.dispatch import best_rows

GROUPS = ("max", "sum", "softmax", "each")
SOFTMAX = Operation(__package__, "torch", "numba")


def vote(scores: Tensor, group: str, impl: str | None = None) -> Tensor:
    """Return the scores of selection heads, of those of G query heads per KV head.

    Args:
        scores: `[B,H,G,N]`, -inf where a candidate must not be chosen.
        group: "max" or "sum" of the raw scores, "softmax" (logarithm of the sum of the query heads' probabilities): one
            choice per KV head; "each": every query head chooses for itself.
        impl: of "softmax", "torch" or "numba", which takes float32, see `implementations`. The others are torch's.

    Returns:
        `[B,Hs,N]`; Hs is H*G for "each" and H otherwise.
    """
    if group != "softmax":
        return reference.vote(scores, group)
    torch_only = scores.dtype != torch.float32 or scores.requires_grad
    return SOFTMAX.pick(impl, scores.device, scores.dtype, torch_only).vote_softmax(scores)


def best_of_listed(logits: Tensor, group: str, pages: Tensor, page: int, count: int) -> Tensor:
    """Return the rows with the best votes among those of listed pages.

    Args:
        logits: `[B,H,G,P*page]`, -inf for what must not be chosen.
        group: see `vote`.
        pages: integers `[B,L,P]`, L = H or H*G, negative: none.
        page: rows of a page.
        count: rows chosen.

    Returns:
        `[B,Hs,S]` int32 as `topk.dispatch.best_rows`, rows of all pages.
    """
    listed, scores = pages.long(), vote(logits, group)  # [B,Hs,P*page]
    place = best_rows(scores, count).long()
    used = place.clamp(min=0)
    own = listed.repeat_interleave(scores.shape[1] // listed.shape[1], 1)  # [B,Hs,P]
    return torch.where(place < 0, -1, own.gather(2, used // page) * page + used % page).int()
