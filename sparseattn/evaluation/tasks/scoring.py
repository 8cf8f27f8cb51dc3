"""How a response is scored, 0 to 1: answers found, equality, or shared words.

A response is cut before it is scored: what follows the first line that holds text is dropped (`first_line`). An answer
is *found* where its words and numbers stand in the response one behind the other (`pieces`): "71432" is found in "It is
71432." and not in "714325", "5" not in "-5", "C" not in "C#", "14" not in "3.14", and "1,000" is found in "1000.0".

- `all`: of one answer, 1 if it is found, else 0. Of n > 1 answers, found / (n + named), where `named` counts the
  distinct values in the response that were not asked for (`unasked`): to name every value there is scores little.
- `part`: 1 if any answer is found, else 0.
- `exact`: 1 if the response is an answer, white space, quotes, brackets, emphasis and the marks of a sentence around
  both aside, else 0; numbers are compared by value here too.
- `f1`: of words shared with the nearest answer, without articles and punctuation: SQuAD's formula as in LongBench's QA,
  left as it is for the sake of comparison, so that "-5" and "5" are one word to it. Each character of Chinese and
  Japanese is a word.

Beside `score`, `ruler` is the figure that RULER (https://arxiv.org/abs/2404.06654) would give the same response.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Sequence

from sparseattn.evaluation.tasks.pieces import bare, normal, pieces, places, spaced
from sparseattn.evaluation.tasks.unasked import unasked

EDITION = 3  # of the formulas here: what was scored by another is not compared with it


def score(scoring: str, response: str, answers: Sequence[str], others: Sequence[str] = ()) -> float:
    """Return the score of a response by one of `SCORINGS`.

    Args:
        scoring: its name.
        response: as the model wrote it.
        answers: the right ones.
        others: values that are known to be wrong where several were asked for; only `all` looks at them.

    Raises:
        ValueError: no such scoring, or no answers.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"there is no scoring {scoring!r}, there are {', '.join(SCORINGS)}")
    if not answers or not all(normal(answer) for answer in answers):
        raise ValueError(f"a response is scored against one answer or more, none of them empty, got {list(answers)!r}")
    if scoring == "all":
        return _all(first_line(response), answers, others)
    return SCORINGS[scoring](first_line(response), answers)


def ruler(scoring: str, response: str, answers: Sequence[str]) -> float | None:
    """RULER's string match: of `all` the share of the answers, of `part` whether any, that the response holds.

    As in its code, an answer is held where its characters stand in the response, upper or lower case, within longer
    words too, and values that were not asked for cost nothing. None for scorings that RULER does not have.
    """
    said = [answer.lower() in response.lower() for answer in answers]
    return {"all": sum(said) / len(said), "part": float(any(said))}.get(scoring)


def first_line(response: str) -> str:
    """Return the first line that holds text."""
    return response.strip().partition("\n")[0]


def found(answer: str, response: str) -> bool:
    """Whether `answer` stands in `response`, and not within a longer word or number."""
    return bool(places(pieces(bare(answer)), pieces(response)))


def _all(response: str, answers: Sequence[str], others: Sequence[str] = ()) -> float:
    right = sum(found(answer, response) for answer in answers)
    named = len(unasked(response, answers, others)) if len(answers) > 1 else 0
    return right / (len(answers) + named)


def _part(response: str, answers: Sequence[str]) -> float:
    return float(any(found(answer, response) for answer in answers))


def _exact(response: str, answers: Sequence[str]) -> float:
    return float(any(pieces(bare(response)) == pieces(bare(answer)) for answer in answers))


def _f1(response: str, answers: Sequence[str]) -> float:
    return max(_shared(_words(response), _words(answer)) for answer in answers)


def _words(text: str) -> list[str]:
    plain = spaced(normal(text)).translate(str.maketrans("", "", string.punctuation))
    return [word for word in plain.split() if word not in ("a", "an", "the")]


def _shared(response: list[str], answer: list[str]) -> float:
    both = (Counter(response) & Counter(answer)).total()
    return 2 * both / (len(response) + len(answer)) if both else 0.0


SCORINGS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "all": _all,
    "part": _part,
    "exact": _exact,
    "f1": _f1,
}
