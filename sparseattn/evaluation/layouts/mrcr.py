"""OpenAI's MRCR (https://huggingface.co/datasets/openai/mrcr): a long conversation, and a request to repeat one turn.

The turns go into the model's chat template as they are: all but the last are the context, and the last is the question.
Its card names no limit of tokens; an answer may have twice the right one's and 8.
"""

from __future__ import annotations

from typing import Any

from sparseattn.evaluation.layouts.base import Layout, Line, Reader, Setup
from sparseattn.evaluation.layouts.fields import text
from sparseattn.evaluation.tasks.base import Chat, Example
from sparseattn.utils.json_text import parse

ROLES = ("system", "user", "assistant")


def conversation(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the turns of a conversation, a JSON text or a list of objects, each a role and its content.

    Raises:
        ValueError: no such list, or it does not end with two turns or more, the last of them the user's.
    """
    turns = parse(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or len(turns) < 2:
        raise ValueError("a prompt is a conversation of two turns or more, as JSON: [{role, content}, ...]")
    messages = []
    for number, turn in enumerate(turns, 1):
        whole = isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
        if not whole or set(turn) != {"role", "content"}:
            raise ValueError(f"turn {number} of the prompt is a role, of {', '.join(ROLES)}, and a text as its content")
        messages.append((turn["role"], turn["content"]))
    if messages[-1][0] != "user":
        raise ValueError(f"the last turn of the prompt is the user's, got {messages[-1][0]}")
    return tuple(messages)


def _open(setup: Setup) -> Reader:
    if setup.task is not None:
        raise ValueError(f"it has no tasks: write --layout mrcr without {setup.task!r}")
    if not setup.chat:
        raise ValueError("its prompts are conversations: ask them with --chat, of a model with a chat template")

    def read(line: Line) -> Example:
        fields = line.fields
        *before, (_, question) = conversation(fields.get("prompt"))
        prefix, answer = text(fields, "random_string_to_prepend"), text(fields, "answer")
        if not answer.startswith(prefix):
            raise ValueError("the answer begins with random_string_to_prepend")
        needles = fields.get("n_needles")
        return Example(
            f"mrcr/{needles}needle" if isinstance(needles, int) else "mrcr",
            "\n".join(content for _, content in before),
            question,
            (answer,),
            "mrcr/similarity",
            one_line=False,
            chat=Chat(question, before=tuple(before)),
            reference={"prefix": prefix},
        )

    return read


LAYOUT = Layout(
    "mrcr",
    "OpenAI's MRCR, https://huggingface.co/datasets/openai/mrcr",
    frozenset({"prompt", "answer", "random_string_to_prepend"}),
    frozenset({"n_needles", "desired_msg_index", "total_messages", "n_chars", "date_added"}),
    lambda line: "random_string_to_prepend" in line.fields,
    _open,
)
