"""RULER's tasks by name, and their prompts as examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparseattn.evaluation.ruler.needles import Needles
from sparseattn.evaluation.ruler.room import Drawn, Room
from sparseattn.evaluation.ruler.templates import HIDDEN, NEEDLES, Template
from sparseattn.evaluation.ruler.words import WordLists
from sparseattn.evaluation.tasks.base import Count, Example

SEED = 42  # RULER's
PREFIX = "ruler/"
TEMPLATES: dict[str, Template] = {PREFIX + name: NEEDLES for name in HIDDEN}
SCORING = dict.fromkeys(TEMPLATES, "ruler/all")
ESSAYS = tuple(PREFIX + name for name, hidden in HIDDEN.items() if hidden.haystack == "essay")


@dataclass(frozen=True, eq=False)
class Material:
    """What prompts are made of.

    Args:
        lists: words.
        text: that needles are hidden in.
        text_name: as records call it.
    """

    lists: WordLists
    text: str = ""
    text_name: str = ""


def examples(
    task: str,
    length: int,
    material: Material,
    *,
    count: Count,
    seed: int = SEED,
    spare: int = 0,
    answer_tokens: int | None = None,
) -> Iterator[Example]:
    """Make the prompts of a task, one after the other, in RULER's order: all come from one seed.

    Args:
        task: a name in `TEMPLATES`.
        length: tokens of a prompt and its answer.
        material: what the task needs of it.
        count: tokens of a text.
        seed: of all prompts.
        spare: tokens that a tokenizer or a chat template puts around a prompt.
        answer_tokens: of an answer; None: RULER's.

    Raises:
        ValueError: no such task, something missing that it needs, or a length that does not hold a prompt.
    """
    if task not in TEMPLATES:
        raise ValueError(f"there is no task {task!r} of RULER's, there are {', '.join(TEMPLATES)}")
    limit = answer_tokens or TEMPLATES[task].answer_tokens
    room = Room(task, length, limit, count, spare)
    meta: dict[str, Any] = {"length": length, "depth": None, "seed": seed}
    if task in ESSAYS:
        meta["haystack"] = material.text_name
    for sample, drawn in enumerate(_drawn(task, material, seed, room)):
        facts = {**meta, "sample": sample, "distractors": drawn.distractors}
        parts = drawn.context, drawn.question, drawn.answers
        yield Example(task, *parts, SCORING[task], facts, lead=drawn.lead, limit=limit, one_line=False)


def _drawn(task: str, material: Material, seed: int, room: Room) -> Iterator[Drawn]:
    kind = task.removeprefix(PREFIX)
    return Needles(HIDDEN[kind], seed, material.lists.names, material.text).prompts(room)
