"""What `--error` bounds: how much of a model's predictions may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Measure -> (the name in records of agreement, what 1 % of it is).
MEASURES = {
    "kl": ("kl", "growth of perplexity on what the model writes with full attention, exp(mean KL) - 1"),
    "top": ("same_top", "share of tokens whose most likely next token differs from full attention's"),
    "nll": ("nll_difference", "growth of the perplexity of the text, exp(mean difference of NLL) - 1"),
}


@dataclass(frozen=True)
class Bound:
    """A measure of `MEASURES` and the most that it may be, as a share.

    Raises:
        ValueError: no such measure, or a share that is not above 0 and below 1.
    """

    measure: str
    most: float

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"an error is measured by one of {', '.join(MEASURES)}, got {self.measure!r}")
        if not 0 < self.most < 1:
            raise ValueError(f"an error is a share above 0 and below 100 %, got {self.most}")

    @property
    def limit(self) -> float:
        """In the unit of `loss`: nats, or a share of tokens."""
        return self.most if self.measure == "top" else math.log1p(self.most)

    @property
    def power(self) -> float:
        """By which nats of divergence grow with it."""
        return 2.0 if self.measure == "top" else 1.0

    def loss(self, record: Mapping[str, Any]) -> float:
        """Return what a record of agreement says of one window."""
        value = float(record[MEASURES[self.measure][0]])
        return 1.0 - value if self.measure == "top" else value

    def share(self, loss: float) -> float:
        """Return a loss as the share that is bounded."""
        return loss if self.measure == "top" else math.expm1(loss)

    def __str__(self) -> str:
        return f"{100 * self.most:.6g} % of {self.measure}"


def parse_error(text: str) -> float:
    """`"1%"` or `"0.01"` as a share. Raises ValueError for another text."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f'--error is a share such as "1%" or 0.01, got {text!r}') from None
