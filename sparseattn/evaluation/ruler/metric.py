"""RULER's string match: which answers stand in a response (`scripts/eval/synthetic/constants.py` of its repository).

Upper or lower case do not matter, an answer within a longer word counts, and what else the response says costs nothing.
The response is whole, as many tokens as the task allows; control characters of it are line ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(response: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that the response holds: of all tasks but QA."""
    held = _held(response, answers)
    return sum(held) / len(held)


def match_part(response: str, answers: Sequence[str]) -> float:
    """Return 1 if the response holds any answer, else 0: of QA."""
    return float(any(_held(response, answers)))


def _held(response: str, answers: Sequence[str]) -> list[bool]:
    if not answers:
        raise ValueError("a response is scored against one answer or more, got none")
    text = _CONTROL.sub("\n", response.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]


MATCHES: dict[str, Callable[[str, Sequence[str]], float]] = {"ruler/all": match_all, "ruler/part": match_part}
