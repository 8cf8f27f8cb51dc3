"""LongBench v2's letter (https://arxiv.org/abs/2412.15204), as its `pred.py` takes it from a response."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

SAYS = "The correct answer is "


def letter(response: str) -> str | None:
    """Return the letter in "The correct answer is (X)", or without brackets where no such letter has them; None:
    neither."""
    plain = response.replace("*", "")
    match = re.search(rf"{SAYS}\(([A-D])\)", plain) or re.search(rf"{SAYS}([A-D])", plain)
    return match[1] if match else None


def accuracy(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """1 if the letter of a response is the answer."""
    return float(letter(response.strip()) == answers[0])


def named(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """kvpress' form of it: 1 if the response says so of the answer anywhere, whatever else it says."""
    plain = response.replace("*", "")
    return float(f"{SAYS}({answers[0]})" in plain or f"{SAYS}{answers[0]}" in plain)
