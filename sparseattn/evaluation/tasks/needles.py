"""Needles in filler text: a pass key, one of several named numbers, a chain of variables.

The kinds are those of RULER (https://arxiv.org/abs/2404.06654) and InfiniteBench (https://arxiv.org/abs/2402.13718),
the pass key that of landmark attention (https://arxiv.org/abs/2305.16300); wording and generators are ours. Every
question ends with the needle's own words, so that a model continues it.
"""

from __future__ import annotations

import random
from itertools import pairwise

from sparseattn.evaluation.tasks.base import Draft, Filler, Task, cached, digits, distinct, insert, letters
from sparseattn.evaluation.tasks.filler import ADJECTIVES, NOUNS

NEEDLES = 4  # named numbers in a context, one of them asked for (RULER's niah_multikey_1)
CHAINS, HOPS = 2, 4  # chains of variables, one of them asked for; assignments from one variable to the next in each


def _passkey(depth: float, draw: random.Random, filler: Filler) -> Draft:
    key = digits(draw, 5)
    sentences = cached(filler(draw))
    needle = f"The pass key is {key}. Remember it."

    def build(n: int) -> str:
        return "Remember the pass key in this text.\n" + " ".join(insert(sentences(n), needle, depth)) + "\n"

    lead = "The pass key is"
    return Draft(build, f"What is the pass key? {lead}", (key,), lead=lead)


def _multikey(depth: float, draw: random.Random, filler: Filler) -> Draft:
    name = distinct(lambda: f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}")
    number = distinct(lambda: digits(draw, 6))
    pairs = [(name(), number()) for _ in range(NEEDLES)]
    needles = [f"The number of {key} is {value}." for key, value in pairs]
    places = [draw.random() for _ in range(NEEDLES - 1)]  # of the needles that are not asked for
    sentences = cached(filler(draw))

    def build(n: int) -> str:
        text = sentences(n)
        for needle, place in zip(needles[1:], sorted(places), strict=True):
            text = insert(text, needle, place)
        return "Remember the numbers in this text.\n" + " ".join(insert(text, needles[0], depth)) + "\n"

    key, value = pairs[0]
    lead = f"The number of {key} is"
    return Draft(build, f"What is the number of {key}? {lead}", (value,), lead=lead)


def _variables(depth: float, draw: random.Random, filler: Filler) -> Draft:
    name = distinct(lambda: letters(draw, 3).upper())
    number = distinct(lambda: digits(draw, 5))
    lines: list[tuple[float, str]] = []  # place in the text, 0 to 1, and assignment
    chains: list[tuple[list[str], str]] = []  # variables and their value; the first chain is asked for
    for _ in range(CHAINS):
        names, value = [name() for _ in range(HOPS + 1)], number()
        chains.append((names, value))
        places = sorted(draw.random() for _ in names)  # a variable is assigned before it is read
        statements = [f"VAR {names[0]} = {value}."]
        statements += [f"VAR {after} = VAR {before}." for before, after in pairwise(names)]
        lines += zip(places, statements, strict=True)
    lines.sort()
    sentences = cached(filler(draw))

    def build(n: int) -> str:
        text, parts, done = sentences(n), ["Follow the variables in this text.\n"], 0
        for place, line in lines:
            at = round(place * n)
            parts += [f"{sentence} " for sentence in text[done:at]] + [f"{line} "]
            done = at
        return "".join(parts) + " ".join(text[done:]) + "\n"

    (names, value), *rest = chains
    others = tuple(name for chain, _ in rest for name in chain)
    lead = f"The variables with the value {value} are"
    question = f"Which {len(names)} variables have the value {value}? {lead}"
    return Draft(build, question, tuple(names), others=others, lead=lead)


PASSKEY = Task(_passkey, uses_depth=True, scoring="all")
MULTIKEY = Task(_multikey, uses_depth=True, scoring="all")
VARIABLES = Task(_variables, uses_depth=False, scoring="all")
