"""How a response is scored, 0 to 1: strings found, equality, or shared words.

A response is cut before it is scored: what follows the first line that holds text is dropped (`first_line`). Strings
are compared in lower case, NFKC-normalised, with runs of white space as one space. An answer is *found* where it stands
in the response and no letter, digit or underscore adjoins it: "71432" is found in "It is 71432." and not in "714325".

- `all`: share of the answers found (RULER's string match, which also counts strings within longer words).
- `part`: 1 if any answer is found (RULER's part match), else 0.
- `exact`: 1 if the response is an answer, white space, punctuation and quotes around both aside, else 0.
- `f1`: of words shared with the nearest answer, without articles and punctuation (SQuAD's, as in LongBench's QA).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence


def score(scoring: str, response: str, answers: Sequence[str]) -> float:
    """The score of a response by one of `SCORINGS`.

    Raises:
        ValueError: no such scoring, or no answers.
    """
    if scoring not in SCORINGS:
        raise ValueError(f"there is no scoring {scoring!r}, there are {', '.join(SCORINGS)}")
    if not answers or not all(normal(answer) for answer in answers):
        raise ValueError(f"a response is scored against one answer or more, none of them empty, got {list(answers)!r}")
    return SCORINGS[scoring](first_line(response), answers)


def first_line(response: str) -> str:
    """The first line that holds text."""
    return response.strip().partition("\n")[0]


def normal(text: str) -> str:
    """Lower case, NFKC, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().split())


def found(answer: str, response: str) -> bool:
    """Whether `answer` stands in `response` and not within a longer word or number."""
    return re.search(rf"(?<!\w){re.escape(normal(answer))}(?!\w)", normal(response)) is not None


def _all(response: str, answers: Sequence[str]) -> float:
    return sum(found(answer, response) for answer in answers) / len(answers)


def _part(response: str, answers: Sequence[str]) -> float:
    return float(any(found(answer, response) for answer in answers))


def _exact(response: str, answers: Sequence[str]) -> float:
    around = string.punctuation + string.whitespace
    return float(any(normal(response).strip(around) == normal(answer).strip(around) for answer in answers))


def _f1(response: str, answers: Sequence[str]) -> float:
    return max(_shared(_words(response), _words(answer)) for answer in answers)


def _words(text: str) -> list[str]:
    plain = normal(text).translate(str.maketrans("", "", string.punctuation))
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
