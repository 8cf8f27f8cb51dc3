"""Long prompts with known answers: synthetic tasks of any length, files of the user's, and how responses are scored."""

from __future__ import annotations

from sparseattn.evaluation.tasks.base import Count, Example, Filler, Task, byte_count, draws, fitting
from sparseattn.evaluation.tasks.filler import made_up
from sparseattn.evaluation.tasks.lists import KV, WORDS
from sparseattn.evaluation.tasks.needles import MULTIKEY, PASSKEY, VARIABLES

TASKS: dict[str, Task] = {
    "passkey": PASSKEY,
    "multikey": MULTIKEY,
    "kv": KV,
    "variables": VARIABLES,
    "words": WORDS,
}


def example(
    task: str,
    length: int,
    depth: float = 0.5,
    seed: int = 0,
    count: Count = byte_count,
    filler: Filler = made_up,
    spare: int = 0,
) -> Example:
    """Return a prompt of `length` tokens less at most one distractor (a sentence, a record, a word).

    The same arguments give the same prompt; another task, length, depth or seed gives one that shares nothing with it.

    Args:
        task: a name in `TASKS`.
        length: tokens of context and question by `count`, each counted apart.
        depth: where the needle lies, 0 (first) to 1 (last); tasks with `uses_depth` False do not look at it.
        seed: any integer.
        count: tokens of a text; bytes by default.
        filler: a source of sentences, such as `filler.from_text` makes.
        spare: tokens of `length` that are left to what a tokenizer puts around a text.

    Raises:
        ValueError: no such task, a depth outside 0 to 1, or a length that does not hold the needle and the question.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}, there are {', '.join(TASKS)}")
    if not 0 <= depth <= 1:
        raise ValueError(f"a depth lies between 0 (first) and 1 (last), got {depth}")
    kind = TASKS[task]
    depth = float(depth) if kind.uses_depth else 0.0
    draft = kind.draft(depth, draws("task", task, length, str(depth), seed), filler)
    question = count(draft.question) + spare
    n = fitting(draft.build, length - question, count)
    if n < draft.least:
        least = count(draft.build(draft.least)) + question
        raise ValueError(f"a {task} prompt with seed {seed} has at least {least} tokens, got a length of {length}")
    meta = {"length": length, "depth": depth if kind.uses_depth else None, "seed": seed, "distractors": n}
    return Example(task, draft.build(n), draft.question, draft.answers, kind.scoring, meta, draft.others, draft.lead)


__all__ = ["TASKS", "Count", "Example", "Filler", "Task", "byte_count", "example"]
