"""The steps, as `steps.toml` has them.

A `[[step]]` has the parts of `Step`. Its texts are templates: ``{NAME}`` stands for a word of `[words]` or for another
part of the step, again and again. `each` makes a step of every object in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.evidence.step import Step
from scripts.evidence.toml import read

DEFINED = Path(__file__).with_name("steps.toml")
DEEP = 8  # words within words


def steps(path: Path = DEFINED) -> Iterator[Step]:
    """The steps of a file, in its order."""
    defined = read(path)
    for parts in defined["step"]:
        for own in parts.get("each", [{}]):
            values = {**defined["words"], **parts, **own}
            name, why, command, left = (_written(values[part], values) for part in ("name", "why", "command", "left"))
            yield Step(name, why, command, values["minutes"], left, tuple(values.get("needs", ())))


def _written(template: str, values: Mapping[str, Any]) -> str:
    """A template with words put in, and words put into these."""
    for _ in range(DEEP):
        written = template.format_map(values)
        if written == template:
            return written
        template = written
    raise ValueError(f"these words have no end: {template[:100]}")


STEPS = tuple(steps())
