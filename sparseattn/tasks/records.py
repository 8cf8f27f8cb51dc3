"""Results as JSON lines, appended one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.files import naming

Key: TypeAlias = "tuple[Any, ...]"

KEY = ("task", "prompt", "protocol", "method", "budget", "source")  # what tells one record of a file from another


def key_of(record: Mapping[str, Any]) -> Key:
    return tuple(record[name] for name in KEY)


class Records:
    """The records of a file. A line that was cut off, as of a run that was killed, is dropped.

    Args:
        path: the file; its folder exists.
        settings: what every record's numbers depend on beyond its own `KEY`; it becomes part of each.

    Raises:
        OSError: the file cannot be used.
        ValueError: it holds records of other settings, or lines that are no records.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.settings = json.loads(json.dumps(settings))
        self.found: dict[Key, dict[str, Any]] = {}
        with open(self.path, "ab+") as file:
            file.seek(0)
            whole = 0
            for line in file:
                if line.endswith(b"\n"):
                    self._take(line)
                    whole += len(line)
            file.truncate(whole)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            key, theirs = key_of(record), dict(record["settings"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{self.path} holds a line that is no record of this command: {line[:60]!r}") from None
        for name in {**theirs, **self.settings}:
            if theirs.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{self.path} holds results with another {name} ({theirs.get(name)!r}, now "
                    f"{self.settings.get(name)!r}): name another folder, or remove that file"
                )
        self.found[key] = record

    def add(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a record and returns it as it reads back; it is on the disk then."""
        line = json.dumps({**record, "settings": self.settings})
        with naming(self.path), open(self.path, "ab", buffering=0) as file:
            file.write((line + "\n").encode())  # in one piece: a run that is killed leaves all of it or none
            os.fsync(file.fileno())
        kept: dict[str, Any] = json.loads(line)
        self.found[key_of(kept)] = kept
        return kept
