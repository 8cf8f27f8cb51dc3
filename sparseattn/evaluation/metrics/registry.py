"""All metrics of benchmarks by name, "longbench/f1": what a response scores, 0 to 1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from sparseattn.evaluation.metrics import (
    babilong,
    helmet,
    infinitebench,
    kvpress,
    libraries,
    longbench,
    longbench2,
    mrcr,
    ruler,
)

Metric: TypeAlias = Callable[[str, Sequence[str], Mapping[str, Any]], float]  # of response, answers and reference

METRICS: dict[str, Metric] = {
    **{f"longbench/{name}": functools.partial(longbench.best, metric) for name, metric in longbench.BY_NAME.items()},
    "longbench2/accuracy": longbench2.accuracy,
    "ruler/all": ruler.every,
    "ruler/part": ruler.part,
    "mrcr/similarity": mrcr.similarity,
    "babilong/accuracy": babilong.accuracy,
    **{
        f"infinitebench/{task}": functools.partial(infinitebench.by_label, metric)
        for task, metric in infinitebench.BY_TASK.items()
    },
    "helmet/substring_match": helmet.substring_match,
    "helmet/ruler_recall": helmet.ruler_recall,
    "helmet/ndcg": helmet.ndcg,
    **{f"kvpress/{name}": metric for name, metric in kvpress.METRICS.items()},
}
# Metrics of similarity, which even good answers do not bring near 1.
_GRADED = (
    *("longbench/f1", "longbench/f1_zh", "longbench/rouge", "longbench/rouge_zh", "longbench/code", "mrcr/similarity"),
    *("infinitebench/longbook_qa_eng", "infinitebench/longbook_qa_chn", "infinitebench/longbook_sum_eng"),
)
GRADED = frozenset({*_GRADED, *(f"kvpress/{name}" for name in _GRADED)})
# A metric -> what gives the library that it needs, and raises ImportError where that is missing.
LIBRARIES: dict[str, Sequence[Callable[[], Any]]] = {
    "longbench/rouge": (libraries.rouge,),
    "longbench/rouge_zh": (libraries.rouge, libraries.jieba),
    "longbench/f1_zh": (libraries.jieba,),
    "infinitebench/longbook_sum_eng": (functools.partial(libraries.rouge_scorer, "rougeLsum", False),),
}


def metric_score(name: str, response: str, answers: Sequence[str], reference: Mapping[str, Any]) -> float:
    """Return the score of a response.

    Args:
        name: in `METRICS`.
        response: as the model wrote it.
        answers: the right ones.
        reference: what else the metric looks at, see its module.

    Raises:
        ValueError: no such metric, or an answer that it cannot compare with.
        ImportError: a library that it needs is missing.
    """
    if name not in METRICS:
        raise ValueError(f"there is no metric {name!r}, there are {', '.join(METRICS)}")
    return float(METRICS[name](response, answers, reference))


def check_metrics(names: Collection[str]) -> None:
    """ImportError where a library is missing that one of these metrics needs, before any work."""
    for name in sorted(names):
        for library in LIBRARIES.get(name.removeprefix("kvpress/"), ()):
            library()
