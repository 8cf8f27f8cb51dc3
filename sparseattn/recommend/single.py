"""One method with one budget for all layers, to compare a configuration with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from sparseattn.recommend.objective import PlannedLayer
from sparseattn.recommend.search import LayerOption


def between(points: Iterable[tuple[float, float]], at: float) -> float | None:
    """Return the least cost at a loss: by the line through the (loss, cost) on both sides of it, in logarithms, or of a
    point that loses less and costs less still; None where every point loses more."""
    known = sorted(points)
    costs = [cost for loss, cost in known if loss <= at]
    for (low, more), (high, fewer) in itertools.pairwise(known):
        if 0 < low <= at <= high:
            part = math.log(at / low) / math.log(high / low) if high > low else 0.0
            costs.append(math.exp(math.log(more) + part * math.log(fewer / more)))
    return min(costs, default=None)


def singles(
    layers: Sequence[PlannedLayer], choices: Mapping[int, Sequence[LayerOption]], kl: float
) -> dict[str, float | None]:
    """Return method -> what it costs in all layers with the budget at which their losses add up to `kl`, by rising
    cost; None where all its budgets lose more."""
    first = choices[layers[0].index]
    points: dict[str, list[tuple[float, float]]] = {}
    for role in (choice.role for choice in first):
        each = [next((choice for choice in choices[layer.index] if choice.role == role), None) for layer in layers]
        every = [choice for choice in each if choice is not None]
        if role.budget is not None and len(every) == len(layers):
            cost = sum(sum(choice.cost_heads) for choice in every)
            points.setdefault(role.method, []).append((sum(choice.kl for choice in every), cost))
    by_method = {method: between(mine, kl) for method, mine in points.items()}
    return dict(sorted(by_method.items(), key=lambda pair: math.inf if pair[1] is None else pair[1]))
