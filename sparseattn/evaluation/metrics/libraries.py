"""The libraries that benchmarks score with, imported where a metric needs them: rouge, rouge_score, jieba."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from sparseattn.evaluation.metrics.text import chinese_text
from sparseattn.utils.cache_folder import cache_folder


def needed(package: str) -> ImportError:
    return ImportError(f"this benchmark's score needs {package}: pip install 'sparseattn[benchmarks]'")


@functools.cache
def rouge() -> Any:
    """Return the scorer of the package `rouge`, whose ROUGE-L is over sentences that end with a full stop."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise needed("rouge") from error
    return Rouge()


@functools.cache
def rouge_scorer(name: str, stemmer: bool) -> Any:
    """Return the scorer of Google's package `rouge_score`, for "rougeL" or "rougeLsum"."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise needed("rouge-score") from error
    return RougeScorer([name], use_stemmer=stemmer)


@functools.cache
def jieba() -> Any:
    """Return the module that cuts Chinese text into words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is old: escapes in its texts, and pkg_resources
            import jieba as module
            from jieba import finalseg  # noqa: F401
    except ImportError as error:
        raise needed("jieba") from error
    module.setLogLevel("WARNING")
    own = cache_folder()
    own.mkdir(parents=True, exist_ok=True)
    module.dt.tmp_dir = str(own)  # it keeps its dictionary there, else in /tmp, where others can write
    return module


def chinese_words(text: str) -> list[str]:
    """Return the words of a Chinese text by `jieba`, without punctuation."""
    return [bare for word in jieba().cut(text, cut_all=False) if (bare := chinese_text(word))]
