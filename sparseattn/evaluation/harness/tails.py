"""Which end of a task's prompt is decoded sparsely: its question, so that none of the answer comes from a dense pass.

A prompt of a long task is a context and then what is asked of it. Where the document says which is which, the tail is
what stands behind the context; for other tasks it is a number of tokens.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 32  # of a prompt whose document does not say where the question begins
BEHIND = "behind the context"
LAST_LINE = "the last line"
FIXED = "tokens"


@dataclass(frozen=True)
class PromptTail:
    """The end of one prompt.

    Args:
        tokens: that are decoded sparsely.
        rule: how that was found: `BEHIND`, `LAST_LINE` or `FIXED`.
    """

    tokens: int
    rule: str


@dataclass(frozen=True)
class Tails:
    """How long tails are, by task.

    Args:
        fixed: number of tokens by the name of a task, which may hold `*`; the first that fits counts.
    """

    fixed: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str | int | None) -> Tails:
        """Return what `"64"` or `"ruler_*=40,longbench2_*=200"` says; None: what each prompt's document says.

        Raises:
            ValueError: something else, naming the option.
        """
        if text is None or text == "":
            return cls()
        fixed = []
        for part in str(text).split(","):
            task, equals, count = part.rpartition("=")
            if not count.strip().isdecimal() or (equals and not task.strip()):
                raise ValueError(
                    f'--tail is tokens at the end of a prompt ("64"), or by task ("ruler_*=40,longbench2_*=200"), got '
                    f"{text!r}"
                )
            fixed.append((task.strip() or "*", int(count)))
        return cls(tuple(fixed))

    def of(self, task: str | None, doc: Any, prompt: str, count: Callable[[str], int]) -> PromptTail:
        """Return the tail of a prompt, at most all of it.

        Args:
            task: its name.
            doc: the document that the prompt was made of.
            prompt: as the model reads it.
            count: returns the number of tokens of a text.
        """
        for pattern, tokens in self.fixed:
            if fnmatch.fnmatchcase(task or "", pattern):
                return PromptTail(min(tokens, max(count(prompt), 1)), FIXED)
        begin, rule = question_begins(doc, prompt)
        if begin is None:
            return PromptTail(min(TOKENS, max(count(prompt), 1)), FIXED)
        return PromptTail(max(count(prompt[begin:]), 1), rule)

    def unused(self, tasks: Iterable[str]) -> list[str]:
        """Return the names that none of `tasks` has."""
        names = list(tasks)
        return [pattern for pattern, _ in self.fixed if not fnmatch.filter(names, pattern)]

    def __str__(self) -> str:
        return ",".join(str(n) if task == "*" else f"{task}={n}" for task, n in self.fixed) or "by document"


def question_begins(doc: Any, prompt: str) -> tuple[int | None, str]:
    """Return where in a prompt the question begins, and how that is known; None where the document does not say.

    - `context` (LongBench, LongBench-v2, InfiniteBench, SQuAD): behind it.
    - `input` and `question` (BABILong): behind the input.
    - `input` and `gen_prefix` (RULER): the last line of the input, and the beginning of the answer.
    """
    if not isinstance(doc, Mapping):
        return None, FIXED
    context, whole = doc.get("context"), doc.get("input")
    if not isinstance(context, str) and "question" in doc:
        context = whole
    if isinstance(context, str) and (place := _last(prompt, context)) is not None:
        return place[1], BEHIND
    if "gen_prefix" in doc and isinstance(whole, str) and (place := _last(prompt, whole)) is not None:
        line = prompt.rstrip("\n").rfind("\n", place[0], place[1])
        if line >= 0:
            return line + 1, LAST_LINE
    return None, FIXED


def _last(prompt: str, part: str) -> tuple[int, int] | None:
    """Return where a part stands for the last time, without the space around it; None where it does not, or is void."""
    part = part.strip()
    begin = prompt.rfind(part) if part else -1
    return None if begin < 0 or begin + len(part) >= len(prompt) else (begin, begin + len(part))
