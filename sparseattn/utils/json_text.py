"""JSON that others may have written: a text becomes a value that all else can work with, or one sentence says why not.

Python's own reader takes what breaks those who read on: NaN, whole numbers of thousands of digits, halves of letters.
It fails on deep nesting by an error of its own. Here all of that is refused, with the line and the column or the field.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

DEPTH = 100  # of lists and objects within each other
DIGITS = 300  # of a whole number, so that a float can hold it

# A string, closed or not, or a bracket. A string always matches, so that a scan takes linear time.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Text that is no JSON of the kind that is read here, in one sentence without the file's name."""


class _Refused:
    """Stands for a value that JSON text must not hold, until its field is known."""

    def __init__(self, why: str) -> None:
        self.why = why


class _Hooks:
    """What the values of a JSON text become; those that it must not hold are `refused`.

    Args:
        digits: that a whole number may have.
    """

    def __init__(self, digits: int) -> None:
        self.digits = digits
        self.refused: list[_Refused] = []

    def _refuse(self, why: str) -> _Refused:
        self.refused.append(_Refused(why))
        return self.refused[-1]

    def whole(self, number: str) -> int | _Refused:
        count = len(number.lstrip("-"))
        if count > self.digits:
            return self._refuse(f"a number has at most {self.digits} digits, got {count}; as text it may be longer")
        return int(number)

    def real(self, number: str) -> float | _Refused:
        value = float(number)
        if math.isfinite(value):
            return value
        return self._refuse(f"a number is one that a float holds, got {_short(number)}")

    def constant(self, name: str) -> _Refused:
        return self._refuse(f"{name} is no number in JSON")

    def unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    value[key] = self._refuse(f"{reprlib.repr(key)} comes twice")
                seen.add(key)
        return value


def parse(text: str | bytes, *, digits: int = DIGITS, finite: bool = True, once: bool = True) -> Any:
    """Return the value of a JSON text.

    Nesting is checked before anything is parsed, in linear time.

    Args:
        text: UTF-8 where it is bytes.
        digits: that a whole number may have.
        finite: whether NaN, infinity and numbers beyond a float are refused; who leaves them in checks each number.
        once: whether a key that comes twice in an object is refused, as one of the two would be lost.

    Raises:
        JsonError: no JSON (with line and column), nesting beyond `DEPTH`, half of a surrogate pair, which no file or
            tokenizer takes, or what the arguments exclude, with its field.
    """
    if isinstance(text, bytes):
        text = _decoded(text)
    _check_depth(text)
    hooks = _Hooks(digits)
    wanted: dict[str, Any] = {"parse_float": hooks.real, "parse_constant": hooks.constant} if finite else {}
    if once:
        wanted["object_pairs_hook"] = hooks.unique
    try:
        value = json.loads(text, parse_int=hooks.whole, **wanted)
    except json.JSONDecodeError as error:
        raise JsonError(f"it is not JSON at {_place(text, error.pos)}: {error.msg}") from None
    except RecursionError:  # called from deep within other code
        raise JsonError(f"lists and objects are nested more than {DEPTH} deep") from None
    if hooks.refused or _SURROGATE.search(text):
        for field, leaf in fields(value):
            if isinstance(leaf, _Refused):
                raise JsonError(_at(field, leaf.why))
            if isinstance(leaf, str):
                _check_letters(field, leaf)
    return value


def parse_object(text: str | bytes, *, digits: int = DIGITS, finite: bool = True, once: bool = True) -> dict[str, Any]:
    """Return `parse` of a text that is an object; JsonError for another value too."""
    value = parse(text, digits=digits, finite=finite, once=once)
    if not isinstance(value, dict):
        raise JsonError(f"a JSON object is due, got {reprlib.repr(value)}")
    return value


def parse_entry(metadata: Mapping[str, str], name: str, default: str | None = None) -> Any:
    """Return `parse` of one entry of a file's metadata, whose values are JSON texts.

    Raises:
        JsonError: see `parse`, naming the entry; it is missing and has no default.
    """
    if name not in metadata and default is None:
        raise JsonError(f"{name} is missing in its metadata")
    try:
        return parse(metadata.get(name, default or ""))
    except JsonError as error:
        raise JsonError(f"{name} in its metadata: {error}") from None


def fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every text, number and constant of a JSON value, and every key, with its field: `points[2].kl`."""
    stack: list[tuple[str, Any]] = [(name, value)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, dict):
            for key in node:
                yield at, key
            stack += [(f"{at}.{_short(key)}" if at else _short(key), inner) for key, inner in reversed(node.items())]
        elif isinstance(node, list):
            stack += [(f"{at}[{i}]", inner) for i, inner in reversed(list(enumerate(node)))]
        else:
            yield at, node


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})") from None


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= DEPTH:
        return
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "[{":
            depth += 1
            if depth > DEPTH:
                where = _place(text, match.start())
                raise JsonError(f"lists and objects are nested more than {DEPTH} deep, from {where} on")
        elif token in "]}":
            depth -= 1


def _place(text: str, at: int) -> str:
    """Return where a letter stands: its line, but of a text of one line, and its column, both from 1 on."""
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return f"line {text.count(chr(10), 0, at) + 1}, column {column}" if "\n" in text.strip() else f"column {column}"


def _check_letters(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        why = f"text is whole Unicode characters, got half of a surrogate pair, {half}"
        raise JsonError(_at(field, why)) from None


def _at(field: str, why: str) -> str:
    return f"{why} (in {field})" if field else why


def _short(text: str, most: int = 40) -> str:
    """Return a key or a number for a sentence, whole letters alone."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= most else f"{text[: most - 3]}..."
