"""Text as the words and numbers in it, so that an answer is looked for as people read, not as a run of characters.

Text is compared in lower case, NFKC-normalised, with every minus sign a hyphen. Its pieces are

- numbers, by their value: `1,000` is `1000`, `3.140` is `3.14`, `+5` is `5`, and `-5` is another. A sign is part of a
  number where neither a word nor a closing bracket stands before it (`10-12` are two numbers); commas before exactly
  three digits are marks of thousands. Digits behind leading zeros (`007`) or with more than one point (`1.2.3`) are
  words: nobody means a quantity.
- words, with the signs that end them (`C#`, `C++`, `A-`) or begin them behind a space (`.NET`).
- every other character but white space.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_THOUSANDS = re.compile(r"(?<![\w.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)")
_MINUS_MONEY = re.compile(r"(?<![\w)\]%-])-([$€£¥])(?=\.?\d)")
_PIECE = re.compile(
    r"(?P<number>(?:(?<![\w)\]%+-])[+-])?(?:(?:0|[1-9]\d*)(?:\.\d+)?|(?<![\w.])\.\d+)(?!\w|\.\d))"
    r"|(?P<word>(?:(?<!\S)\.)?\w+(?:(?<=\d)\.\d\w*)*(?:\+\+\w*|[#+-](?![\w#+-]))?)"
    r"|(?P<sign>\S)"
)
_MARKS = r"\s\"'`\u2018-\u201f\u00ab\u00bb*_()\[\]{},;:!?\u00a1\u00bf"  # quotes, emphasis, brackets, stops
_AROUND = re.compile(rf"^(?:[{_MARKS}]|\.\.+|\.(?!\w)|-(?=\s))+|[{_MARKS}.]+$")


def normal(text: str) -> str:
    """Lower case, NFKC, minus signs as hyphens, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().replace("\N{MINUS SIGN}", "-").split())


def bare(text: str) -> str:
    """`normal` text without the quotes, brackets, emphasis and marks of a sentence around it, if anything is left."""
    return _AROUND.sub("", normal(text)) or normal(text)


def pieces(text: str) -> list[str]:
    """The words, numbers and other characters of a text; equal numbers are equal strings."""
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), normal(text))
    text = _MINUS_MONEY.sub(r"\1-", text)
    return [_value(match["number"]) if match["number"] else match[0] for match in _PIECE.finditer(text)]


def is_number(piece: str) -> bool:
    """Whether a piece is a number, by its value."""
    return re.fullmatch(r"-?(?:0|[1-9]\d*)(?:\.\d+)?", piece) is not None


def is_word(piece: str) -> bool:
    """Whether a piece is a word or a number."""
    return re.search(r"\w", piece) is not None


def places(wanted: Sequence[str], held: Sequence[str]) -> list[int]:
    """Where the pieces `wanted` stand in `held`, one behind the other."""
    wanted, n = list(wanted), len(wanted)
    return [i for i in range(len(held) - n + 1) if list(held[i : i + n]) == wanted]


def _value(number: str) -> str:
    whole, _, part = number.lstrip("+-").partition(".")
    part = part.rstrip("0")
    size = f"{whole or '0'}.{part}" if part else whole or "0"
    return f"-{size}" if number.startswith("-") and size != "0" else size
