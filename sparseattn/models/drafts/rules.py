"""What `generate` was told of choosing tokens and of stopping, for sequences of different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.models.drafts.rejection import accept_greedy, accept_sampled


@dataclass(frozen=True, eq=False)
class Rules:
    """How tokens are chosen. What `generate` makes for a batch is given the whole batch, cut where a sequence ends.

    Args:
        processors: of logits, as `generate` makes them.
        criteria: of stopping, likewise.
        sample: whether tokens are drawn; else the best is taken.
    """

    processors: Any
    criteria: Any
    sample: bool

    def scores(self, ids: Tensor, ends: list[int], logits: Tensor) -> Tensor:
        """Return logits `[B,n,V]` as the processors leave them, float32.

        Args:
            ids: `[B,T]`, of sequence b the first `ends[b]` tokens and the n - 1 behind them.
            ends: tokens that come before the first logits.
            logits: behind each of these tokens.
        """
        logits = logits.float()
        if not len(self.processors):
            return logits
        scores = torch.empty_like(logits)
        for end in sorted(set(ends)):
            which = [b for b, own in enumerate(ends) if own == end]
            for j in range(logits.shape[1]):
                scores[which, j] = self.processors(ids[:, : end + j], logits[:, j].clone())[which]
        return scores

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a token for each sequence of scores `[B,V]`, `[B]`, and the probabilities it was drawn from, if so."""
        if not self.sample:
            return scores.argmax(-1), None
        probabilities = scores.softmax(-1)
        return torch.multinomial(probabilities, 1)[:, 0], probabilities

    def accept(self, drafts: Tensor, proposed: list[Tensor], scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return how many drafts `[B,k]` are accepted, `[B]`, and the tokens to go on with, `[B,k+1]`.

        Args:
            drafts: which.
            proposed: `[B,V]` each, the probabilities they were drawn from, if they were.
            scores: `[B,k+1,V]` of the target.
        """
        if not self.sample:
            return accept_greedy(drafts, scores.argmax(-1))
        target = scores.softmax(-1)
        return accept_sampled(drafts, torch.stack(proposed, 1) if proposed else target[:, :0], target)

    def stops(self, ids: Tensor) -> list[bool]:
        """Return which sequences of `[B,T]` would end with the last token."""
        stopped: list[bool] = self.criteria(ids, None).tolist()
        return stopped


def near(scores: Tensor, rounding: float) -> Tensor:
    """Return whether the two best of `[...,V]` are nearer to each other than rounding: `[...]` bool.

    Args:
        scores: of tokens.
        rounding: as a share of the best one's magnitude.
    """
    best, second = scores.topk(2, -1).values.unbind(-1)
    return best - second <= rounding * best.abs()
