"""kvpress' own forms of benchmarks' metrics (its folder `evaluation/benchmarks`), as far as they differ from theirs.

LongBench, but not LongBench-E: white space before a response is dropped. RULER: control characters are dropped.
LongBench v2: a response that says so of the right letter anywhere is right. InfiniteBench: choices go by the last
letter that stands alone, and a name of a dialogue may stand within a word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sparseattn.evaluation.metrics import infinitebench, longbench, longbench2, ruler

Metric: TypeAlias = Callable[[str, Sequence[str], Mapping[str, Any]], float]

# Of InfiniteBench's tasks those that kvpress' code refuses or fails on, or compares a number with text for, which is 0.
UNSCORED = ("code_debug", "longbook_sum_eng", "math_find", "math_calc", "code_run")
_LAST_LETTER = re.compile(r"\b[A-D]\b(?!.*\b[A-D]\b)")


def kv_retrieval(response: str, label: Any) -> float:
    """1 if the first value is a word of the response."""
    return infinitebench.kv_retrieval(response, label[0] if isinstance(label, list) else label)


def longdialogue_qa_eng(response: str, label: Any) -> float:
    """1 if a response holds any name, in upper case."""
    said = response.strip().upper()
    return float(any(name.upper() in said for name in label))


def longbook_choice_eng(response: str, label: Any) -> float:
    """1 if the last letter that stands alone in the first line with one is right, else InfiniteBench's own."""
    letter = _LAST_LETTER.search(response.strip())
    if letter is not None and letter[0] in label:
        return 1.0
    return infinitebench.longbook_choice_eng(response, label)


METRICS: dict[str, Metric] = {
    **{
        f"longbench/{name}": functools.partial(longbench.best, metric, bare=True)
        for name, metric in longbench.BY_NAME.items()
    },
    "longbench2/accuracy": longbench2.named,
    "ruler/all": ruler.every,
    "ruler/part": ruler.part,
    **{
        f"infinitebench/{task}": functools.partial(infinitebench.by_label, metric)
        for task, metric in {
            **infinitebench.BY_TASK,
            "kv_retrieval": kv_retrieval,
            "longdialogue_qa_eng": longdialogue_qa_eng,
            "longbook_choice_eng": longbook_choice_eng,
        }.items()
        if task not in UNSCORED
    },
}
