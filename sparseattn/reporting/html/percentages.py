"""How the page writes percentages: "52 %", with a no-break space, wherever they stand."""

from __future__ import annotations

import math
import re

MISSING = "\u2013"  # where there is no value


def percent(share: float) -> str:
    """Return a share as a cell of the page's tables shows it: "8.61 %", "52.1 %" or "100 %"."""
    if math.isnan(share):
        return MISSING
    size = abs(100 * share)
    digits = 0 if size == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{100 * share:.{digits}f}\u00a0%"


def typeset(sentence: str) -> str:
    """Return a sentence with its percentages as the page writes them.

    What is typed keeps its form: a budget of 5%, and the name of a plan, such as smollm2-1%.
    """
    return re.sub(r"(?<![\w.-])(?<!budget )(\d[\d,.]*) ?%", "\\1\u00a0%", sentence)
