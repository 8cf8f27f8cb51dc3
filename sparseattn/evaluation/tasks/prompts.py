"""Prompts and answers from a user's JSON Lines file, in the field names of LongBench, RULER and InfiniteBench."""

from __future__ import annotations

import math
import os
import reprlib
from pathlib import Path
from typing import Any

from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.jsonlines import json_object

ANSWERS = ("answers", "answer", "outputs")
TEMPLATE = "{context}\n\n{question}"
TAIL = 100  # characters of a prompt without a question that count as one, as in Quest's LongBench code


def read_prompts(
    path: str | os.PathLike[str], scoring: str, template: str = TEMPLATE, tail: int = TAIL
) -> list[Example]:
    """The examples of a file, a JSON object a line.

    A prompt is `prompt`, or `context` and `question`. The question may be called `input`, as in LongBench (`input`,
    `context`, `answers`) and InfiniteBench (`context`, `input`, `answer`); `input` without `context` is a whole
    prompt, as in RULER (`input`, `outputs`), whose `answer_prefix` is appended and begins the answer. Answers are a
    string or a list of them under one of `ANSWERS`. Other fields are not read.

    Args:
        path: the file.
        scoring: of every example.
        template: how context and question become a prompt; everything behind `{context}` is the question.
        tail: characters at the end of a whole prompt that are its question.

    Raises:
        OSError: no such file.
        ValueError: naming file and line, no usable JSON object (see `json_object`) or fields missing; a file that is
            not UTF-8; an unfit template.
    """
    if template.count("{context}") != 1 or template.count("{question}") != 1 or not _in_order(template):
        raise ValueError(f"a template holds {{context}} and behind it {{question}}, once each, got {template!r}")
    if tail < 1:
        raise ValueError(f"the question of a whole prompt has 1 character or more, got {tail}")
    examples = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                context, question, answers, lead = _fields(json_object(line), template, tail)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            meta = {"file": Path(path).name, "line": number}
            examples.append(Example(Path(path).stem, context, question, answers, scoring, meta, lead=lead))
    if not examples:
        raise ValueError(f"{path} holds no prompt")
    return examples


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 file.

    Raises:
        OSError: no such file.
        ValueError: it is not UTF-8.
    """
    data = Path(path).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None


def _in_order(template: str) -> bool:
    return template.index("{context}") < template.index("{question}")


def _answer(one: Any) -> bool:
    """Whether it is an answer: text, or a finite number."""
    if isinstance(one, float):
        return math.isfinite(one)
    return isinstance(one, (str, int)) and bool(str(one).strip())


def _fields(record: dict[str, Any], template: str, tail: int) -> tuple[str, str, tuple[str, ...], str]:
    """Context, question, answers and lead of a line. ValueError in a sentence for one that lacks them."""
    lead = ""
    answers = next((record[name] for name in ANSWERS if name in record), None)
    held = answers if isinstance(answers, list) else [answers]
    if not held or not all(map(_answer, held)):
        got = reprlib.repr(answers)
        raise ValueError(f"answers are a string or a list of strings under {', '.join(ANSWERS)}, got {got}")
    if "context" in record:
        names = [name for name in ("question", "input") if record.get(name)]
        if not names:
            raise ValueError("a context comes with a question, under question or input")
        before, _, behind = template.partition("{context}")
        context, question = before + str(record["context"]), behind.replace("{question}", str(record[names[0]]))
    else:
        name = "prompt" if record.get("prompt") else "input"
        whole = record.get(name)
        if not isinstance(whole, str):
            raise ValueError("a prompt is under prompt or input, or in two parts under context and question")
        prefix = str(record.get("answer_prefix", ""))
        whole += prefix
        lead = prefix if len(prefix) < tail else ""  # a longer one would leave no question before it
        if len(whole) <= tail:
            raise ValueError(
                f"a prompt is longer than its question of {tail} characters, got {len(whole)} under {name}"
            )
        context, question = whole[:-tail], whole[-tail:]
    if not context or not question:
        raise ValueError("context and question are not empty")
    return context, question, tuple(map(str, held)), lead
