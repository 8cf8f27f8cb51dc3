"""LongBench and LongBench-E (https://arxiv.org/abs/2308.14508): 21 tasks in English, Chinese and code.

As in its `pred.py`, six tasks (examples of a few shots and code) are never put in a chat, answers go on to their limit,
and only those of `samsum` end at a line's end. It cuts prompts that are too long in the middle of the whole prompt;
here `--max-length` cuts the middle of the context, and the question stays whole.
"""

from __future__ import annotations

import string
from typing import Any

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, names_of, optional_text, task_of, text, texts
from sparseattn.evaluation.layouts.templates import Published, load
from sparseattn.evaluation.metrics.longbench import check_answers
from sparseattn.evaluation.tasks.base import Chat, Example
from sparseattn.utils.json_text import parse_object

PUBLISHED = Published(
    "https://github.com/THUDM/LongBench",
    "2e00731",
    "LongBench/config/dataset2prompt.json",
    "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
)
F1, ROUGE = ("longbench/f1", "longbench/rouge")
# A task -> tokens of an answer at most, and its metric.
TASKS: dict[str, tuple[int, str]] = {
    "narrativeqa": (128, F1),
    "qasper": (128, F1),
    "multifieldqa_en": (64, F1),
    "multifieldqa_zh": (64, "longbench/f1_zh"),
    "hotpotqa": (32, F1),
    "2wikimqa": (32, F1),
    "musique": (32, F1),
    "dureader": (128, "longbench/rouge_zh"),
    "gov_report": (512, ROUGE),
    "qmsum": (512, ROUGE),
    "multi_news": (512, ROUGE),
    "vcsum": (512, "longbench/rouge_zh"),
    "trec": (64, "longbench/classification"),
    "triviaqa": (32, F1),
    "samsum": (128, ROUGE),
    "lsht": (64, "longbench/classification"),
    "passage_count": (32, "longbench/count"),
    "passage_retrieval_en": (32, "longbench/retrieval"),
    "passage_retrieval_zh": (32, "longbench/retrieval_zh"),
    "lcc": (64, "longbench/code"),
    "repobench-p": (64, "longbench/code"),
}
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # scored by the first line of the response
NEVER_CHAT = (*FIRST_LINE, "lcc", "repobench-p")


def check_template(template: Any, task: str) -> str:
    """Return a template that holds `{context}` once and behind it at most `{input}`. ValueError for another."""
    if isinstance(template, str):
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError:
            names = []
        if names in (["context"], ["context", "input"]) and "{{" not in template:
            return template
    raise ValueError(f"the file of prompts has no template of {task} with {{context}} and then {{input}}")


def _open(setup: Setup) -> Reader:
    published = load(PUBLISHED, setup)
    templates = parse_object(published.text)

    def read(line: Line) -> Example:
        fields = line.fields
        named = fields.get("dataset") if isinstance(fields.get("dataset"), str) else None
        names = [name for name in (named, *names_of(line.path)) if name]
        given = setup.task and setup.task.removesuffix("_e")
        task = task_of(given, [name.removesuffix("_e") for name in names], list(TASKS), "longbench")
        even = "_e" if f"{task}_e" in (setup.task, *names) else ""  # LongBench-E, of even lengths
        before, _, behind = check_template(templates.get(task), task).partition("{context}")
        question = behind.replace("{input}", optional_text(fields, "input"))
        limit, metric = TASKS[task]
        reference: dict[str, Any] = {"first_line": task in FIRST_LINE}
        if metric == "longbench/classification":
            reference["all_classes"] = list(texts(fields, "all_classes"))
        right = answers(fields, "answers")
        check_answers(metric, right)
        return Example(
            f"longbench/{task}{even}",
            before + text(fields, "context"),
            question,
            right,
            metric,
            dict(published.facts),
            limit=limit,
            one_line=task == "samsum",
            chat=None if task in NEVER_CHAT else Chat(question),
            reference=reference,
        )

    return read


LAYOUT = Layout(
    "longbench",
    "LongBench, https://arxiv.org/abs/2308.14508",
    frozenset({"input", "context", "answers", "dataset", "all_classes"}),
    frozenset({"length", "language", "_id"}),
    lambda line: {"context", "answers", "all_classes"} <= line.fields.keys() and "answer_prefix" not in line.fields,
    _open,
)
