"""What `recommend` has measured, as JSON lines of one file, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseattn.evaluation.tasks.jsonlines import LinesFile, json_object
from sparseattn.utils.json_fields import Either, FieldError, Flag, Items, Kind, Maybe, Number, Object, Text, Values

KEY = "record"  # what a line is of: settings, made, frontier, trial or plan

_COUNT = Number(0, whole=True)
_BUDGET = Maybe(Either((Number(0), Text()), "is rows, a share of the context, a text or null"))
_HEADS = Items(Number(), 1)
_MEAN = Object({"mean": Number()})


def _numbered(plan: Mapping[str, Any], name: str) -> None:
    for key in plan["layers"]:
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise FieldError(f"layers has numbers of layers as keys, got {reprlib.repr(key)}")


def _paid(cost: Mapping[str, Any], name: str) -> None:
    if not cost["full"] > 0:
        raise FieldError(f"{name}.full is above 0, got {cost['full']}")


def _of_one_length(point: Mapping[str, Any], name: str) -> None:
    """Check that a point's lists have a number a KV head."""
    lengths = {len(values) for key, values in point.items() if key in _EACH}
    if len(lengths) > 1:
        raise FieldError(f"{name} has as many numbers in {' as in '.join(_EACH)}, got {sorted(lengths)}")


_EACH = ("kl_heads", "error_heads", "bytes_heads")
_POINT = Object({"kl": Number(), **dict.fromkeys(_EACH, _HEADS)}, {"budget": _BUDGET}, _of_one_length)
_ROLE = Either((Text(empty=False), Object({"method": Text(empty=False)}, {"budget": _BUDGET})), "is a role")
_COST = Object(
    {"plan": Number(0), "full": Number(0), "unit": Text(), "predicted": Flag()}, {"machine": Maybe(Text())}, _paid
)
_LINES: dict[str, Kind] = {
    "settings": Object(more={"layers": Items(Items(_COUNT, 2))}),
    "made": Object({"date": Text(), "versions": Object(), "machine": Object()}),
    "frontier": Object(
        {"number": _COUNT, "layer": _COUNT, "method": Text(), "source": Text(), "points": Items(_POINT, 1)}
    ),
    "trial": Object({"number": _COUNT, "source": Text(), "kl": Number(), "same_top": Number(0, 1)}),
    "plan": Object(
        {
            "name": Text(),
            "cost": _COST,
            "layers": Values(Either((_ROLE, Items(_ROLE, 1)), "is a role, or a list of them, one a KV head"), 1),
            "verified": Object({"windows": _COUNT, "kl": _MEAN, "same_top": _MEAN}),
        },
        rule=_numbered,
    ),
}


def check_line(record: Mapping[str, Any]) -> None:
    """FieldError for a line that is none of `recommend`'s, or lacks what is read of it."""
    Text(among=tuple(_LINES)).check(record.get(KEY), KEY)
    _LINES[record[KEY]].check(record, "")


class TrialRecords:
    """A file of lines that are appended one by one, the first of which holds what all depend on.

    Args:
        path: the file; its folder exists. A line that was cut off, as of a run that was killed, is dropped.
        settings: what every line's numbers depend on.
        rank: of this process among several that write, see `LinesFile`; a part begins with the settings too.

    Attributes:
        found: the lines, without the first; those of parts behind those of the file.

    Raises:
        OSError: the file cannot be used.
        ValueError: it holds lines of other settings, or such as are no records; names the file.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any], rank: int | None = None) -> None:
        self.path = Path(path)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.found: list[dict[str, Any]] = []
        self._file, self._alone = LinesFile(self.path, rank), rank is None
        self._begun = False  # whether the file that this process writes to has its first line
        self.read()

    def read(self) -> None:
        """Read what is there now, of all processes; a line that is there twice once."""
        self.found.clear()
        there = self._file.read(self._take)
        self._begun = self._file.begun
        if not there and self._alone:
            self._begin()

    def join(self) -> None:
        """Put what lies in parts behind the lines of the file, and remove the parts."""
        if self._file.parts:
            self._file.join([{KEY: "settings", **self.settings}, *self.found])
            self._begun = self._file.begun

    def _begin(self) -> None:
        self._file.append({KEY: "settings", **self.settings})
        self._begun = True

    def _take(self, line: bytes, number: int, path: Path) -> None:
        try:
            record = json_object(line)
            check_line(record)
            if (record[KEY] == "settings") != (number == 1):
                raise ValueError("settings are the first line, and no other")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number} is no record of this command: {error}; remove that file, or name another folder"
            ) from None
        if number > 1:
            if path == self.path or record not in self.found:
                self.found.append(record)
            return
        for name in {**self.settings, **record}:
            if name != KEY and record.get(name) != self.settings.get(name):
                raise ValueError(
                    f"{path}, line 1 is of another {name} ({reprlib.repr(record.get(name))}, now "
                    f"{reprlib.repr(self.settings.get(name))}): name another folder, or remove that file"
                )

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind."""
        return [record for record in self.found if record[KEY] == kind]

    def add(self, kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append a line and return it as it reads back; it is on the disk then."""
        if not self._begun:
            self._begin()
        kept = self._file.append({KEY: kind, **record})
        self.found.append(kept)
        return kept
