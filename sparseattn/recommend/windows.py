"""Windows of texts: some to choose by, and others, which share no token with them, to verify on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.prompt import Prompt


@dataclass(frozen=True, eq=False)
class TextWindow:
    """A stretch of a text, the end of which is predicted.

    Args:
        number: of all windows, from 0 on.
        held_out: whether nothing is chosen by it.
        prompt: what to measure on.
    """

    number: int
    held_out: bool
    prompt: Prompt


def windows(
    texts: Sequence[tuple[str, str, Sequence[int]]],
    start: Sequence[int],
    length: int,
    last: int,
    search: int,
    held_out: int,
) -> list[TextWindow]:
    """`search` and `held_out` windows, in turns and evenly spread over the texts, no two of which overlap.

    Args:
        texts: name, kind and tokens of each.
        start: tokens before any text.
        length: tokens of a window.
        last: tokens at its end that are predicted.
        search, held_out: how many.

    Raises:
        ValueError: the texts are too short for so many windows, or a window for the tokens at its end.
    """
    if length < last + 2 + len(start):
        raise ValueError(f"a window of {length} tokens does not hold the {last} to predict and 2 before them")
    body, wanted = length - len(start), search + held_out
    room = [len(ids) // body for _, _, ids in texts]
    if sum(room) < wanted:
        raise ValueError(
            f"{search} windows to choose by and {held_out} to verify on, of {length} tokens each, need {wanted * body} "
            f"tokens, and the texts hold {sum(room)} such windows: give more text, shorter or fewer windows"
        )
    chosen: list[TextWindow] = []
    for (name, kind, ids), count in zip(texts, shared(room, wanted), strict=True):
        for i in range(count):
            at = round(i * (len(ids) - body) / max(count - 1, 1))
            facts = {"task": AGREEMENT, "text": name, "kind": kind, "length": length, "start": at}
            n = len(chosen)
            searched = (n + 1) * search // wanted > n * search // wanted
            chosen.append(TextWindow(n, not searched, Prompt.passage(facts, [*start, *ids[at : at + body]], last)))
    return chosen


def shared(room: Sequence[int], wanted: int) -> list[int]:
    """`wanted` things over places with room for so many each, in proportion to the room."""
    total, given = sum(room), [0] * len(room)
    for n in range(wanted):  # to the place that is furthest behind its share
        given[
            max(range(len(room)), key=lambda i: room[i] * (n + 1) / total - given[i] if given[i] < room[i] else -n)
        ] += 1
    return given
