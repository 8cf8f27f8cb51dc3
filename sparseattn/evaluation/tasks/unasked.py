"""Values that a response names and nobody asked for, so that listing everything does not score as knowing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from sparseattn.evaluation.tasks.pieces import bare, is_number, is_unspaced, is_word, pieces, places

SEPARATORS = (",", ";", "|", "/", "&", "•", "*", ".", "、", "。", "and", "or")
FREE, ASKED = -1, 0  # of a piece: part of no known value, of an answer; 1 and up: of one that was not asked for


def unasked(response: str, answers: Sequence[str], others: Sequence[str] = ()) -> set[str]:
    """Return the distinct values of a response that are none of `answers`.

    Those are, besides `others` wherever they stand:

    - where the answers are numbers, every other number but those that count a list ("1. ... 2. ...");
    - else every item of a list (between commas, "and" and the like) of no more words than the longest answer, in
      which no answer stands; where the answers are single words, a list may be separated by white space too: then
      every word behind its first answer counts, but no character of Chinese or Japanese.

    Longer items are prose. What stands before a colon introduces the values, unless one stands there already.

    Args:
        response: its first line.
        answers: what was asked for.
        others: values that are known to be wrong, such as the same kind of value elsewhere in the context.
    """
    said = pieces(response)
    marks = _marks(said, answers, others)
    first = next((i for i, mark in enumerate(marks) if mark != FREE), len(said))
    if ":" in said[:first]:
        start = said.index(":") + 1
        said, marks = said[start:], marks[start:]
    wrong = {" ".join(pieces(bare(others[mark - 1]))) for mark in marks if mark > ASKED}
    wanted = [pieces(bare(answer)) for answer in answers]
    if all(len(answer) == 1 and is_number(answer[0]) for answer in wanted):
        return wrong | _numbers(said, marks)
    numbers = any(is_number(piece) for answer in wanted for piece in answer)
    longest = max(sum(map(is_word, answer)) for answer in wanted)
    for separator, group in groupby(zip(said, marks, strict=True), _separates):
        if not separator:
            wrong |= _item(list(group), longest, numbers)
    return wrong


def _separates(piece: tuple[str, int]) -> bool:
    return piece[1] == FREE and piece[0] in SEPARATORS


def _marks(said: Sequence[str], answers: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return what each piece of a response is part of; the longer value where two overlap."""
    marks = [FREE] * len(said)
    values = [(pieces(bare(value)), ASKED) for value in answers]
    values += [(pieces(bare(value)), number) for number, value in enumerate(others, 1)]
    for wanted, mark in sorted(values, key=lambda pair: -len(pair[0])):
        for at in places(wanted, said):
            if all(mark == FREE for mark in marks[at : at + len(wanted)]):
                marks[at : at + len(wanted)] = [mark] * len(wanted)
    return marks


def _numbers(said: Sequence[str], marks: Sequence[int]) -> set[str]:
    counts = said[:1] == ["1"] and said[1:2] in (["."], [")"])
    return {
        piece
        for i, piece in enumerate(said)
        if marks[i] == FREE
        and is_number(piece)
        and not (counts and len(piece) < 3 and said[i + 1 : i + 2] in (["."], [")"]))
    }


def _item(item: Sequence[tuple[str, int]], longest: int, numbers: bool) -> set[str]:
    """Return the values of one item of a list that stand in neither answers nor others."""
    words = [(piece, mark) for piece, mark in item if is_word(piece) and (numbers or not is_number(piece))]
    free = [piece for piece, mark in words if mark == FREE]
    if all(mark == FREE for _, mark in words):
        return {" ".join(free)} if 0 < len(free) <= longest else set()
    start = next((i for i, (_, mark) in enumerate(words) if mark == ASKED), len(words))
    if longest > 1 or sum(mark != FREE for _, mark in words[start:]) < 2:
        return set()
    before = {piece for piece, _ in words[:start]}  # "VAR a VAR b": what introduces the first introduces all
    return {piece for piece, mark in words[start:] if mark == FREE and not is_unspaced(piece)} - before
