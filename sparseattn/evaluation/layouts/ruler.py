"""RULER's lines (https://arxiv.org/abs/2404.06654) as its `prepare.py` writes them, or as lm-eval's tasks have them.

A line is the whole prompt under `input`, and how the answer begins under `answer_prefix` (RULER's) or `gen_prefix`
(lm-eval's, which a space separates). The question is the prompt's last line; of `qa` the last two paragraphs, as the
instruction is repeated there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, names_of, optional_text, task_of, text
from sparseattn.evaluation.tasks.base import Chat, Example

# A task of RULER -> tokens of an answer at most.
LIMITS = {
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3"), 128),
    **dict.fromkeys(("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), 128),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery"), 128),
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
LEADS = ("answer_prefix", "gen_prefix")


def metric_of(task: str) -> str:
    """Return the metric: any answer for questions, all answers else."""
    return "part" if task.startswith("qa") else "all"


def split(prompt: str, task: str) -> tuple[str, str]:
    """Return context and question of a prompt. ValueError for one without such a line."""
    ends, count = ("\n\n", 2) if task.startswith("qa") else ("\n", 1)
    parts = prompt.rsplit(ends, count)
    if len(parts) <= count or not parts[0].strip():
        raise ValueError(f"a prompt of {task} ends with {count} paragraph(s) of a question behind its context")
    context = parts[0] + ends
    return context, prompt[len(context) :]


def lead_of(fields: Mapping[str, Any]) -> str:
    """Return how the answer begins, with what separates it from the prompt."""
    leads = [name for name in LEADS if fields.get(name)]
    if len(leads) > 1:
        raise ValueError(f"an answer has one beginning, got {' and '.join(leads)}")
    lead = optional_text(fields, leads[0]) if leads else ""
    return f" {lead}" if leads == ["gen_prefix"] else lead


def _open(setup: Setup) -> Reader:
    def read(line: Line) -> Example:
        task = task_of(setup.task, names_of(line.path), list(LIMITS), "ruler")
        context, question = split(text(line.fields, "input"), task)
        lead = lead_of(line.fields)
        return Example(
            f"ruler/{task}",
            context,
            question + lead,
            answers(line.fields, "outputs"),
            f"ruler/{metric_of(task)}",
            lead=lead,
            limit=LIMITS[task],
            one_line=False,
            chat=Chat(question, lead),
        )

    return read


LAYOUT = Layout(
    "ruler",
    "RULER, https://arxiv.org/abs/2404.06654",
    frozenset({"input", "outputs", *LEADS}),
    frozenset({"index", "length", "length_w_model_temp", "token_position_answer", "max_length", "others", "task"}),
    lambda line: {"input", "outputs"} <= line.fields.keys() and "context" not in line.fields,
    _open,
)
