"""Markdown of views: tables, paragraphs and lists as wide as the documents, and numbers as people read them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDE = 120  # columns of a line of text


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; all columns but the first `left` ones are aligned to the right."""
    marks = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (head, marks, *rows))


def text(words: str) -> str:
    """A paragraph."""
    return textwrap.fill(" ".join(words.split()), WIDE, break_long_words=False, break_on_hyphens=False)


def bullets(*items: str) -> str:
    """A list."""
    return "\n".join(textwrap.indent(_hanging(item), "  ").replace("  ", "- ", 1) for item in items)


def _hanging(words: str) -> str:
    return textwrap.fill(" ".join(words.split()), WIDE - 2, break_long_words=False, break_on_hyphens=False)


def parts(*blocks: str) -> str:
    """Paragraphs, lists and tables one below the other."""
    return "\n\n".join(blocks)


def percent(share: float, digits: int = 0) -> str:
    """0.05 as "5 %"."""
    return f"{100 * share:.{digits}f} %"


def significant(value: float, digits: int = 2) -> str:
    """3.68 as "3.7", 44.6 as "45", 1234 as "1,234"."""
    if value == 0:
        return "0"
    places = digits - 1 - int(f"{abs(value):e}".partition("e")[2])
    return f"{value:,.{max(places, 0)}f}"


def ticked(name: str) -> str:
    """A name as code."""
    return f"`{name}`"
