"""The data sets of NVIDIA's kvpress: a benchmark's prompts in three parts, `context, question, answer_prefix`.

As in its pipeline, a line's end stands between question and answer prefix, and in a chat the answer prefix begins the
model's turn. Of a tokenizer that does not itself put a token before a text, none is put here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.layouts import longbench, ruler
from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, number, optional_text, task_of, text, texts
from sparseattn.evaluation.metrics import infinitebench
from sparseattn.evaluation.metrics.kvpress import UNSCORED
from sparseattn.evaluation.metrics.longbench import check_answers
from sparseattn.evaluation.tasks.base import Chat, Example

# Data sets by the names that kvpress gives them.
RULER, LONGBENCH, LONGBENCH_E, LONGBENCH2, INFINITEBENCH = DATA_SETS = (
    *("ruler", "longbench", "longbench-e", "longbench-v2", "infinitebench"),
)
CHOICES = ("choice_A", "choice_B", "choice_C", "choice_D")


def data_set(given: str | None, fields: Mapping[str, Any]) -> str:
    """Return the data set of a line.

    Raises:
        ValueError: it is none that is scored here.
    """
    if given is not None:
        return task_of(given, (), DATA_SETS, "kvpress")
    if all(choice in fields for choice in CHOICES):
        return LONGBENCH2
    task = optional_text(fields, "task")
    if task in ruler.LIMITS:
        return RULER
    if task.removesuffix("_e").removesuffix("-e") in longbench.TASKS:
        return LONGBENCH if task in longbench.TASKS else LONGBENCH_E
    if task in infinitebench.BY_TASK:
        return INFINITEBENCH
    raise ValueError(
        f"there is no metric for the task {task!r} of kvpress: RULER, LongBench, LongBench v2 and InfiniteBench are "
        f"scored here; give the data set with --layout kvpress:NAME, of {', '.join(DATA_SETS)}"
    )


def _metric(name: str, fields: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Return the task of a line, its metric and what that looks at."""
    if name == LONGBENCH2:
        return "", "kvpress/longbench2/accuracy", {}
    task = text(fields, "task")
    if name == RULER:
        known = task_of(None, [task], list(ruler.LIMITS), "kvpress:ruler")
        return task, f"kvpress/ruler/{ruler.metric_of(known)}", {"control": ""}
    if name == INFINITEBENCH:
        known = task_of(None, [task], list(infinitebench.BY_TASK), "kvpress:infinitebench")
        if known in UNSCORED:
            raise ValueError(f"kvpress has no score for InfiniteBench's {task}: its code fails or gives 0 to all")
        return task, f"kvpress/infinitebench/{known}", {"label": list(answers(fields, "answer"))}
    known = task.removesuffix("_e").removesuffix("-e")
    metric = longbench.TASKS[task_of(None, [known], list(longbench.TASKS), f"kvpress:{name}")][1]
    if name == LONGBENCH_E:
        number(fields, "length", least=0)
    reference: dict[str, Any] = {"first_line": known in longbench.FIRST_LINE}
    if metric == "longbench/classification":
        reference["all_classes"] = list(texts(fields, "all_classes"))
    return (
        task,
        metric if name == LONGBENCH_E else f"kvpress/{metric}",
        reference,
    )  # its scorer of -e is LongBench's own


def _open(setup: Setup) -> Reader:
    if setup.task is not None:
        data_set(setup.task, {})

    def read(line: Line) -> Example:
        fields = line.fields
        name = data_set(setup.task, fields)
        task, metric, reference = _metric(name, fields)
        question, lead = optional_text(fields, "question"), optional_text(fields, "answer_prefix")
        right = answers(fields, "answers" if name in (LONGBENCH, LONGBENCH_E) else "answer", "answer", "answers")
        check_answers(metric.removeprefix("kvpress/"), right)
        return Example(
            f"{name}/{task}" if task else name,
            text(fields, "context"),
            f"{question}\n{lead}",
            right,
            metric,
            {"data_set": name},
            lead=lead,
            limit=number(fields, "max_new_tokens"),
            own_limit=True,
            one_line=False,
            chat=Chat(question, lead),
            reference=reference,
            fields={field: value for field, value in fields.items() if field != "context"},
        )

    return read


LAYOUT = Layout(
    "kvpress",
    "the data sets of NVIDIA's kvpress, https://github.com/NVIDIA/kvpress",
    frozenset({"context", "question", "answer_prefix", "answer", "answers", "task", "max_new_tokens", "all_classes"}),
    # Of LongBench v2 the question holds the choices already.
    frozenset({"_id", "id", "length", "difficulty", "domain", "sub_domain", "dataset", "language", *CHOICES}),
    lambda line: {"context", "question", "answer_prefix", "max_new_tokens"} <= line.fields.keys(),
    _open,
)
