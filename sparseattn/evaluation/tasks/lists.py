"""Contexts of one kind of line or word only: key-value records, and words that recur.

Key-value retrieval is InfiniteBench's (https://arxiv.org/abs/2402.13718): every distractor has the needle's form. The
frequent words are RULER's (https://arxiv.org/abs/2404.06654): made-up words whose counts fall as a power of the rank.
"""

from __future__ import annotations

import random

from sparseattn.evaluation.tasks.base import Draft, Filler, Task, cached, digits, distinct, insert, letters

VOCABULARY = 40  # made-up words of a list
ASKED = 3  # the most frequent of them
EXPONENT = 2.0  # a word's count falls as rank ** -EXPONENT, as in RULER's easiest setting
LEAST = 60  # words from which on the third and the fourth differ in their counts


def _records(depth: float, draw: random.Random, filler: Filler) -> Draft:
    key, value = distinct(lambda: letters(draw, 6)), distinct(lambda: digits(draw, 6))
    wanted, answer = key(), value()
    records = cached(lambda: f"{key()}:{value()}")

    def build(n: int) -> str:
        return (
            "Every line is a key and its value.\n" + "\n".join(insert(records(n), f"{wanted}:{answer}", depth)) + "\n"
        )

    return Draft(build, f"What is the value of {wanted}?\n{wanted}:", (answer,), lead=f"{wanted}:")


def _words(depth: float, draw: random.Random, filler: Filler) -> Draft:
    word = distinct(lambda: letters(draw, 5))
    words = [word() for _ in range(VOCABULARY)]
    shares = [rank**-EXPONENT for rank in range(1, VOCABULARY + 1)]
    order = draw.getrandbits(62)

    def build(n: int) -> str:
        counts = [int(n * share / sum(shares)) for share in shares]
        counts[0] += n - sum(counts)
        listed = [word for word, times in zip(words, counts, strict=True) for _ in range(times)]
        random.Random(order).shuffle(listed)
        return "Some words of this list recur more often than others.\n" + " ".join(listed) + "\n"

    lead = "The three most frequent words are"
    question = f"What are the three most frequent words? {lead}"
    return Draft(build, question, tuple(words[:ASKED]), LEAST, tuple(words[ASKED:]), lead)


KV = Task(_records, uses_depth=True, scoring="all")
WORDS = Task(_words, uses_depth=False, scoring="all")
