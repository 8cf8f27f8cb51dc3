"""What a step reads of sealed rows that are dealt to ranks: the best of all, agreed on, or the best of each rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.ranks import Ranks
from sparseattn.cache.rows import StoredRows
from sparseattn.core.selection import Selection
from sparseattn.kernels.group_vote.dispatch import vote
from sparseattn.kernels.group_vote.reference import vote_of_total
from sparseattn.selectors.abilities import SharesScores
from sparseattn.selectors.base import Selector, StepContext


class RankChoice(ABC):
    """Chooses among this rank's rows. Every rank asks at every step, with the same query and budget."""

    @abstractmethod
    def select(self, query: Tensor, step: StepContext | None, budget: int) -> Selection:
        """Return rows of this rank, for all ranks together about `budget` rows a head.

        Args:
            query: `[B,H,G,D]`.
            step: as of `Selector.select`; None: this rank has none of the sealed rows.
            budget: as of `Selector.select`, of all rows.
        """

    @staticmethod
    def of(selector: Selector, stored: StoredRows, ranks: Ranks) -> RankChoice:
        """Return what `ranks.share` says; ValueError where the selector cannot."""
        return Agreed(selector, stored, ranks) if ranks.share == "exact" else Own(selector, stored, ranks)


class Own(RankChoice):
    """Each rank reads the best of its own rows, within its part of the budget: all, where the budget allows all."""

    def __init__(self, selector: Selector, stored: StoredRows, ranks: Ranks) -> None:
        self.selector, self.stored, self.ranks = selector, stored, ranks

    def select(self, query: Tensor, step: StepContext | None, budget: int) -> Selection:
        if step is None:
            return Selection.none(query.shape[0], query.shape[1], query.device)
        return self.selector.select(query, step, self.part(budget))

    def part(self, budget: int) -> int:
        """Return this rank's part of a budget, in whole spans."""
        if budget >= max(self.stored.zones.sealed):
            return max(self.stored.zones.zone, self.selector.span)
        span = self.selector.span
        return max(math.ceil(budget * (1 + self.ranks.slack) / self.ranks.size / span), 1) * span


class Agreed(RankChoice):
    """Ranks send each other the scores of their best candidates, and each reads those of the best of all that it has.

    A vote by probabilities needs the log-sum-exp of all scores of a query head: one more number is sent of each.
    """

    def __init__(self, selector: Any, stored: StoredRows, ranks: Ranks) -> None:
        self.selector: SharesScores = require_scores(selector)
        self.stored, self.ranks, self.uses_budget = stored, ranks, selector.uses_budget

    def select(self, query: Tensor, step: StepContext | None, budget: int) -> Selection:
        page = self.selector.page
        if step is None:
            scores = query.new_empty(*query.shape[:3], 0, dtype=torch.float32)
        else:
            scores = self.selector.head_scores(query, step)
        most = self.stored.deal.most(max(self.stored.zones.sealed)) // page
        count = budget // page if self.uses_budget else 0
        ids = self._agreed(self._votes(scores), count, most)
        return Selection.pages(ids, page)

    def _votes(self, scores: Tensor) -> Tensor:
        """`[B,Hs,P]`: the group's vote on `[B,H,G,P]`, as if it were on the candidates of all ranks."""
        if self.selector.group != "softmax":
            return vote(scores, self.selector.group)
        total = self.ranks.gather(scores.logsumexp(-1), "votes").logsumexp(0)
        return vote_of_total(scores, total)

    def _agreed(self, votes: Tensor, count: int, most: int) -> Tensor:
        """`[B,Hs,S]` int64: which of this rank's candidates are among the `count` best of all, -1 for none.

        Args:
            votes: `[B,Hs,P]`.
            most: the most candidates that any rank has, so that S is the same on all. Of equal votes a lower rank's
                is taken, on every rank alike.
        """
        slots = min(count, most)
        top = votes.topk(min(slots, votes.shape[2]), dim=-1)
        own = torch.nn.functional.pad(top.values, (0, slots - top.values.shape[2]), value=-torch.inf)
        every = self.ranks.gather(own, "choice").movedim(0, 2).flatten(2)  # [B,Hs,ranks*S]
        best = every.argsort(dim=-1, descending=True, stable=True)[..., :count]
        taken = torch.zeros_like(every, dtype=torch.bool).scatter_(2, best, True)
        first = self.ranks.rank * slots
        mine = taken[..., first : first + slots] & ~own.isneginf()
        ids = torch.nn.functional.pad(top.indices, (0, slots - top.indices.shape[2]))
        return torch.where(mine, ids, -1)


def require_scores(selector: Selector) -> Any:
    """Return a selector whose scores ranks can compare; ValueError with the reason for another."""
    why = "it does not say what it thinks of each row before it chooses (SharesScores)"
    if selector.has(SharesScores):
        assert isinstance(selector, SharesScores)
        if (reason := selector.why_not_compared() or _older_scores(selector)) is None:
            return selector
        why = reason
    raise ValueError(
        f"ranks cannot agree on the best rows of {selector!r}: {why}. Let each choose among its own with "
        f"Ranks(group, share='union'), or take a method that shares its scores, such as quest or lowbit"
    )


def _older_scores(selector: SharesScores) -> str | None:
    """Why scores that were written for another `select` are not this one's."""
    order = type(selector).__mro__
    chooses, scores = (next(c for c in order if name in vars(c)) for name in ("select", "head_scores"))
    if order.index(chooses) >= order.index(scores):
        return None
    return f"{chooses.__name__} chooses in its own way (select), and its scores (head_scores) are {scores.__name__}'s"
