"""BABILong's accuracy (https://arxiv.org/abs/2406.10149): the answer is the only label of its task that is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_WAYS = ("e,e", "e,n", "e,s", "n,e", "n,n", "n,w", "s,e", "s,s", "s,w", "w,n", "w,s", "w,w")
# The answers that a task of bAbI can have.
LABELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13"), _PLACES),
    **dict.fromkeys(("qa6", "qa9", "qa17", "qa18"), ("no", "yes")),
    "qa5": ("bill", "fred", "jeff", "mary", "apple", "football", "milk"),
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa10": ("maybe", "no", "yes"),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa19": _WAYS,
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}


def accuracy(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """1 if the first sentence of a response names the answer and no other label.

    Labels that the question names do not count. An answer of several labels, as "apple,milk", needs all of them.

    Args:
        response: whole.
        answers: one.
        reference: `task`, a key of `LABELS`, and `question`.
    """
    labels = LABELS[reference["task"]]
    said = response.strip().lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    question = reference["question"].lower()
    named = {label for label in labels if label in said and label not in question}
    answer = answers[0].lower()
    wanted = set(answer.split(",")) if "," in answer and len(answer) > 3 else {answer}
    parts = len(answer.split(",")) if len(wanted) > 1 or ("," in answer and len(answer) > 3) else 1
    return float(wanted <= named and len(named) == parts)
