"""HELMET's metrics (https://arxiv.org/abs/2410.02694) that need no judge, as its `utils.py` and `data.py` compute them.

Where a prompt ends with the beginning of an answer, that beginning is put before the response first, as its `eval.py`
does: `reference["begun"]`. Most scores are the better one of the whole response and of the part behind "Answer:".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.evaluation.metrics.text import squad_text

TOP = 10  # documents that a ranking is judged by
DIGITS = 5  # to which its code rounds a ranking's score


def parsed(response: str, begun: str = "Answer:") -> str:
    """Return what stands behind the first `begun` up to the line's end, or the first line where there is none."""
    match = re.search(f"(?:{begun})(.*)(?:\n|$)", response, re.IGNORECASE) or re.search("^(.*)(?:\n|$)", response)
    if match is None:
        return response
    return re.sub(f"^{re.escape(begun)}", "", match[1].strip(), flags=re.IGNORECASE).strip()


def substring_match(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """1 if a response holds an answer, without articles, punctuation and case. `reference`: `begun` and `lead`."""
    whole = reference["begun"] + response
    said = [squad_text(text) for text in (whole, parsed(whole, reference["lead"]))]
    return float(any(squad_text(answer) in text for answer in answers for text in said))


def ruler_recall(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """Return the share of the answers that a response holds, upper or lower case. `reference`: `begun`."""
    said = (reference["begun"] + response).lower()
    return sum(answer.lower() in said for answer in answers) / len(answers)


def ranking(response: str) -> list[str]:
    """Return the documents of a response's longest chain of numbers and ">", each once, best first."""
    text = re.sub(r"[\[\]:]", "", response).lower().replace("id", "")
    chains = [match[0] for match in re.finditer(r"(\d+)(?:\s*>\s*(\d+))*", text)]
    longest = max(chains, key=len, default="")
    ids = [number.strip() for number in longest.split(">")] if longest else [text]
    return list(dict.fromkeys(name for name in ids if not longest or name.isdigit()))


def ndcg(response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """NDCG of the ten documents that a response puts first, by trec_eval's formula, in five digits.

    `reference`: `begun`, and `labels`, the relevance of each document, 0 and up.
    """
    labels: Mapping[str, int] = reference["labels"]
    gained = [labels.get(name, 0) for name in ranking(reference["begun"] + response)]
    ideal = _gain(sorted(labels.values(), reverse=True))
    return round(_gain(gained) / ideal, DIGITS) if ideal else 0.0


def _gain(labels: Sequence[int]) -> float:
    return sum(max(label, 0) / math.log2(place + 2) for place, label in enumerate(labels[:TOP]))
