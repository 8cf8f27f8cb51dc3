"""How many bytes a rank sends at a step of a cache whose rows are dealt: a formula that tests hold against counts."""

from __future__ import annotations

from typing import NamedTuple

GATHERED = 8 << 20  # bytes of outputs that a rank sends at most: beyond, sums are fewer bytes, in three more rounds
NUMBER = 4  # bytes of a score or a log-sum-exp


class Traffic(NamedTuple):
    """Bytes that a rank sends to all others together, by purpose.

    Args:
        votes: log-sum-exps of the scores of query heads, where a group votes by probabilities.
        choice: scores of its best candidates.
        parts: outputs and their log-sum-exps.
        rounds: how often the ranks wait for each other.
    """

    votes: int
    choice: int
    parts: int
    rounds: int

    @property
    def sent(self) -> int:
        """All bytes of a step."""
        return self.votes + self.choice + self.parts


def traffic(
    size: int,
    query: tuple[int, int, int, int],
    *,
    slots: int,
    group: str,
    exact: bool = True,
    element: int = 4,
    gathered: int = GATHERED,
) -> Traffic:
    """Return what a rank sends at one step of a layer; every one of `size` ranks sends as much.

    Args:
        size: ranks.
        query: B, H, G, D.
        slots: candidates whose scores a rank sends for each list: the budget in candidates, at most the most that any
            rank has (`Deal.most`).
        group: the query group's vote.
        exact: whether the ranks agree on the best of all.
        element: bytes of an element of the output.
        gathered: bytes of outputs that are sent to all, at most (`Ranks.gathered`).
    """
    batch, heads, members, head_dim = query
    others, of_queries = size - 1, batch * heads * members
    lists = of_queries if group == "each" else batch * heads
    votes = NUMBER * of_queries * others if exact and group == "softmax" else 0
    choice = NUMBER * lists * slots * others if exact else 0
    parts = of_queries * (head_dim * element + NUMBER) * others
    rounds = sum(part > 0 for part in (votes, choice, parts))
    if parts > gathered:  # the maximum of log-sum-exps, then sums of weighted outputs and of weights, each by a ring
        numbers = of_queries * NUMBER, of_queries * (head_dim + 1) * NUMBER
        parts, rounds = sum(2 * part * others // size for part in numbers), rounds + 3
    return Traffic(votes, choice, parts, rounds)
