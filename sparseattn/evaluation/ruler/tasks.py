"""RULER's tasks by name, and their prompts as examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sparseattn.evaluation.ruler.common_words import CommonWords
from sparseattn.evaluation.ruler.documents import Documents, Questions
from sparseattn.evaluation.ruler.frequent_words import FrequentWords
from sparseattn.evaluation.ruler.needles import Needles
from sparseattn.evaluation.ruler.room import Room, RulerPrompt
from sparseattn.evaluation.ruler.templates import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    HIDDEN,
    NEEDLES,
    QUESTIONS,
    VARIABLES,
    Template,
)
from sparseattn.evaluation.ruler.variables import Variables
from sparseattn.evaluation.ruler.words import WordLists
from sparseattn.evaluation.tasks.base import Count, Example

SEED = 42  # RULER's
PREFIX = "ruler/"
VT, CWE, FWE, QA = (PREFIX + name for name in ("vt", "cwe", "fwe", "qa"))
TEMPLATES: dict[str, Template] = {
    **{PREFIX + name: NEEDLES for name in HIDDEN},
    VT: VARIABLES,
    CWE: COMMON_WORDS,
    FWE: FREQUENT_WORDS,
    QA: QUESTIONS,
}
SCORING = {**dict.fromkeys(TEMPLATES, "ruler/all"), QA: "ruler/part"}
ESSAYS = tuple(PREFIX + name for name, hidden in HIDDEN.items() if hidden.haystack == "essay")


@dataclass(frozen=True, eq=False)
class Material:
    """What prompts are made of.

    Args:
        lists: words, of needles and `CWE`.
        text: that needles are hidden in.
        text_name: as records call it.
        more_words: of `CWE`, for lists longer than all of `lists`.
        questions: of `QA`.
    """

    lists: WordLists | None = None
    text: str = ""
    text_name: str = ""
    more_words: Sequence[str] = ()
    questions: Questions | None = None


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
    if task == QA and material.questions is not None:
        meta["file"] = material.questions.name
    for sample, drawn in enumerate(_maker(task, material, seed).prompts(room)):
        facts = {**meta, "sample": sample, "distractors": drawn.distractors}
        parts = drawn.context, drawn.question, drawn.answers
        yield Example(task, *parts, SCORING[task], facts, lead=drawn.lead, limit=limit, one_line=False)


class Maker(Protocol):
    """What draws the prompts of one task, all from one seed."""

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, one after the other."""


def _maker(task: str, material: Material, seed: int) -> Maker:
    if task == VT:
        return Variables(seed)
    if task == FWE:
        return FrequentWords(seed)
    if task == QA:
        if material.questions is None:
            raise ValueError(f"{QA} needs a file of questions")
        return Documents(seed, material.questions)
    if material.lists is None:
        raise ValueError(f"{task} needs word lists")
    if task == CWE:
        return CommonWords(seed, material.lists.all, material.more_words)
    return Needles(HIDDEN[task.removeprefix(PREFIX)], seed, material.lists.names, material.text)
