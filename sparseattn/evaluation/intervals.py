"""How far a mean over few prompts may be from what many would give: 95 % intervals."""

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
    """Wilson's interval of a mean of scores from 0 to 1; too wide rather than too narrow where some lie in between."""
    count = len(scores)
    mean = sum(scores) / count
    centre = (mean + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(mean * (1 - mean) / count + Z * Z / (4 * count * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def paired(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """An interval of the mean of `scores` less that of `others`, of the same prompts in the same order.

    Newcombe's, of Wilson's intervals of both (1998, Statistics in Medicine 17:2635, method 10): it has a width where
    every prompt is answered alike, too. Scores between 0 and 1 make it too wide rather than too narrow.
    """
    count = len(scores)
    mean, other = sum(scores) / count, sum(others) / count
    both = sum((one - mean) * (two - other) for one, two in zip(scores, others, strict=True)) / count
    spread = sum((one - mean) ** 2 for one in scores) * sum((two - other) ** 2 for two in others)
    if both > 0:
        both = max(both - 1 / (2 * count), 0.0)  # few prompts make things look alike
    alike = both * count / math.sqrt(spread) if spread > 0 else 0.0
    (low, high), (low_other, high_other) = wilson(scores), wilson(others)

    def width(ours: float, theirs: float) -> float:
        return math.sqrt(max(ours * ours - 2 * alike * ours * theirs + theirs * theirs, 0.0))

    difference = mean - other
    return difference - width(mean - low, high_other - other), difference + width(high - mean, other - low_other)


def student(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's interval of a mean over a few draws; None of one or two, which say nothing of others."""
    count = len(values)
    if count < 3:
        return None
    mean = sum(values) / count
    half = _quantile(count - 1) * math.sqrt(sum((one - mean) ** 2 for one in values) / (count - 1) / count)
    return mean - half, mean + half


def _quantile(freedom: int) -> float:
    """Student's at 97.5 %; beyond the table to three digits."""
    return STUDENT[freedom - 1] if freedom <= len(STUDENT) else Z + 2.42 / freedom
