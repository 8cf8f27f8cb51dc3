"""What several benchmarks do to texts before they compare them: SQuAD's words, Chinese characters, F1 of two bags."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Marks of Chinese text that LongBench and InfiniteBench drop, as ranges of code points: fullwidth forms, CJK marks,
# dashes, quotes, points. A few marks of these blocks stay in the text, as with them.
_EAST = (
    *((0xFF01, 0xFF0D), (0xFF0F, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF60), (0xFF62, 0xFF64)),
    *((0xFF61, 0xFF61), (0x3001, 0x3003), (0x300B, 0x3011), (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F)),
    *((0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0xFE4F, 0xFE4F)),
)
_ASCII_MARKS = dict.fromkeys(map(ord, string.punctuation))
_ALL_MARKS = _ASCII_MARKS | dict.fromkeys(code for first, last in _EAST for code in range(first, last + 1))


def squad_text(text: str) -> str:
    """Lower case without ASCII punctuation and English articles, one space between words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII_MARKS)).split())


def chinese_text(text: str) -> str:
    """Lower case without punctuation, ASCII and Chinese, and without white space."""
    return "".join(text.lower().translate(_ALL_MARKS).split())


def overlap(response: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two bags of words, 0 where they share none."""
    both = (Counter(response) & Counter(answer)).total()
    if not both:
        return 0.0
    precision, recall = 1.0 * both / len(response), 1.0 * both / len(answer)
    return 2 * precision * recall / (precision + recall)
