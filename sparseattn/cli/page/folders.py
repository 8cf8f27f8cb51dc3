"""Reads the records that commands left in folders."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Record: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True)
class Source:
    """A file of records.

    Args:
        path: where it lies.
        records: its lines, in their order.
    """

    path: Path
    records: Sequence[Record]


def read(folders: Sequence[Path], files: Iterable[str]) -> dict[str, list[Source]]:
    """What the folders hold of the `files` that have a name of those: name -> sources, in the order of the folders.

    Raises:
        ValueError: no folder, one twice, one without any such file, or a line that is no record, naming file and line.
        OSError: a file cannot be read.
    """
    wanted = list(files)
    found: dict[str, list[Source]] = {}
    seen: set[Path] = set()
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}")
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file; name the folder that a command wrote, such as {folder.parent}")
        if folder.resolve() in seen:
            raise ValueError(f"the folder {folder} is named twice")
        seen.add(folder.resolve())
        there = [name for name in wanted if (folder / name).is_file()]
        if not there:
            raise ValueError(f"{folder} holds no records: none of {', '.join(wanted)} is there")
        for name in there:
            found.setdefault(name, []).append(Source(folder / name, lines(folder / name)))
    return found


def lines(path: Path) -> list[Record]:
    """The JSON objects of a file, a line each. ValueError names file and line of what is none, or an empty file."""
    made = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}): is it cut off?") from None
        if not isinstance(one, dict):
            raise ValueError(f"{path}, line {number} is no record but {reprlib.repr(one)}")
        made.append(one)
    if not made:
        raise ValueError(f"{path} is empty")
    return made


def checked(source: Source, make: Callable[[Sequence[Record]], Any]) -> Any:
    """`make` of the source's records; ValueError naming the file where they lack what a record of its kind has."""
    try:
        return make(source.records)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, LookupError) else str(error)
        raise ValueError(f"{source.path} holds records that this command cannot read: a line {what}") from error
