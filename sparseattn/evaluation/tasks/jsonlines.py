"""JSON Lines files: a line as an object that all else can work with, nothing too long, too deep or half a letter; and
files that lines are appended to one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparseattn.utils.files import naming
from sparseattn.utils.json_text import parse

DIGITS = 4300  # of a whole number, Python's own limit: an answer may be long


def json_object(line: str | bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: in a sentence, without the file's name: no JSON, no object, a number of more than `DIGITS` digits,
            nesting that is too deep, or text with half of a surrogate pair (see `json_text.parse`).
    """
    value = parse(line, digits=DIGITS, finite=False, once=False)  # who reads a line checks its numbers by name
    if not isinstance(value, dict):
        raise ValueError(f"a line is a JSON object, got {type(value).__name__}")
    return value


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
    """Appends a line and returns its object as it reads back; it is on the disk then.

    Raises:
        ValueError: a record that holds NaN or infinity, which could not be read again.
        OSError: the file cannot be written.
    """
    try:
        line = json.dumps(record, allow_nan=False)
    except ValueError:
        raise ValueError(f"what was measured cannot be kept in {path}: a number of it is NaN or infinite") from None
    with naming(path), open(path, "ab", buffering=0) as file:
        file.write((line + "\n").encode())  # in one piece: a run that is killed leaves all of it or none
        os.fsync(file.fileno())
    kept: dict[str, Any] = json.loads(line)
    return kept
