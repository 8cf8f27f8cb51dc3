"""Reads the records that commands left in folders."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.evaluation.tasks.jsonlines import parts_of
from sparseattn.utils.json_text import JsonError, parse

Record: TypeAlias = "dict[str, Any]"
Check: TypeAlias = "Callable[[Record, Sequence[Record]], None]"  # of a line and those above it


@dataclass(frozen=True)
class RecordSource:
    """A file of records.

    Args:
        path: where it lies.
        records: its lines, in their order.
    """

    path: Path
    records: Sequence[Record]


def read(folders: Sequence[Path], files: Mapping[str, Check]) -> dict[str, list[RecordSource]]:
    """Return what the folders hold of files with a name of `files`: name -> sources, in the order of the folders.

    Every line is checked here, so that who shows records need not ask again what they are.

    Args:
        folders: where to look.
        files: name -> what refuses a line that is no record of that file, by a FieldError.

    Raises:
        ValueError: no folder, one twice, one without any such file, or a line that is no record, naming file, line and
            field.
        OSError: a file cannot be read.
    """
    wanted = list(files)
    sources: dict[str, list[RecordSource]] = {}
    seen: set[Path] = set()
    for folder in folders:
        if not folder.exists():
            raise ValueError(f"there is no folder {folder}")
        if not folder.is_dir():
            raise ValueError(f"{folder} is a file; name the folder that a command wrote, such as {folder.parent}")
        if folder.resolve() in seen:
            raise ValueError(f"the folder {folder} is named twice")
        seen.add(folder.resolve())
        _refuse_parts(folder, wanted)
        there = [name for name in wanted if (folder / name).is_file()]
        if not there:
            _refuse_unfinished(folder, wanted)
            raise ValueError(f"{folder} holds no records: none of {', '.join(wanted)} is there")
        for name in there:
            sources.setdefault(name, []).append(RecordSource(folder / name, lines(folder / name, files[name])))
    return sources


def _refuse_unfinished(folder: Path, wanted: Sequence[str]) -> None:
    """ValueError where a run has not finished: its records lie in NAME.partial.jsonl until all are there."""
    for name in wanted:
        partial = (folder / name).with_suffix(".partial.jsonl")
        if partial.is_file():
            raise ValueError(
                f"the run that writes {folder / name} has not finished: {partial.name} holds "
                f"{len(partial.read_bytes().splitlines())} records. Let it finish, or run the same command again, "
                f"which begins anew. To show what is there, rename {partial.name} to {name}"
            )


def _refuse_parts(folder: Path, wanted: Sequence[str]) -> None:
    """ValueError where processes of a job that has not finished have left records of their own."""
    for name in wanted:
        if parts := parts_of(folder / name):
            raise ValueError(
                f"the run of several processes that writes {folder / name} has not finished: {parts[0].name} holds "
                f"records that are not in {name} yet. Run the same command again, by any number of processes"
            )


def lines(path: Path, check: Check) -> list[Record]:
    """Return the records of a file, a line each.

    Raises:
        ValueError: a line is no record, naming file, line and field, or the file is empty.
    """
    records: list[Record] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse(line)
        except JsonError as error:
            raise ValueError(f"{path}, line {number} is no JSON that can be read: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is no record but {reprlib.repr(record)}")
        try:
            check(record, records)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no record that this command can read: {error}") from None
        records.append(record)
    if not records:
        raise ValueError(f"{path} is empty")
    return records
