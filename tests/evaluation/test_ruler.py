"""RULER's tasks fill their length, hold their answers, and come in RULER's order from one seed."""

from __future__ import annotations

import random
import re
from itertools import islice

import pytest

from sparseattn.evaluation.ruler.tasks import TEMPLATES, Material, examples
from sparseattn.evaluation.ruler.words import Names, WordLists
from sparseattn.evaluation.tasks.base import Example
from sparseattn.traces.texts import read_named


def words(text: str) -> int:
    """Tokens of a tokenizer that knows words: long pieces, and fewer of them than bytes."""
    return len(re.findall(r"\w{1,4}|[^\w\s]", text))


@pytest.fixture(scope="module")
def material() -> Material:
    """Made-up words, so that nothing is fetched, and a text that ships."""
    draw = random.Random(1)
    made = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 7))) for _ in range(9000)]
    return Material(WordLists(made[:900], made[900:7700], made[7700:]), read_named("alice"), "alice")


def made(task: str, length: int, material: Material, n: int = 3, seed: int = 42) -> list[Example]:
    return list(islice(examples(task, length, material, count=words, seed=seed), n))


@pytest.mark.parametrize("task", TEMPLATES)
@pytest.mark.parametrize("length", [2048, 4096])
def test_prompt_and_answer_fit_the_length(task: str, length: int, material: Material) -> None:
    for one in made(task, length, material):
        tokens = words(one.context) + words(one.question) + TEMPLATES[task].answer_tokens
        assert length // 2 < tokens <= length
        assert one.limit == TEMPLATES[task].answer_tokens


def test_names_are_those_of_all_pairs_sorted() -> None:
    adjectives = ["blue", "blue-eyed", "bl", "black", "blue-eyed-grey", "red", "blue", "b"]
    nouns = ["ant", "eyed", "eyed-owl", "zebra", "ant", "-x", "eyed-grey"]
    names = Names(adjectives, nouns)
    assert list(names) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert names[3:5] == [names[3], names[4]]
    with pytest.raises(IndexError):
        names[len(names)]
