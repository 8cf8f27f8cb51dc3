"""Every metric gives the scores that the benchmark's own code gave the same responses."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from sparseattn.evaluation.metrics import libraries
from sparseattn.evaluation.metrics.registry import LIBRARIES, METRICS, check_metrics, metric_score

# Responses and answers were made up for this file; the scores are those of the benchmarks' code (docs/use/eval.md).
SCORED = [json.loads(line) for line in (Path(__file__).parent / "scored.jsonl").read_text().splitlines()]
ROUNDED = ("ruler/all", "kvpress/ruler/all")  # whose code gives percent with two decimals


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_the_public_codes(metric: str) -> None:
    cases = [one for one in SCORED if one["metric"] == metric]
    assert len(cases) >= 10
    for one in cases:
        got = metric_score(metric, one["response"], one["answers"], one["reference"])
        within = 5.1e-5 if metric in ROUNDED else 1e-12
        assert got == pytest.approx(one["score"], abs=within, rel=0), one


@pytest.mark.parametrize("metric", ["infinitebench/math_calc", "infinitebench/math_find"])
def test_a_number_longer_than_python_reads_is_a_wrong_one(metric: str) -> None:
    assert metric_score(metric, "9" * 5000, ("1",), {"label": [1]}) == 0


def test_the_cases_are_of_all_kinds() -> None:
    kinds = Counter((one["metric"], (one["score"] > 0) + (one["score"] == 1)) for one in SCORED)
    for metric in METRICS:
        assert kinds[metric, 0], f"{metric} has a case of score 0"
        assert kinds[metric, 1] + kinds[metric, 2], f"{metric} has a case above 0"


def test_an_unknown_metric_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="there is no metric 'longbench/f2', there are longbench/f1"):
        metric_score("longbench/f2", "a", ["a"], {})


@pytest.mark.parametrize("package", ["rouge", "rouge_score", "jieba"])
def test_a_missing_library_is_named_before_any_work(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loader in (libraries.rouge, libraries.rouge_scorer, libraries.jieba):
        loader.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    metric = {"rouge": "longbench/rouge", "jieba": "longbench/f1_zh"}.get(package, "infinitebench/longbook_sum_eng")
    with pytest.raises(ImportError, match=r"pip install 'sparseattn\[benchmarks\]'"):
        check_metrics([metric])
    check_metrics(set(METRICS) - set(LIBRARIES) - {f"kvpress/{name}" for name in LIBRARIES})
