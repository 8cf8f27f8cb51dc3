"""Text as the words and numbers in it, so that an answer is looked for as people read, not as a run of characters.

Text is compared in lower case, NFKC-normalised, with every minus sign a hyphen. Its pieces are

- numbers, by their value: `1,000` is `1000`, `3.140` is `3.14`, `+5` is `5`, and `-5` is another. A sign is part of a
  number where neither a word nor a closing bracket stands before it (`10-12` are two numbers); commas before exactly
  three digits are marks of thousands. Digits behind leading zeros (`007`) or with more than one point (`1.2.3`) are
  words: nobody means a quantity.
- words, with the signs that end them (`C#`, `C++`, `A-`) or begin them behind a space (`.NET`), and with an apostrophe
  between letters (`don't`), but for those that a possessive or a French elision adds to a word (`Anna's`, `l'Italie`).
- characters of Chinese and Japanese, one by one: no spaces say where their words end.
- every other character but white space.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# Han, Hiragana and Katakana
_SINGLE = (
    r"\u3005-\u3007\u3021-\u3029\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"
    r"\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_W = rf"[^\W{_SINGLE}]"  # of a word with spaces around it
_THOUSANDS = re.compile(rf"(?<!{_W})(?<![.,])([1-9]\d{{0,2}}(?:,\d{{3}})+)(?!\d|,\d)")
_MINUS_MONEY = re.compile(rf"(?<!{_W})(?<![)\]%-])-([$€£¥])(?=\.?\d)")
_APOSTROPHE = rf"(?<![\W\d_])(?<!\b[cdjlmnst])(?<!\bqu)'(?=[^\W\d_])(?!s(?!{_W}))"
_PIECE = re.compile(
    rf"(?P<number>(?:(?<!{_W})(?<![)\]%+-])[+-])?"
    rf"(?:(?:0|[1-9]\d*)(?:\.\d+)?|(?<!{_W})(?<!\.)\.\d+)(?!{_W}|\.\d))"
    rf"|(?P<word>(?:(?<!\S)\.)?{_W}+(?:(?<=\d)\.\d{_W}*|{_APOSTROPHE}{_W}+)*"
    rf"(?:\+\+{_W}*|[#+](?!{_W}|[#+-])|-(?![\w#+-]))?)"
    r"|(?P<sign>\S)"
)
# Quotes, emphasis, brackets, stops, and those of Chinese and Japanese
_MARKS = r"\s\"'`\u2018-\u201f\u00ab\u00bb*_()\[\]{},;:!?\u00a1\u00bf\u3001\u3002\u3008-\u3011\u3014-\u301b"
_EAST_MARKS = re.compile(r"[\u3001\u3002\u3008-\u3011\u3014-\u301b\u30fb]")
_SINGLE_ONE = re.compile(f"[{_SINGLE}]")
_AROUND = re.compile(rf"^(?:[{_MARKS}]|\.\.+|\.(?!\w)|-(?=\s))+|[{_MARKS}.]+$")


def normal(text: str) -> str:
    """Lower case, NFKC, minus signs as hyphens, runs of white space as one space."""
    return " ".join(unicodedata.normalize("NFKC", text).lower().replace("\N{MINUS SIGN}", "-").split())


def bare(text: str) -> str:
    """Return `normal` text without the quotes, brackets, emphasis and marks of a sentence around it, if anything is
    left."""
    return _AROUND.sub("", normal(text)) or normal(text)


def pieces(text: str) -> list[str]:
    """Return the words, numbers and other characters of a text; equal numbers are equal strings."""
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), normal(text))
    text = _MINUS_MONEY.sub(r"\1-", text).replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
    return [_value(match["number"]) if match["number"] else match[0] for match in _PIECE.finditer(text)]


def spaced(text: str) -> str:
    """Return the text with spaces around every character of Chinese and Japanese, and without their marks."""
    return _SINGLE_ONE.sub(r" \g<0> ", _EAST_MARKS.sub(" ", text))


def is_number(piece: str) -> bool:
    """Whether a piece is a number, by its value."""
    return re.fullmatch(r"-?(?:0|[1-9]\d*)(?:\.\d+)?", piece) is not None


def is_unspaced(piece: str) -> bool:
    """Whether a piece is a character of Chinese or Japanese."""
    return _SINGLE_ONE.fullmatch(piece) is not None


def is_word(piece: str) -> bool:
    """Whether a piece is a word or a number."""
    return re.search(r"\w", piece) is not None


def places(wanted: Sequence[str], pieces: Sequence[str]) -> list[int]:
    """Where the pieces `wanted` stand in `pieces`, one behind the other."""
    wanted, n = list(wanted), len(wanted)
    return [i for i in range(len(pieces) - n + 1) if list(pieces[i : i + n]) == wanted]


def _value(number: str) -> str:
    whole, _, part = number.lstrip("+-").partition(".")
    part = part.rstrip("0")
    size = f"{whole or '0'}.{part}" if part else whole or "0"
    return f"-{size}" if number.startswith("-") and size != "0" else size
