"""LongBench's metrics (https://arxiv.org/abs/2308.14508), as `LongBench/metrics.py` and `eval.py` compute them.

A response's score is the best over its answers. Code similarity is `fuzzywuzzy`'s ratio without python-Levenshtein, as
its requirements have it: that of `difflib`, in whole hundredths. Its ROUGE-L gives 0 where the library fails.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparseattn.evaluation.metrics.libraries import chinese_words, jieba, rouge
from sparseattn.evaluation.metrics.text import overlap, squad_text


def f1(response: str, answer: str) -> float:
    """Words shared, without articles and punctuation."""
    return overlap(squad_text(response).split(), squad_text(answer).split())


def f1_zh(response: str, answer: str) -> float:
    """Words of Chinese shared, as jieba cuts them."""
    return overlap(chinese_words(response), chinese_words(answer))


def rouge_l(response: str, answer: str) -> float:
    """F of ROUGE-L by the package `rouge`; 0 where it fails, as for an empty text or one that is too long for it."""
    try:
        return float(rouge().get_scores([response], [answer], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError, ZeroDivisionError):
        return 0.0


def rouge_l_zh(response: str, answer: str) -> float:
    """ROUGE-L over jieba's words."""
    cut = jieba().cut
    return rouge_l(" ".join(cut(response, cut_all=False)), " ".join(cut(answer, cut_all=False)))


def count(response: str, answer: str) -> float:
    """Return the share of a response's numbers that are the answer."""
    numbers = re.findall(r"\d+", response)
    return sum(number == answer for number in numbers) / len(numbers) if numbers else 0.0


def retrieval(response: str, answer: str) -> float:
    """`count` for the number of the paragraph in the answer."""
    return count(response, _paragraph(answer, "Paragraph "))


def retrieval_zh(response: str, answer: str) -> float:
    """`count` for the number of the paragraph in a Chinese answer."""
    return count(response, _paragraph(answer, "段落"))


def _paragraph(answer: str, word: str) -> str:
    named = re.search(rf"{word}(\d+)", answer)
    if named is None:
        raise ValueError(f"an answer of passage retrieval holds {word!r} and a number, got {answer!r}")
    return named[1]


def code(response: str, answer: str) -> float:
    """Similarity of the first line without marks of a comment or of Markdown."""
    lines = response.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == answer:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def classification(response: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the response names, where the answer is among them.

    Names that are a part of the answer do not count. Its code shortens the list while it walks it, so that the name
    behind one that is taken out is never looked at: that is kept.
    """
    named = [name for name in classes if name in response]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0


def best(
    metric: Callable[..., float],
    response: str,
    answers: Sequence[str],
    reference: Mapping[str, Any],
    bare: bool = False,
) -> float:
    """Return the best score over the answers.

    Args:
        metric: of a response and one answer.
        response: whole.
        answers: the right ones.
        reference: `first_line`: whether the first line alone is scored; `all_classes` of a classification.
        bare: white space before the response is dropped, as kvpress does.
    """
    if reference.get("first_line"):
        response = (response.lstrip() if bare else response.lstrip("\n")).split("\n")[0]
    response = response.lstrip() if bare else response
    more = [reference["all_classes"]] if metric is classification else []
    return max(0.0, *(metric(response, answer, *more) for answer in answers))


def check_answers(metric: str, answers: Sequence[str]) -> None:
    """ValueError for answers that a metric cannot compare with, such as "longbench/retrieval" ones without a number."""
    name = metric.partition("/")[2]
    if name in ("retrieval", "retrieval_zh"):
        for answer in answers:
            BY_NAME[name]("", answer)


BY_NAME: dict[str, Callable[..., float]] = {
    "f1": f1,
    "f1_zh": f1_zh,
    "rouge": rouge_l,
    "rouge_zh": rouge_l_zh,
    "classification": classification,
    "count": count,
    "retrieval": retrieval,
    "retrieval_zh": retrieval_zh,
    "code": code,
}
