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
    found = [cost for loss, cost in known if loss <= at]
    for (low, more), (high, fewer) in itertools.pairwise(known):
        if 0 < low <= at <= high:
            part = math.log(at / low) / math.log(high / low) if high > low else 0.0
            found.append(math.exp(math.log(more) + part * math.log(fewer / more)))
    return min(found, default=None)


def singles(
    layers: Sequence[PlannedLayer], choices: Mapping[int, Sequence[LayerOption]], kl: float
) -> dict[str, float | None]:
    """Return method -> what it costs in all layers with the budget at which their losses add up to `kl`, by rising
    cost; None where all its budgets lose more."""
    first = choices[layers[0].index]
    points: dict[str, list[tuple[float, float]]] = {}
    for role in (one.role for one in first):
        each = [next((one for one in choices[layer.index] if one.role == role), None) for layer in layers]
        every = [one for one in each if one is not None]
        if role.budget is not None and len(every) == len(layers):
            cost = sum(sum(one.cost_heads) for one in every)
            points.setdefault(role.method, []).append((sum(one.kl for one in every), cost))
    found = {method: between(mine, kl) for method, mine in points.items()}
    return dict(sorted(found.items(), key=lambda one: math.inf if one[1] is None else one[1]))
