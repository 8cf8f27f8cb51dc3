"""RULER's string match (https://arxiv.org/abs/2404.06654): characters in the response, upper or lower case."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f]")


def every(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """Return the share of the answers that a response holds, within longer words too.

    `reference` may have `control`: what control characters become, "\\n" as in RULER's `evaluate.py`.
    """
    text = _plain(response, reference)
    return sum(answer.lower() in text for answer in answers) / len(answers)


def part(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """1 if a response holds any answer; `reference` as in `every`."""
    text = _plain(response, reference)
    return float(any(answer.lower() in text for answer in answers))


def _plain(response: str, reference: Mapping[str, Any]) -> str:
    return _CONTROL.sub(reference.get("control", "\n"), response.strip()).strip().lower()
