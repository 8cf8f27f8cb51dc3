"""A role for each layer or head whose losses add up to a limit, and the limit at which the whole keeps a bound.

Losses of layers, each measured alone and to second order, add up to what the whole does only roughly: errors of layers
meet. So the limit is moved until what is measured of the whole keeps the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseattn.recommend.choosing import Option, choose
from sparseattn.recommend.objective import Objective, PlannedLayer
from sparseattn.roles.role import DENSE, Role
from sparseattn.roles.roles import Roles

NEAR = 0.9  # of the bound: so much of it used is enough
TRIES = 6  # configurations that are measured at most
LOOKS = 60  # proposals at most, those that were measured already among them
STEP = 8.0  # by how much a limit may move at once
CLOSE = 0.99  # of a limit: from there on another configuration may be proposed


@dataclass(frozen=True)
class LayerOption:
    """What a layer may do, in the mean over windows.

    Args:
        role: method and budget.
        kl, kl_heads: as of `frontier.RolePoint`.
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


def propose(
    layers: Sequence[PlannedLayer],
    families: Sequence[Mapping[int, Sequence[LayerOption]]],
    limit: float,
    by_head: bool,
    objective: Objective,
) -> Proposal:
    """Return what costs least while the losses of layers add up to `limit` at most.

    Args:
        layers: of the model.
        families: choices by layer's number; full attention, which loses nothing, is among those of each. Choices of two
            families do not go together.
        limit: nats a token.
        by_head: whether the KV heads of a layer may differ too, where that costs less.
        objective: says what costs.
    """
    proposals = [
        _proposed(layers, choices, limit, heads, objective)
        for choices in families
        for heads in ((False, True) if by_head else (False,))
    ]
    return min(proposals, key=lambda proposal: proposal.cost)


def _proposed(
    layers: Sequence[PlannedLayer],
    choices: Mapping[int, Sequence[LayerOption]],
    limit: float,
    by_head: bool,
    objective: Objective,
) -> Proposal:
    units: list[list[Option]] = []
    for layer in layers:
        every = choices[layer.index]
        if by_head:
            units += [
                [Option(choice.cost_heads[h], choice.kl_heads[h]) for choice in every] for h in range(layer.heads)
            ]
        else:
            units.append([Option(sum(choice.cost_heads), choice.kl) for choice in every])
    taken = choose(units, limit)
    assert taken is not None  # full attention loses nothing
    left = iter(taken)
    given: dict[int, Any] = {}
    cost = 0.0
    for layer in layers:
        every = choices[layer.index]
        roles = [every[next(left)].role for _ in range(layer.heads if by_head else 1)]
        given[layer.index] = roles[0] if len(set(roles)) == 1 else roles
        cost += objective.layer(layer, given[layer.index], {choice.role: choice.cost_heads for choice in every})
    return Proposal(given, sum(units[i][j].loss for i, j in enumerate(taken)), cost)


def search(
    proposed: Callable[[float], Proposal],
    measured: Callable[[Proposal], float],
    bound: float,
    power: float = 1.0,
    most: float = math.inf,
    failed: Collection[str] = (),
) -> tuple[Proposal, float] | None:
    """Return the cheapest configuration found of which the measured loss is `bound` at most, with that loss.

    Args:
        proposed: a configuration for a limit in nats.
        measured: the loss of a configuration as a whole, in the bound's measure.
        bound: above 0.
        power: by which nats grow with the measure: 1 for nats, 2 for a share of tokens that differ.
        most: the largest limit worth trying, in nats.
        failed: sources of configurations (`Roles.source`) that keep no bound, whatever is measured.

    Returns:
        None where every configuration that was measured is above the bound.
    """
    limit = min(bound**power, NEAR * most)
    low, high = 0.0, most  # limits known to keep the bound, and not to
    best: tuple[Proposal, float] | None = None
    known = dict.fromkeys(failed, math.inf)
    for _ in range(LOOKS):
        proposal = proposed(limit)
        name = proposal.roles.source()
        again, loss = name in known, known.get(name, 0.0)
        if not again:
            if len(known) == TRIES + len(failed):
                break
            loss = known[name] = measured(proposal)
        if loss > bound:
            high = min(high, limit, max(proposal.kl, low))  # limits in between propose the same
        else:
            low = max(low, limit)
            if best is None or proposal.cost < best[0].cost:
                best = proposal, loss
            if loss >= NEAR * bound:
                break
        if high <= low / CLOSE:
            break
        if again and loss <= bound and high == math.inf and name == proposed(math.inf).roles.source():
            break  # nothing costs less
        limit = _next(limit, loss, bound, power, low, high, again)
    return best


def _next(limit: float, loss: float, bound: float, power: float, low: float, high: float, again: bool) -> float:
    """Return a limit between `low` and `high`: by the loss at this one, or where that is of a configuration known
    already, so that another comes."""
    if again:
        if loss > bound:
            return CLOSE * high
        return math.sqrt(low * high) if high < math.inf else STEP * limit
    aimed = 0.5 * (NEAR + 1) * bound
    ratio = STEP if loss <= 0 else min(max((aimed / loss) ** power, 1 / STEP), STEP)
    following = limit * ratio
    if not low < following < high:
        following = math.sqrt(low * high) if low and high < math.inf else CLOSE * high if loss > bound else following
    return following
