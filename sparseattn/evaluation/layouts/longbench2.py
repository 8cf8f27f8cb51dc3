"""LongBench v2 (https://arxiv.org/abs/2412.15204): a question with four choices, answered by its letter, without
examples or chains of thought.

Its code asks at a temperature of 0.1 and cuts prompts in the middle; answers here are greedy.
"""

from __future__ import annotations

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import text
from sparseattn.evaluation.layouts.templates import Published, load
from sparseattn.evaluation.tasks.base import Chat, Example

PUBLISHED = Published(
    "https://github.com/THUDM/LongBench",
    "2e00731",
    "prompts/0shot.txt",
    "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950",
)
CHOICES = {"choice_A": "$C_A$", "choice_B": "$C_B$", "choice_C": "$C_C$", "choice_D": "$C_D$"}
MARKS = {"question": "$Q$", **CHOICES}  # of its template besides the context's, in the order of its code
LIMIT = 128


def _open(setup: Setup) -> Reader:
    published = load(PUBLISHED, setup)
    for mark in ("$DOC$", *MARKS.values()):
        if published.text.count(mark) != 1 or published.text.index(mark) < published.text.find("$DOC$"):
            raise ValueError(f"the file of prompts has {mark} once, and none of the marks before $DOC$")
    before, _, behind = published.text.partition("$DOC$")

    def read(line: Line) -> Example:
        fields = line.fields
        values = {mark: text(fields, name).strip() for name, mark in MARKS.items()}

        def filled(words: str) -> str:
            """With marks replaced one after the other, those that stand in the context too, as its code does."""
            for mark, value in values.items():
                words = words.replace(mark, value)
            return words

        question = filled(behind)
        if (right := text(fields, "answer")) not in ("A", "B", "C", "D"):
            raise ValueError(f"the answer is one of the letters A, B, C, D, got {right!r}")
        facts = {name: fields[name] for name in ("difficulty", "domain") if isinstance(fields.get(name), str)}
        return Example(
            "longbench2",
            before + filled(text(fields, "context").strip()),
            question,
            (right,),
            "longbench2/accuracy",
            {**published.facts, **facts},
            limit=LIMIT,
            one_line=False,
            chat=Chat(question),
        )

    return read


LAYOUT = Layout(
    "longbench2",
    "LongBench v2, https://arxiv.org/abs/2412.15204",
    frozenset({"question", *CHOICES, "answer", "context"}),
    frozenset({"_id", "domain", "sub_domain", "difficulty", "length"}),
    lambda line: CHOICES.keys() <= line.fields.keys(),
    _open,
)
