"""The vote of a query group in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def vote(scores: Tensor, group: str) -> Tensor:
    """As `dispatch.vote`."""
    if group == "each":
        return scores.flatten(1, 2)
    if group == "max":
        return scores.amax(2)
    return scores.sum(2) if group == "sum" else vote_softmax(scores)


def vote_softmax(scores: Tensor) -> Tensor:
    """`[B,H,N]`: the logarithm of the sum of the query heads' probabilities, so that small ones still rank."""
    return vote_of_total(scores, scores.logsumexp(-1))


def vote_of_total(scores: Tensor, total: Tensor) -> Tensor:
    """As `vote_softmax`, of `[B,H,G,N]`, a part of the candidates whose log-sum-exp is `total` `[B,H,G]`."""
    return (scores - torch.where(total.isinf(), 0.0, total)[..., None]).logsumexp(2)
