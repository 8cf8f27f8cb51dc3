"""Sequences that ask for facts in what came before, in the words of `evaluation.tasks`: records, pass keys, numbers."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

import numpy as np

from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.registry import example

KINDS = ("kv", "kv", "kv", "kv", "kv", "kv", "passkey", "multikey")  # drawn evenly from
MOST_QUESTIONS = 48
LEAST_CONTEXT = 320  # bytes, in which every kind of context fits
ALIKE = 0.4  # share of the records of a hard sequence whose keys differ in one or two letters from another's
HARD = 0.4  # share of the sequences of records that are hard


@dataclasses.dataclass(frozen=True)
class Asked:
    """A text that asks for facts.

    Args:
        text: bytes.
        answers: of each answer with what repeats the fact before it: where that begins, where the answer begins, and
            where both end.
        joints: places between sentences or lines, where a gap in the positions breaks nothing apart.
    """

    text: bytes
    answers: list[tuple[int, int, int]]
    joints: list[int]


def asked(rng: np.random.Generator, length: int) -> Asked:
    """A text of about `length` bytes, 400 or more: a context of one kind, and questions about it with their answers."""
    draw = random.Random(int(rng.integers(2**62)))
    kind = draw.choice(KINDS)
    return _with_questions(draw, kind, length)


def _with_questions(draw: random.Random, kind: str, length: int) -> Asked:
    one = example(kind, length, draw.random(), draw.getrandbits(40))
    each = len(one.question) + len(one.target)
    # Of a sequence's length 20 to 70 % are questions: many teach more in a step, few leave room for what competes.
    room = min(int(length * draw.uniform(0.2, 0.7)), length - LEAST_CONTEXT)
    wanted = 1 if kind == "passkey" else max(1, min(MOST_QUESTIONS, room // each))
    context = example(kind, length - (wanted - 1) * each - len(one.target), draw.random(), draw.getrandbits(40))
    text, facts = FACTS[kind](draw, context)
    joints = [match.end() for match in re.finditer(r"\n|\. ", text)]
    answers = []
    for question, repeated, answer in draw.sample(facts, min(wanted, len(facts))):
        start = len(text) + len(question) - len(repeated)
        answers.append((start, len(text) + len(question), len(text) + len(question) + len(answer)))
        text += question + answer
        joints.append(len(text))
    return Asked(text.encode(), answers, [joint for joint in joints if joint < len(text)])


# A question, the end of it that repeats the words of the fact, and the answer that these words lead to.
Fact = tuple[str, str, str]


def _records(draw: random.Random, one: Example) -> tuple[str, list[Fact]]:
    """The context, in a hard sequence with keys that resemble each other, and the question for each of its records."""
    head, *lines = one.context.splitlines()
    records = dict(line.split(":") for line in lines)
    key = one.question[-7:-1]
    if draw.random() < HARD:
        keys = list(records)
        for _ in range(int(ALIKE * len(keys))):
            old, like = draw.choice(keys), draw.choice(keys)
            letters = list(like)
            for place in draw.sample(range(6), draw.choice((1, 2))):
                letters[place] = draw.choice("abcdefghijklmnopqrstuvwxyz")
            new = "".join(letters)
            if new not in records:
                records[new] = records.pop(old)
                keys = list(records)
        key, before = draw.choice(keys), key
        one = dataclasses.replace(one, question=one.question.replace(before, key))
    entries = list(records.items())
    draw.shuffle(entries)
    text = "\n".join([head, *(f"{name}:{value}" for name, value in entries)]) + "\n"
    facts = [(one.question.replace(key, name), f"{name}:", f"{value}\n") for name, value in entries]
    return text, facts


def _pass_key(draw: random.Random, one: Example) -> tuple[str, list[Fact]]:
    return one.context, [(one.question, "The pass key is", one.target)]


def _numbers(draw: random.Random, one: Example) -> tuple[str, list[Fact]]:
    found = re.findall(r"The number of (\S+) is (\d+)\.", one.context)
    name = one.question.split()[-2]
    return one.context, [
        (one.question.replace(name, other), f"The number of {other} is", f" {number}\n") for other, number in found
    ]


FACTS: dict[str, Callable[[random.Random, Example], tuple[str, list[Fact]]]] = {
    "kv": _records,
    "passkey": _pass_key,
    "multikey": _numbers,
}
