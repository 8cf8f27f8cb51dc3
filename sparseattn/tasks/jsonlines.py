"""JSON Lines files: a line as an object that all else can work with, nothing too long, too deep or half a letter; and
files that lines are appended to one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparseattn.files import naming

DIGITS = 4300  # of a whole number, Python's own limit
DEPTH = 100  # of objects and lists within each other; Python gives up near a thousand


def json_object(line: str | bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: in a sentence, without the file's name: no JSON, no object, a number of more than `DIGITS` digits,
            nesting beyond `DEPTH`, or text with half of a surrogate pair, which no file or tokenizer takes.
    """
    deep = f"lists and objects are nested more than {DEPTH} deep"
    try:
        value = json.loads(line, parse_int=_whole)
    except RecursionError:
        raise ValueError(deep) from None
    if not isinstance(value, dict):
        raise ValueError(f"a line is a JSON object, got {type(value).__name__}")
    level: list[Any] = [value]
    for _ in range(DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _whole_letters(one)
            elif isinstance(one, dict):
                below += [*one, *one.values()]
            elif isinstance(one, list):
                below += one
        if not below:
            return value
        level = below
    raise ValueError(deep)


def whole_lines(path: Path, take: Callable[[bytes, int], None]) -> bool:
    """Hands every whole line of a file, with its number from 1 on, to `take`; cuts off one that is not whole, as of a
    run that was killed. Makes the file where there is none. Returns whether it holds a line."""
    with open(path, "ab+") as file:
        file.seek(0)
        whole = 0
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                take(line, number)
                whole += len(line)
        file.truncate(whole)
    return whole > 0


def append(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Appends a line and returns its object as it reads back; it is on the disk then."""
    line = json.dumps(record)
    with naming(path), open(path, "ab", buffering=0) as file:
        file.write((line + "\n").encode())  # in one piece: a run that is killed leaves all of it or none
        os.fsync(file.fileno())
    kept: dict[str, Any] = json.loads(line)
    return kept


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise ValueError(f"a number has at most {DIGITS} digits, got {len(digits)}; as text it may be longer")
    return int(digits)


def _whole_letters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"text is whole Unicode characters, got half of a surrogate pair, {half}") from None
