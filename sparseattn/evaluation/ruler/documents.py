"""RULER's questions on documents, of a file in the form of SQuAD or HotpotQA: those of the question among others."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseattn.evaluation.ruler.room import Room, RulerPrompt, fitted, largest
from sparseattn.evaluation.ruler.templates import DOCUMENT, QUESTIONS
from sparseattn.utils.json_text import JsonError, parse

STEP = 10  # documents


@dataclass(frozen=True)
class DocumentQuestion:
    """A question.

    Args:
        words: of the question.
        answers: the right ones.
        own: numbers of the documents that it needs.
        near: numbers of those that come before any others, such as the rest of an article.
    """

    words: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class Questions:
    """A file: its name, questions in their order, and documents, each once, sorted."""

    name: str
    questions: Sequence[DocumentQuestion]
    documents: Sequence[str]


def read_questions(path: str | os.PathLike[str]) -> Questions:
    """Read a file in the form of SQuAD (an object with `data`) or of HotpotQA (a list).

    SQuAD's questions without an answer (`is_impossible`) are left out.

    Raises:
        OSError: no such file.
        ValueError: no JSON, or none of the two forms.
    """
    try:
        content = parse(Path(path).read_bytes(), finite=False, once=False)
        if isinstance(content, Mapping) and isinstance(content.get("data"), list):
            documents, questions = _squad(content["data"])
        elif isinstance(content, list):
            documents, questions = _hotpotqa(content)
        else:
            raise ValueError('an object with a list "data" (SQuAD) or a list of questions (HotpotQA), it is neither')
    except JsonError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path} is none of SQuAD's form nor of HotpotQA's: a part of it has no {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is none of SQuAD's form nor of HotpotQA's: {error}") from None
    if not all(isinstance(document, str) for document in documents):
        raise ValueError(f"{path}: a document is text, under context")
    if not questions:
        raise ValueError(f"{path} holds no question that has an answer")
    return Questions(Path(path).name, questions, documents)


def _squad(articles: Sequence[Any]) -> tuple[list[str], list[DocumentQuestion]]:
    documents = sorted({paragraph["context"] for article in articles for paragraph in article["paragraphs"]})
    numbers = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in articles:
        article_numbers = [numbers[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = numbers[paragraph["context"]]
            same_article = tuple(number for number in article_numbers if number != own)
            for question in paragraph["qas"]:
                if not question.get("is_impossible", False):  # SQuAD 1.1 does not say
                    answers = [answer["text"] for answer in question["answers"]]
                    questions.append(_question(question["question"], answers, (own,), same_article))
    return documents, questions


def _hotpotqa(items: Sequence[Any]) -> tuple[list[str], list[DocumentQuestion]]:
    written = [[f"{title}\n{''.join(sentences)}" for title, sentences in item["context"]] for item in items]
    documents = sorted({document for of_item in written for document in of_item})
    numbers = {document: number for number, document in enumerate(documents)}
    return documents, [
        _question(item["question"], [item["answer"]], tuple(numbers[document] for document in of_item))
        for item, of_item in zip(items, written, strict=True)
    ]


def _question(
    words: Any, answers: Sequence[Any], own: tuple[int, ...], same_article: tuple[int, ...] = ()
) -> DocumentQuestion:
    if (
        not isinstance(words, str)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise ValueError(f"a question is text with one answer or more, got {words!r} and {list(answers)!r}")
    return DocumentQuestion(words, tuple(answers), own, same_article)


class Documents:
    """Draws prompts, one for each question, in their order.

    Args:
        seed: of all prompts.
        questions: of a file.
    """

    def __init__(self, seed: int, questions: Questions) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.file, self.questions, self.documents = questions.name, questions.questions, questions.documents

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, until there are no more questions.

        Raises:
            ValueError: the length does not hold one, or there is none left.
        """

        def first(n: int) -> RulerPrompt:
            return self.draw(n, 0)

        own = max(len(question.own) for question in self.questions)
        fewest = max(STEP, own)
        each = room.tokens(first(fewest)) / fewest
        number = largest(first, room, fewest, int(room.most / each * 3))
        yield from fitted(self.draw, room, number, STEP, own)

    def draw(self, n: int, sample: int) -> RulerPrompt:
        """Return a prompt of n documents for the question of that number."""
        if sample >= len(self.questions):
            raise ValueError(f"{self.file} holds {len(self.questions)} questions, asked for {sample + 1} or more")
        question = self.questions[sample]
        if n >= len(self.documents):  # all of them, again and again
            rounds = -(-n // len(self.documents))
            chosen = (list(self.documents) * rounds)[:n]
        else:
            chosen = [self.documents[number] for number in self._chosen(question, n)]
        random.Random(self.seed).shuffle(chosen)
        context = "\n\n".join(
            DOCUMENT.format(number=number, document=document) for number, document in enumerate(chosen, 1)
        )
        ask = QUESTIONS.ask.format(query=question.words)
        return RulerPrompt(QUESTIONS.head + context, ask + QUESTIONS.lead, QUESTIONS.lead, question.answers, n)

    def _chosen(self, question: DocumentQuestion, n: int) -> list[int]:
        own, same_article = list(question.own), list(question.near)
        more = n - len(own)
        if more <= len(same_article):
            return own + self.random.sample(same_article, more)
        known = {*own, *same_article}
        others = [number for number in range(len(self.documents)) if number not in known]
        return own + same_article + self.random.sample(others, more - len(same_article))
