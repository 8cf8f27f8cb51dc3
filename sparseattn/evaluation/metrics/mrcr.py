"""MRCR's score (https://huggingface.co/datasets/openai/mrcr), as its data set's card has it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any


def similarity(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """0 for a response that does not begin with `reference["prefix"]`, else `SequenceMatcher.ratio` of what follows."""
    prefix = reference["prefix"]
    if not response.startswith(prefix):
        return 0.0
    texts = (response.removeprefix(prefix), answers[0].removeprefix(prefix))
    return difflib.SequenceMatcher(None, *texts).ratio()
