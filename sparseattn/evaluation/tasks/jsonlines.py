"""JSON Lines files: a line as an object that all else can work with, nothing too long, too deep or half a letter; and
files that lines are appended to one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sparseattn.utils.files import naming, write_atomic
from sparseattn.utils.json_text import parse

DIGITS = 4300  # of a whole number, Python's own limit: an answer may be long


def json_object(line: str | bytes) -> dict[str, Any]:
    """Return the object of a line.

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
    """Append a line and return its object as it reads back; it is on the disk then.

    Raises:
        ValueError: a record that holds NaN or infinity, which could not be read again.
        OSError: the file cannot be written.
    """
    try:
        line = json.dumps(record, allow_nan=False)
    except ValueError:
        raise ValueError(f"what was measured cannot be kept in {path}: a number of it is NaN or infinite") from None
    left = memoryview((line + "\n").encode())
    size = len(left)
    with naming(path), open(path, "ab", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size
        try:
            while left:  # in one piece, as a rule: a run that is killed leaves all of it or none
                left = left[file.write(left) :]  # a disk that fills up takes a part, and says so at the rest
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # no later line is to stand behind a part of this one
                if os.fstat(file.fileno()).st_size == whole + size - len(left):  # and nobody else's is there
                    file.truncate(whole)
            raise
    kept: dict[str, Any] = json.loads(line)
    return kept


class LinesFile:
    """A file that lines are appended to, by one process or by several, each to a part of its own until `join`.

    Args:
        path: NAME.jsonl; its folder exists.
        rank: of this process among several, whose part is NAME.rankN.jsonl; None: it writes to the file itself.
    """

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self.path = path
        self._own = path if rank is None else path.with_suffix(f".rank{rank}.jsonl")

    @property
    def begun(self) -> bool:
        """Whether the file that this process writes to holds something."""
        return self._own.exists() and self._own.stat().st_size > 0

    @property
    def parts(self) -> list[Path]:
        """The parts that are there, by name."""
        return parts_of(self.path)

    def read(self, take: Callable[[bytes, int, Path], None]) -> bool:
        """Hand every whole line of the file and then of all parts to `take`, with its number and the file it is in.

        A line that was cut off is cut from the file and from this process's own part. Others may be written to.

        Returns:
            Whether the file holds a line.
        """
        there = whole_lines(self.path, lambda line, number: take(line, number, self.path))
        for part in self.parts:
            if part == self._own:
                whole_lines(part, lambda line, number, part=part: take(line, number, part))  # type: ignore[misc]
            else:
                for number, line in enumerate(part.read_bytes().splitlines(keepends=True), 1):
                    if line.endswith(b"\n"):
                        take(line, number, part)
        return there

    def append(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """As `append`, to the file or to this process's part."""
        return append(self._own, record)

    def join(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Put all there is, the parts' lines among it, in the file's place, and remove the parts."""
        text = "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in records)
        with naming(self.path):
            write_atomic(self.path, text.encode())
            for part in self.parts:
                part.unlink()


def parts_of(path: Path) -> list[Path]:
    """Return what several processes have appended that is not joined to the file yet."""
    return sorted(path.parent.glob(f"{path.stem}.rank*.jsonl"))
