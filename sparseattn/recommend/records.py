"""What `recommend` has measured, as JSON lines of one file, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseattn.tasks.jsonlines import append, json_object, whole_lines

KEY = "record"  # what a line is of


class Records:
    """A file of lines that are appended one by one, the first of which holds what all depend on.

    Args:
        path: the file; its folder exists. A line that was cut off, as of a run that was killed, is dropped.
        settings: what every line's numbers depend on.

    Attributes:
        found: the lines, without the first.

    Raises:
        OSError: the file cannot be used.
        ValueError: it holds lines of other settings, or such as are no records; names the file.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.found: list[dict[str, Any]] = []
        if not whole_lines(self.path, self._take):
            append(self.path, {KEY: "settings", **self.settings})

    def _take(self, line: bytes, number: int) -> None:
        try:
            one = json_object(line)
            if not isinstance(one.get(KEY), str) or (one[KEY] == "settings") != (number == 1):
                raise ValueError(f"{KEY} is text, and settings are the first line")
        except ValueError as error:
            raise ValueError(
                f"{self.path}, line {number} is no record of this command: {error}; remove that file, or name another "
                f"folder"
            ) from None
        if number > 1:
            self.found.append(one)
            return
        for name in {**self.settings, **one}:
            if name != KEY and one.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{self.path} is of another {name} ({reprlib.repr(one.get(name))}, now "
                    f"{reprlib.repr(self.settings.get(name))}): name another folder, or remove that file"
                )

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [one for one in self.found if one[KEY] == kind]

    def add(self, kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Appends a line and returns it as it reads back; it is on the disk then."""
        kept = append(self.path, {KEY: kind, **record})
        self.found.append(kept)
        return kept
