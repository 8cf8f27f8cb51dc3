"""A user's own lines: a prompt, or a context and a question, with answers.

A prompt is `prompt`, or `context` and `question`. The question may be called `input`, and `input` without `context` is
a whole prompt. What the answer is to begin with is `answer_prefix` or `gen_prefix`, and how many tokens it may have is
`max_new_tokens`. Answers are a text or a list of texts under one of `ANSWERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import answers, number, optional_text, text
from sparseattn.evaluation.tasks.base import Example

ANSWERS = ("answers", "answer", "outputs")
LEADS = ("answer_prefix", "gen_prefix")


def check_template(template: str) -> None:
    """ValueError for a template that does not hold `{context}` and behind it `{question}`, once each."""
    once = template.count("{context}") == 1 and template.count("{question}") == 1
    if not once or template.index("{context}") > template.index("{question}"):
        raise ValueError(f"a template holds {{context}} and behind it {{question}}, once each, got {template!r}")


def _open(setup: Setup) -> Reader:
    if setup.task is not None:
        raise ValueError(f"it has no tasks: write --layout plain without {setup.task!r}")
    check_template(setup.template)
    if setup.tail < 1:
        raise ValueError(f"the question of a whole prompt has 1 character or more, got {setup.tail}")

    def read(line: Line) -> Example:
        fields = line.fields
        lead = _lead(fields)
        right = _answers(fields)
        if fields.get("context") is not None:
            context, question = _two_parts(fields, setup.template)
            question += lead
        else:
            context, question = _whole(fields, lead, setup.tail)
            lead = lead if len(lead) < setup.tail else ""  # a longer one would leave no question before it
        if not context or not question:
            raise ValueError("context and question are not empty")
        limit = None if fields.get("max_new_tokens") is None else number(fields, "max_new_tokens")
        return Example(
            setup.path.stem,
            context,
            question,
            right,
            setup.scoring,
            lead=lead,
            limit=limit,
            own_limit=limit is not None,
        )

    return read


def _lead(fields: Mapping[str, Any]) -> str:
    leads = [name for name in LEADS if fields.get(name)]
    if len(leads) > 1:
        raise ValueError(f"an answer has one beginning, got {' and '.join(leads)}")
    return optional_text(fields, leads[0]) if leads else ""


def _answers(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the right answers, which may stand under several names if they are the same."""
    names = [name for name in ANSWERS if fields.get(name) not in (None, "", [])]
    right = answers(fields, *names or ANSWERS)
    for name in names[1:]:
        if answers(fields, name) != right:
            raise ValueError(f"answers stand under one name, got others under {names[0]} than under {name}")
    return right


def _two_parts(fields: Mapping[str, Any], template: str) -> tuple[str, str]:
    names = [name for name in ("question", "input") if fields.get(name)]
    if not names:
        raise ValueError("a context comes with a question, under question or input")
    if len(names) > 1 or fields.get("prompt"):
        more = names[1:] if len(names) > 1 else ["prompt"]
        raise ValueError(f"a context comes with one question, got context, {names[0]} and {more[0]}")
    before, _, behind = template.partition("{context}")
    return before + text(fields, "context"), behind.replace("{question}", text(fields, names[0]))


def _whole(fields: Mapping[str, Any], lead: str, tail: int) -> tuple[str, str]:
    name = "prompt" if fields.get("prompt") else "input"
    more = [other for other in ("question", "input") if other != name and fields.get(other)]
    whole = fields.get(name)
    if not isinstance(whole, str):
        raise ValueError("a prompt is under prompt or input, or in two parts under context and question")
    if more:
        raise ValueError(
            f"a prompt without a context is one text, got {name} and {more[0]}: name the long part context, or leave "
            f"out {more[0]}"
        )
    if whole.lstrip()[:1] == "[" and '"role"' in whole[:200]:
        raise ValueError(f"{name} is a conversation, not a text: the layout mrcr reads such lines")
    whole += lead
    if len(whole) <= tail:
        raise ValueError(f"a prompt is longer than its question of {tail} characters, got {len(whole)} under {name}")
    return whole[:-tail], whole[-tail:]


LAYOUT = Layout(
    "plain",
    "lines of your own: prompt, or context and question, and answers",
    frozenset({"prompt", "context", "question", "input", *ANSWERS, *LEADS, "max_new_tokens"}),
    # What only names a metric or a place in a data set: `--scoring` is the metric of such lines.
    frozenset({"task", "dataset", "language", "length", "max_length", "index", "id", "_id"}),
    lambda line: True,
    _open,
)
