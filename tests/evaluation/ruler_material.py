"""What RULER's tasks are made of in tests: made-up words and questions, a text that ships, a tokenizer of words."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from sparseattn.evaluation.ruler.documents import read_questions
from sparseattn.evaluation.ruler.tasks import Material
from sparseattn.evaluation.ruler.words import WordLists
from sparseattn.traces.texts import read_named


def words(text: str) -> int:
    """Tokens of a tokenizer that knows words: long pieces, and fewer of them than bytes."""
    return len(re.findall(r"\w{1,4}|[^\w\s]", text))


def word_lists() -> WordLists:
    """As many words as wonderwords has; some adjectives have a hyphen, and some words are in two lists."""
    draw = random.Random(1)
    made = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 7))) for _ in range(9000)]
    adjectives = [*made[:900], made[0] + "-eyed", made[1] + "-like", made[0]]
    return WordLists(adjectives, made[900:7700], made[7650:])


def squad() -> dict[str, Any]:
    """A file in the form of SQuAD 2."""
    draw, article = random.Random(2), []
    vocabulary = word_lists().nouns

    def said(n: int) -> str:
        return " ".join(draw.choices(vocabulary, k=n))

    for _ in range(12):
        paragraphs = [
            {
                "context": said(draw.randint(20, 60)) + ".",
                "qas": [
                    {
                        "question": said(6) + "?",
                        "is_impossible": draw.random() < 0.3,
                        "answers": [{"text": said(2)} for _ in range(draw.randint(1, 3))],
                    }
                    for _ in range(2)
                ],
            }
            for _ in range(draw.randint(2, 14))
        ]
        article.append({"title": said(2), "paragraphs": paragraphs})
    return {"version": "made up", "data": article}


def hotpotqa() -> list[dict[str, Any]]:
    """A file in the form of HotpotQA."""
    draw = random.Random(3)
    vocabulary = word_lists().nouns

    def said(n: int) -> str:
        return " ".join(draw.choices(vocabulary, k=n))

    return [
        {
            "question": said(8) + "?",
            "answer": said(2),
            "context": [[said(2), [f"{said(6)}.", f" {said(7)}."]] for _ in range(10)],
        }
        for _ in range(20)
    ]


def material(folder: Path, questions: Any = None) -> Material:
    """All that the tasks need, with the questions of a file that is written to `folder`."""
    path = folder / "questions.json"
    path.write_text(json.dumps(squad() if questions is None else questions))
    return Material(word_lists(), read_named("alice"), "alice", questions=read_questions(path))
