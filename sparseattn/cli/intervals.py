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
