"""Text of files on a terminal: shown as it is, and never a command to the terminal or to rich."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

from rich.console import Console
from rich.text import Text

WIDE = 150  # characters that the widest tables need


def plain(text: object) -> str:
    """`text` without control characters: what a file says must not steer the terminal it is shown on.

    Tabs and line ends become spaces, everything else that Unicode counts as control or format is dropped.
    """
    spaced = str(text).translate({ord(c): " " for c in "\t\n\r"})
    return "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


class Screen(Console):
    """A console for text of files: nothing in a string, a table's titles and cells included, is a command to it.

    Neither rich's markup and emoji codes nor control characters, but for line ends.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string that is printed passes here."""
        return super().render_str("\n".join(map(plain, text.split("\n"))), **options)


def table_screen(wide: bool = False) -> Screen:
    """Return the screen to print tables on.

    A pipe or a log has no width of its own: it gets `WIDE` characters, which keep all numbers whole. With `wide` a
    narrower terminal gets them too.
    """
    screen = Screen()
    return Screen(width=WIDE) if not sys.stdout.isatty() or (wide and screen.width < WIDE) else screen
