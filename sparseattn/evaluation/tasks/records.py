"""Results as JSON lines, appended one by one, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.evaluation.tasks.agreement import AGREEMENT
from sparseattn.evaluation.tasks.jsonlines import LinesFile, json_object
from sparseattn.utils.json_fields import MOST, Number

Key: TypeAlias = "tuple[Any, ...]"

KEY = ("task", "prompt", "protocol", "method", "budget", "source", "layers")  # what tells records of a file apart
NULLABLE = ("budget", "source", "layers")  # of full attention, of methods without a budget, and for all layers
WHOLE = "whole"  # the protocol of prompts that are handed over whole, of which nobody says what rows are read


def key_of(record: Mapping[str, Any]) -> Key:
    return tuple(record.get(name) for name in KEY)


def check_record(record: Mapping[str, Any]) -> None:
    """ValueError in a sentence for a record that tables and figures could not be made of.

    It has the texts of `KEY`, the number `rows` (by the protocol `WHOLE` `seconds`), and either `score`, from 0 to 1,
    or what `agreement` gives. Records of perplexity alone, as releases before that wrote them, may stay in a file.
    """
    for name in KEY:
        if not (isinstance(record.get(name), str) or (name in NULLABLE and record.get(name) is None)):
            raise ValueError(f"{name} is text, got {reprlib.repr(record.get(name))}")
    if "nll" in record or record["task"] == AGREEMENT:
        _number(record, "nll")
        _number(record, "scored_tokens", 1)
        if record["task"] == AGREEMENT:
            _number(record, "length", 1)
            _number(record, "kl", 0)
            _number(record, "same_top", 0, 1)
            _number(record, "nll_difference", -MOST)
            for name in ("text", "kind"):
                if not isinstance(record.get(name), str):
                    raise ValueError(f"{name} is text, got {reprlib.repr(record.get(name))}")
    else:
        _number(record, "score", 0, 1)
        if record.get("ruler") is not None:
            _number(record, "ruler", 0, 1)
        if not isinstance(record.get("answers", []), list):
            raise ValueError(f"answers are a list, got {reprlib.repr(record['answers'])}")
    _number(record, "seconds" if record["protocol"] == WHOLE else "rows")
    for name in ("length", "depth", "bytes_share", "first_token_seconds", "new_tokens"):
        if record.get(name) is not None:
            _number(record, name)


def _number(record: Mapping[str, Any], name: str, least: float = 0, most: float = MOST) -> None:
    Number(least, most).check(record.get(name), name)


class Records:
    """The records of a file. A line that was cut off, as of a run that was killed, is dropped.

    Args:
        path: the file; its folder exists.
        settings: what every record's numbers depend on beyond its own `KEY`; it becomes part of each.
        rank: of this process among several that write, see `LinesFile`; what their parts hold is found too.
        writes: whether new records go to the file; else another process that makes the same ones writes them.

    Attributes:
        found: the records by key, those of parts behind those of the file.

    Raises:
        OSError: the file cannot be used.
        ValueError: it holds records of other settings, or lines that are no records; names file and line.
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: Mapping[str, Any], rank: int | None = None, writes: bool = True
    ) -> None:
        self.path, self.writes = Path(path), writes
        self.settings = json.loads(json.dumps(settings))
        self.found: dict[Key, dict[str, Any]] = {}
        self._file = LinesFile(self.path, rank)
        self._in_parts: list[Key] = []
        self.read()

    def read(self) -> None:
        """Read what is there now, of all processes."""
        self.found.clear()
        self._in_parts.clear()
        self._file.read(self._take)

    def join(self, order: Iterable[Key]) -> None:
        """Put records that lie in parts behind those of the file, in this order of their keys, and remove the parts."""
        if not self._file.parts:
            return
        places = {key: place for place, key in enumerate(order)}
        self._in_parts.sort(key=lambda key: places.get(key, len(places)))
        behind = dict.fromkeys(self._in_parts)
        keys = [*(key for key in self.found if key not in behind), *behind]
        self._file.join(self.found[key] for key in keys)
        self._in_parts.clear()

    def _take(self, line: bytes, number: int, path: Path) -> None:
        try:
            record = json_object(line)
            check_record(record)
            theirs = record.get("settings")
            if not isinstance(theirs, dict):
                raise ValueError(f"settings are an object, got {reprlib.repr(theirs)}")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is a line that is no record of this command: {error}; remove that line or "
                "file, or name another folder"
            ) from None
        for name in {**theirs, **self.settings}:
            if theirs.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{path}, line {number} holds results with another {name} ({reprlib.repr(theirs.get(name))}, "
                    f"now {self.settings.get(name)!r}, in settings): name another folder, or remove that file"
                )
        key = key_of(record)
        if path == self.path:
            self.found[key] = record
        elif key not in self.found:
            self.found[key] = record
            self._in_parts.append(key)

    def add(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append a record and return it as it reads back; it is on the disk then.

        Raises:
            ValueError: it could not be read again (see `check_record`): a model that answers NaN has no perplexity.
        """
        try:
            check_record(record)
        except ValueError as error:
            what = ", ".join(f"{name} {record.get(name)}" for name in ("task", "protocol", "method", "budget"))
            raise ValueError(f"what was measured ({what}) cannot be kept: {error}") from None
        whole = {**record, "settings": self.settings}
        kept = self._file.append(whole) if self.writes else json.loads(json.dumps(whole))
        self.found[key_of(kept)] = kept
        return kept
