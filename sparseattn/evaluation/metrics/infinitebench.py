"""InfiniteBench's metrics (https://arxiv.org/abs/2402.13718), as its `src/compute_scores.py` computes them.

What a response is compared with is `reference["label"]`, of the kind that its data have: numbers stay numbers.
Where its code raises an error (an answer of `math_find` that is a whole number, and a response that begins with a
fraction), the score here is 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparseattn.evaluation.metrics.libraries import rouge_scorer
from sparseattn.evaluation.metrics.text import chinese_text, overlap, squad_text

DIGITS = 4300  # of a number, the most that Python reads
_MARKS = "\n:\"'.,?!{}"  # what words are cut at
_NUMBER = re.compile(r"\d+\.\d+|\d+")


def _blank(text: str, marks: str) -> str:
    return text.translate(dict.fromkeys(map(ord, marks), " "))


def _first(label: Any) -> Any:
    return label[0] if isinstance(label, (list, tuple)) else label


def kv_retrieval(response: str, label: Any) -> float:
    """1 if the value is a word of the response."""
    return float(label in _blank(response, _MARKS).split()) if isinstance(label, str) else 0.0


def first_integer(response: str, label: Any) -> float:
    """1 if the response's first run of ASCII digits is the label: `passkey` and `number_string`."""
    runs = re.findall("[0-9]+", response)
    return float(_first(label) == (runs[0] if runs else ""))


def code_run(response: str, label: Any) -> float:
    """1 if the response's last word is the number."""
    words = _blank(response.strip(), "\n.`'\":").split()
    try:
        return float(bool(words) and _first(label) == int(words[-1]))
    except ValueError:
        return 0.0


def code_debug(response: str, label: Any) -> float:
    """1 if the response begins with the letter, or names letter or function behind "answer is:" and the like."""
    function, letter = label[0], label[1]
    text = response.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    text = re.sub(" {2,}", " ", text)
    return _behind(text, ("answer is:", "is:", "answer:", "correct option is:"), (letter, function)) or 0.0


def math_find(response: str, label: Any) -> float:
    """1 if the response's first number is the label."""
    wanted, number = _first(label), _NUMBER.search(response)
    if number is None:
        return 0.0
    if isinstance(wanted, int):
        return float("." not in number[0] and _is(number[0], wanted))
    return float(float(number[0]) == wanted)


def longdialogue_qa_eng(response: str, label: Any) -> float:
    """1 if the first name of the label is a word of the response, in upper case."""
    return float(label[0] in [word.upper() for word in _blank(response.strip(), _MARKS).split()])


def longbook_choice_eng(response: str, label: Any) -> float:
    """1 if the response's letter is right: its first one, one behind "answer is" and the like, or its first word."""
    text = response.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = re.sub(" {2,}", " ", _blank(text, "\n\"'.,?!{}"))
    choice = _behind(text, ("answer is:", "answer:", "answer is", "option is"), label)
    if choice is not None:
        return choice
    first = next((word for word in text.split() if word in "ABCD"), None)
    return float(first is not None and first in label)


def _behind(text: str, leads: Sequence[str], wanted: Sequence[str]) -> float | None:
    """Whether one of `wanted` stands behind the first of `leads` that a text holds; None: it holds none."""
    for lead in leads:
        at = text.find(lead)
        if at >= 0:
            return float(text[at + len(lead) + 1 :].startswith(tuple(wanted)) and len(text) > at + len(lead))
    return None


def longbook_qa_eng(response: str, label: Any) -> float:
    """Words shared with the nearest answer."""
    words = squad_text(response).split()
    return max(0.0, *(overlap(words, squad_text(answer).split()) for answer in label))


def longbook_qa_chn(response: str, label: Any) -> float:
    """Characters of Chinese shared with the nearest answer."""
    said = list(chinese_text(response))
    return max(0.0, *(overlap(said, list(chinese_text(answer))) for answer in label))


def longbook_sum_eng(response: str, label: Any) -> float:
    """F of ROUGE-Lsum by Google's package, without stemming."""
    answers = [label] if isinstance(label, str) else label
    scorer = rouge_scorer("rougeLsum", False)
    return max(float(scorer.score(answer, response)["rougeLsum"].fmeasure) for answer in answers)


def math_calc(response: str, label: Any) -> float:
    """Return the share of the label's numbers that the response has in its order from the first on."""
    wanted = label[0] if isinstance(label[0], list) else label
    said = re.findall("[0-9]+", response)
    pairs = enumerate(zip(wanted, said, strict=False))
    right = next((i for i, (number, run) in pairs if not _is(run, number)), min(len(wanted), len(said)))
    return right / len(wanted)


def _is(digits: str, number: int) -> bool:
    """Whether digits, perhaps with a sign, are a number. A response may have more than Python reads, and then not."""
    return len(digits) <= DIGITS and int(digits) == number


def by_label(
    metric: Callable[[str, Any], float], response: str, answers: Sequence[str], reference: Mapping[str, Any]
) -> float:
    """Return the score against `reference["label"]`."""
    return metric(response, reference["label"])


BY_TASK: dict[str, Callable[[str, Any], float]] = {
    "passkey": first_integer,
    "number_string": first_integer,
    "kv_retrieval": kv_retrieval,
    "longdialogue_qa_eng": longdialogue_qa_eng,
    "longbook_sum_eng": longbook_sum_eng,
    "longbook_choice_eng": longbook_choice_eng,
    "longbook_qa_eng": longbook_qa_eng,
    "longbook_qa_chn": longbook_qa_chn,
    "math_find": math_find,
    "math_calc": math_calc,
    "code_run": code_run,
    "code_debug": code_debug,
}
