"""One option for each unit, such that their losses add up to a bound at most and they cost least: a knapsack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

STEPS = 8192  # into which the bound is cut


@dataclass(frozen=True)
class Option:
    """Something that a unit may do.

    Args:
        cost: to be small, 0 or more.
        loss: to add up to the bound at most, 0 or more.
    """

    cost: float
    loss: float


def choose(units: Sequence[Sequence[Option]], bound: float) -> list[int] | None:
    """Return the option of each unit; None where even the least losses are above the bound.

    By dynamic programming over losses in steps of the bound's `STEPS`-th, to the nearest: exact to half a step a unit.

    Args:
        units: the options of each, one or more.
        bound: of the sum of losses, above 0.

    Raises:
        ValueError: a unit without options, or a bound that is not above 0.
    """
    if not units or not all(units) or not bound > 0:
        raise ValueError(f"there is one option or more for each unit, and a bound above 0, got {bound}")
    best = torch.zeros(STEPS + 1, dtype=torch.float64)  # least cost of the units so far within so many steps
    taken: list[torch.Tensor] = []
    kept = [efficient(options) for options in units]
    sizes = [
        [round(min(options[i].loss / bound, 2.0) * STEPS) for i in which]
        for options, which in zip(units, kept, strict=True)
    ]
    for options, which, steps in zip(units, kept, sizes, strict=True):
        least = torch.full((len(which), STEPS + 1), torch.inf, dtype=torch.float64)
        for row, (i, size) in enumerate(zip(which, steps, strict=True)):
            if size <= STEPS:
                least[row, size:] = best[: STEPS + 1 - size] + options[i].cost
        best, choice = least.min(0)
        taken.append(choice)
    if not torch.isfinite(best[STEPS]):
        return None
    left, chosen = STEPS, []
    for choice, which, steps in zip(reversed(taken), reversed(kept), reversed(sizes), strict=True):
        row = int(choice[left])
        chosen.append(which[row])
        left -= steps[row]
    return chosen[::-1]


def efficient(options: Sequence[Option]) -> list[int]:
    """Which of the options are at no other one's cost beaten in loss, by rising cost."""
    kept: list[int] = []
    least = float("inf")
    for i in sorted(range(len(options)), key=lambda i: (options[i].cost, options[i].loss)):
        if options[i].loss < least:
            kept.append(i)
            least = options[i].loss
    return kept
