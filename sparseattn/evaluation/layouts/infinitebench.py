"""InfiniteBench (https://arxiv.org/abs/2402.13718): twelve tasks, asked by the prompts that its code has for models
with open weights (`yarn_mistral_templates`)."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, names_of, optional_text, task_of, text, texts
from sparseattn.evaluation.layouts.templates import Published, load, python_value
from sparseattn.evaluation.tasks.base import Chat, Example

PUBLISHED = Published(
    "https://github.com/OpenBMB/InfiniteBench",
    "88b3daa",
    "src/prompt.py",
    "d49a6891d6bc61522bb428d66a07b092a6bb6bc195aa0fe103eddd6bb39c7f10",
)
TEMPLATES = "yarn_mistral_templates"
# A task -> tokens of an answer at most.
LIMITS = {
    "passkey": 6,
    "number_string": 12,
    "kv_retrieval": 50,
    "longbook_sum_eng": 1200,
    "longbook_choice_eng": 40,
    "longbook_qa_eng": 40,
    "longbook_qa_chn": 40,
    "longdialogue_qa_eng": 40,
    "math_find": 3,
    "math_calc": 30000,
    "code_run": 5,
    "code_debug": 5,
}
CHOICES = ("longbook_choice_eng", "code_debug")
NUMBERS = ("math_find", "math_calc", "code_run")
HOLE = "\0context\0"  # stands for the context while a template is filled


def _values(task: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return what a template of the task is filled with, besides the context."""
    question = optional_text(fields, "input")
    if task in CHOICES:
        options = texts(fields, "options", 4)
        return {
            "question": question,
            **{f"OPTION_{letter}": text_ for letter, text_ in zip("ABCD", options, strict=True)},
        }
    if task == "code_run":
        calls = re.findall(r"func_[0-9]+\(-?[0-9]+\)", question)
        if not calls:
            raise ValueError(f"input of code_run names a call such as func_1(-2), got {question!r}")
        return {"func": calls[0].partition("(")[0], "func_call": calls[0]}
    if task == "math_find":
        sought = re.findall(r"The .+ of", question)
        if not sought:
            raise ValueError(f'input of math_find holds "The ... of", got {question!r}')
        return {"prefix": f"What is {sought[0].lower()[:-3]} in the following list?", "input": question}
    return {"input": question, "question": question}


def label_of(task: str, fields: Mapping[str, Any]) -> Any:
    """Return what a response is compared with, of the kind that the benchmark's files have it in.

    Tables hold all of them as lists of texts: there a list of one text is the text, and numbers are numbers.
    """
    value = fields.get("answer")
    if task in CHOICES:
        parts = [value] if isinstance(value, str) else value
        options = texts(fields, "options", 4)
        if isinstance(parts, list) and len(parts) == 2 and parts[1] in ("A", "B", "C", "D"):
            return parts
        if not isinstance(parts, list) or len(parts) != 1 or parts[0] not in options:
            raise ValueError(f"the answer of {task} is one of the options, got {value!r}")
        return [parts[0], "ABCD"[options.index(parts[0])]]
    if task in NUMBERS:
        numbers = _numbers(value)
        if task == "math_calc" and (not isinstance(numbers, list) or not numbers or numbers[0] in (None, [])):
            raise ValueError(f"the answer of math_calc is a list of numbers, got {reprlib.repr(value)}")
        return numbers
    right = list(answers(fields, "answer"))
    if task.startswith("long"):
        return right
    if len(right) > 1:
        raise ValueError(f"the answer of {task} is one text, got {reprlib.repr(value)}")
    return right[0]


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    if isinstance(value, str):
        try:
            return int(value) if re.fullmatch(r"\s*-?\d+\s*", value) else float(value)
        except ValueError:
            raise ValueError(f"the answer is a number or a list of numbers, got {value!r}") from None
    return value


def _open(setup: Setup) -> Reader:
    published = load(PUBLISHED, setup)
    templates = python_value(published.text, TEMPLATES)

    def read(line: Line) -> Example:
        fields = line.fields
        task = task_of(setup.task, names_of(line.path), list(LIMITS), "infinitebench")
        label = label_of(task, fields)
        try:
            prompt = templates[task].format(context=HOLE, **_values(task, fields))
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise ValueError(f"the file of prompts has no usable template of {task}: {error!r}") from None
        before, hole, question = prompt.partition(HOLE)
        if not hole or HOLE in question:
            raise ValueError(f"the template of {task} has the context once")
        right = answers({"answer": _flat(label)}, "answer")
        return Example(
            f"infinitebench/{task}",
            before + text(fields, "context"),
            question,
            right,
            f"infinitebench/{task}",
            dict(published.facts),
            limit=LIMITS[task],
            one_line=False,
            chat=Chat(question),
            reference={"label": label},
        )

    return read


def _flat(label: Any) -> list[Any]:
    """Return the entries of a label, however deep its lists are."""
    return [leaf for item in label for leaf in _flat(item)] if isinstance(label, (list, tuple)) else [label]


def _fits(line: Line) -> bool:
    """Lines with options, or files that are named after a task."""
    named = any(name in LIMITS for name in names_of(line.path))
    return {"context", "input", "answer"} <= line.fields.keys() and ("options" in line.fields or named)


LAYOUT = Layout(
    "infinitebench",
    "InfiniteBench, https://arxiv.org/abs/2402.13718",
    frozenset({"context", "input", "answer", "options"}),
    frozenset({"id"}),
    _fits,
    _open,
)
