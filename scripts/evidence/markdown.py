"""Paragraphs as wide as the documents, and values as people read them."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from scripts.evidence import labels

WIDE = 120  # columns of a line of text


def text(words: str) -> str:
    """A paragraph."""
    return textwrap.fill(" ".join(words.split()), WIDE, break_long_words=False, break_on_hyphens=False)


def linked(words: str) -> str:
    """A text with its arXiv numbers and addresses as links."""
    words = re.sub(r"\bhttps://(\S+?)/?(?=$|[, ])", r"[\1](\g<0>)", words)
    return re.sub(r"(?<!\S)\d{4}\.\d{5}\b", r"[\g<0>](https://arxiv.org/abs/\g<0>)", words)


def shown(value: Any, form: str) -> str:
    """A value by a format: one of Python's, `.1%` with a space before the sign, `.1p` for percent without it, `~2` for
    two significant digits, `~2%` for both, and `spec` for a method without its artefacts."""
    if form == "spec":
        return labels.shown(value)
    if form.startswith("~"):
        percent = form.endswith("%")
        words = significant(100 * value if percent else value, int(form[1:].removesuffix("%")))
        return f"{words} %" if percent else words
    if form.endswith("p"):
        return f"{100 * value:{form[:-1]}f}"
    return format(value, form).replace("%", " %") if form else str(value)


def significant(value: float, digits: int = 2) -> str:
    """3.68 as "3.7", 44.6 as "45", 1234 as "1,234"."""
    if value == 0:
        return "0"
    places = digits - 1 - int(f"{abs(value):e}".partition("e")[2])
    return f"{value:,.{max(places, 0)}f}"
