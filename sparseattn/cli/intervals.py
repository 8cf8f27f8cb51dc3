"""How far a mean over few prompts may be from what many would give: 95 % intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

FEW = 30  # prompts, below which a picture shows intervals
Z = 1.96  # of the normal distribution at 97.5 %
DRAWS = 1000


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Wilson's interval of a mean of scores from 0 to 1; too wide rather than too narrow where some lie in between."""
    count = len(scores)
    mean = sum(scores) / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def perplexity(nll: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """Of the exponential of the mean over all tokens: between the 2.5th and 97.5th percentile of prompts drawn anew,
    always the same way. `nll`: mean of each prompt's `tokens`."""
    draw, found, places = random.Random(0), [], range(len(nll))
    for _ in range(DRAWS):
        drawn = draw.choices(places, k=len(nll))
        whole = sum(tokens[i] for i in drawn)
        found.append(sum(nll[i] * tokens[i] for i in drawn) / whole)
    found.sort()
    low, high = found[round(0.025 * (DRAWS - 1))], found[round(0.975 * (DRAWS - 1))]
    return _exp(low), _exp(high)


def _exp(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf
