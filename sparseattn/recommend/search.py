"""A role for each layer or head whose losses add up to a limit, and the limit at which the whole keeps a bound.

Losses of layers, each measured alone and to second order, add up to what the whole does only roughly: errors of layers
meet. So the limit is moved until what is measured of the whole keeps the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseattn.recommend.choosing import Option, choose
from sparseattn.roles import DENSE, Role, Roles

NEAR = 0.9  # of the bound: so much of it used is enough
TRIES = 6  # configurations that are measured at most
STEP = 8.0  # by how much a limit may move at once


@dataclass(frozen=True)
class Choice:
    """What a layer may do, in the mean over windows.

    Args:
        role: method and budget.
        kl, kl_heads: as of `frontier.Point`.
        cost_heads: what a step costs, of each KV head.
    """

    role: Role
    kl: float
    kl_heads: Sequence[float]
    cost_heads: Sequence[float]


@dataclass(frozen=True, eq=False)
class Proposal:
    """A configuration.

    Args:
        layers: as of `Roles`.
        kl: nats a token by which it moves predictions, as the sum of its layers says.
        cost: of a step, of all layers.
    """

    layers: dict[int, Any]
    kl: float
    cost: float

    @property
    def roles(self) -> Roles:
        """As a method."""
        return Roles(self.layers, "proposal")

    @property
    def all_dense(self) -> bool:
        """Whether nothing is sparse."""
        return all(role.method == DENSE for role in self.roles.distinct())


def propose(choices: Mapping[int, Sequence[Choice]], limit: float, by_head: bool) -> Proposal:
    """What costs least while the losses add up to `limit` at most; full attention is among each unit's choices.

    Args:
        choices: by layer; the first of each is full attention.
        limit: nats a token.
        by_head: whether the KV heads of a layer may differ.
    """
    units: list[list[Option]] = []
    where: list[tuple[int, int | None]] = []
    for layer, every in choices.items():
        for head in range(len(every[0].cost_heads)) if by_head else (None,):
            where.append((layer, head))
            if head is None:
                units.append([Option(sum(one.cost_heads), one.kl) for one in every])
            else:
                units.append([Option(one.cost_heads[head], one.kl_heads[head]) for one in every])
    taken = choose(units, limit)
    assert taken is not None  # full attention loses nothing
    picked = [units[i][j] for i, j in enumerate(taken)]
    layers: dict[int, Any] = {}
    for (layer, head), j in zip(where, taken, strict=True):
        role = choices[layer][j].role
        if head is None:
            layers[layer] = role
        else:
            layers.setdefault(layer, []).append(role)
    alike = {
        layer: given[0] if isinstance(given, list) and len(set(given)) == 1 else given for layer, given in layers.items()
    }
    return Proposal(alike, sum(one.loss for one in picked), sum(one.cost for one in picked))


def search(
    proposed: Callable[[float], Proposal],
    measured: Callable[[Proposal], float],
    bound: float,
    power: float = 1.0,
    start: float | None = None,
) -> tuple[Proposal, float] | None:
    """The cheapest configuration found of which the measured loss is `bound` at most, with that loss.

    Args:
        proposed: a configuration for a limit in nats.
        measured: the loss of a configuration as a whole, in the bound's measure.
        bound: above 0.
        power: by which nats grow with the measure: 1 for nats, 2 for a share of tokens that differ.
        start: the first limit, in nats; default the bound's.

    Returns:
        None where every configuration that was measured is above the bound.
    """
    limit = start if start is not None else bound**power
    low, high = 0.0, math.inf  # limits known to keep the bound, and not to
    best: tuple[Proposal, float] | None = None
    known: dict[str, float] = {}
    for _ in range(TRIES):
        one = proposed(limit)
        name = one.roles.source()
        if name in known:
            break
        loss = known[name] = measured(one)
        if loss <= bound:
            low = max(low, limit)
            if best is None or one.cost < best[0].cost:
                best = one, loss
            if loss >= NEAR * bound:
                break
        else:
            high = min(high, limit)
        aimed = 0.5 * (NEAR + 1) * bound
        ratio = STEP if loss <= 0 else min(max((aimed / loss) ** power, 1 / STEP), STEP)
        following = limit * ratio
        if not low < following < high:
            following = math.sqrt(low * high) if low and high < math.inf else following
        limit = following
    return best
