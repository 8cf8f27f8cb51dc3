"""Searches, verifies on what was held out, and searches again with a tighter target until the bound is kept there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparseattn.recommend.search import Proposal, search

ROUNDS = 3  # verifications at most
TIGHTER = 0.95  # of the target that would just do


@dataclass(frozen=True, eq=False)
class Settled:
    """What came out.

    Args:
        proposal: that keeps the bound; None: none that costs less than full attention does.
        rounds: verifications, each with its `target`, the loss `searched` on the windows to choose by and that
            `verified` on those held out, both in the bound's measure, and its `cost`.
    """

    proposal: Proposal | None
    rounds: list[dict[str, Any]]


def settle(
    proposed: Callable[[float], Proposal],
    searched: Callable[[Proposal], float],
    verified: Callable[[Proposal, int], float],
    bound: float,
    power: float,
    full: float,
) -> Settled:
    """Return the cheapest configuration found that keeps the bound where it was held out.

    Args:
        proposed: a configuration for a limit in nats.
        searched: its loss on the windows to choose by.
        verified: its loss on the windows held out, in a round.
        bound: of both, above 0.
        power: see `search`.
        full: what full attention costs.
    """
    rounds: list[dict[str, Any]] = []
    failed: list[str] = []
    target, most = bound, math.inf
    for n in range(1, ROUNDS + 1):
        best = search(proposed, searched, target, power, most, failed)
        if best is None or best[0].cost >= full:
            break
        proposal, expected = best
        loss = verified(proposal, n)
        rounds.append({"target": target, "searched": expected, "verified": loss, "cost": proposal.cost})
        if loss <= bound:
            return Settled(proposal, rounds)
        failed.append(proposal.roles.source())
        # By what the windows to choose by say of this one, which may be far below the target; below 0 they say nothing.
        target = TIGHTER * (min(target, expected) if expected > 0 else target) * bound / loss
        most = proposal.kl * (bound / loss) ** power
    return Settled(None, rounds)
