"""How far a mean over few prompts may be from what many would give: 95 % intervals.

By hand and without scipy: its quantiles would save a table of 30 numbers, and every install would have to carry it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FEW = 30  # prompts, below which a picture shows intervals
Z = 1.96  # of the normal distribution at 97.5 %
STUDENT = (  # Student's distribution at 97.5 %, by degrees of freedom from 1 on
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """Return Wilson's interval of a mean of scores from 0 to 1; where some lie in between, it is rather too wide."""
    count = len(scores)
    mean = sum(scores) / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def paired(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return an interval of the mean of `scores` less that of `others`, of the same prompts in the same order.

    Newcombe's, of Wilson's intervals of both (1998, Statistics in Medicine 17:2635, method 10): it has a width where
    every prompt is answered alike, too. Scores between 0 and 1 make it too wide rather than too narrow.
    """
    count = len(scores)
    mean, other = sum(scores) / count, sum(others) / count
    covariance = sum((a - mean) * (b - other) for a, b in zip(scores, others, strict=True)) / count
    spread = sum((a - mean) ** 2 for a in scores) * sum((b - other) ** 2 for b in others)
    if covariance > 0:
        covariance = max(covariance - 1 / (2 * count), 0.0)  # few prompts make things look alike
    correlation = covariance * count / math.sqrt(spread) if spread > 0 else 0.0
    (low, high), (low_other, high_other) = wilson(scores), wilson(others)

    def width(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    difference = mean - other
    return difference - width(mean - low, high_other - other), difference + width(high - mean, other - low_other)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's interval of a mean over a few draws; None of one or two, which say nothing of others."""
    count = len(values)
    if count < 3:
        return None
    mean = sum(values) / count
    half = _quantile(count - 1) * math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return mean - half, mean + half


def draws_for(margin: float, half: float, count: int) -> float:
    """Return how many draws make Student's interval `margin` wide on either side, as wide as theirs are spread.

    Args:
        margin: from the mean to the end of the interval that is wanted.
        half: the same of the interval of `count` draws.
        count: draws so far, 3 or more.

    Returns:
        A whole number, infinity for a margin of 0.
    """
    if margin <= 0:
        return math.inf
    spread = half * math.sqrt(count) / _quantile(count - 1)
    most = max(math.ceil((Z * spread / margin) ** 2), 3)  # too few by the difference between Student's and the normal
    while _quantile(most - 1) * spread / math.sqrt(most) > margin:
        most += 1
    return most


def _quantile(freedom: int) -> float:
    """Return Student's quantile at 97.5 %; beyond the table to three digits."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else Z + 2.42 / freedom
