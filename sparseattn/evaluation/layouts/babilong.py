"""BABILong (https://arxiv.org/abs/2406.10149): bAbI's facts among pages of books, with its instruction, examples and
form of an answer."""

from __future__ import annotations

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, names_of, task_of, text
from sparseattn.evaluation.layouts.templates import Published, load, python_value
from sparseattn.evaluation.metrics.babilong import LABELS
from sparseattn.evaluation.tasks.base import Chat, Example

PUBLISHED = Published(
    "https://github.com/booydar/babilong",
    "7a6efee",
    "babilong/prompts.py",
    "be08d7e466170177e38fddb997e3dd9ffb281d5a830edd240933e069a9c5c2ee",
)
LIMIT = 20
PARTS = ("instruction", "examples", "post_prompt")
HOLE = "\0context\0"


def _open(setup: Setup) -> Reader:
    published = load(PUBLISHED, setup)
    template, prompts = (python_value(published.text, name) for name in ("DEFAULT_TEMPLATE", "DEFAULT_PROMPTS"))

    def read(line: Line) -> Example:
        fields = line.fields
        task = task_of(setup.task, names_of(line.path), list(LABELS), "babilong")
        if task not in prompts:
            raise ValueError(f"the file of prompts has none of {task}")
        wording = text(fields, "question")
        parts = {name: prompts[task][name] for name in PARTS}
        prompt = template.format(context=HOLE, question=wording, **parts).strip()
        before, _, question = prompt.partition(HOLE)
        return Example(
            f"babilong/{task}",
            before + text(fields, "input").strip(),
            question,
            answers(fields, "target"),
            "babilong/accuracy",
            dict(published.facts),
            limit=LIMIT,
            one_line=False,
            chat=Chat(question),
            reference={"task": task, "question": wording},
        )

    return read


LAYOUT = Layout(
    "babilong",
    "BABILong, https://arxiv.org/abs/2406.10149",
    frozenset({"input", "question", "target"}),
    frozenset(),
    lambda line: {"input", "question", "target"} <= line.fields.keys(),
    _open,
)
