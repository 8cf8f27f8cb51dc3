"""Fields of a line, checked: a sentence with the field's name for one that is missing or of another kind."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.utils.suggest import did_you_mean


def text(fields: Mapping[str, Any], name: str, *, empty: bool = False) -> str:
    """Return a field that is text; ValueError for another kind, and for white space alone unless `empty`."""
    value = fields.get(name)
    if not isinstance(value, str) or not (empty or value.strip()):
        raise ValueError(f"{name} is text{'' if empty else ' that is not empty'}, got {reprlib.repr(value)}")
    return value


def optional_text(fields: Mapping[str, Any], name: str) -> str:
    """Return a field that is text, "" where it is missing or null."""
    return "" if fields.get(name) is None else text(fields, name, empty=True)


def texts(fields: Mapping[str, Any], name: str, count: int | None = None) -> tuple[str, ...]:
    """Return a field that is a list of texts, none of them empty, `count` of them where that is given."""
    value = fields.get(name)
    whole = isinstance(value, (list, tuple)) and all(isinstance(item, str) and item.strip() for item in value)
    if not whole or not value or (count is not None and len(value) != count):
        kind = f"{count} texts" if count is not None else "texts"
        raise ValueError(f"{name} is a list of {kind}, none of them empty, got {reprlib.repr(value)}")
    return tuple(value)


def number(fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    """Return a field that is a whole number of `least` or more."""
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():  # a table keeps numbers of a column with gaps so
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is a whole number of {least} or more, got {reprlib.repr(value)}")
    return value


def answers(fields: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Return the right answers under the first of `names` that is there: a text or number, or a list of them.

    Raises:
        ValueError: naming the fields: none is there, or an answer is empty.
    """
    value = next((fields[name] for name in names if name in fields), None)
    given = value if isinstance(value, (list, tuple)) else [value]
    if not given or not all(map(_is_answer, given)):
        raise ValueError(
            f"answers are a string or a list of strings under {', '.join(names)}, none of them empty, got "
            f"{reprlib.repr(value)}"
        )
    return tuple(map(str, given))


def names_of(path: Path) -> list[str]:
    """Return what a file may be called after: its name, that without what follows "-" or ".", and its folders."""
    stem = path.name.partition(".")[0]
    return [stem, stem.partition("-")[0], path.parent.name, path.parent.parent.name]


def task_of(given: str | None, named: Iterable[str | None], known: Sequence[str], layout: str) -> str:
    """Return the benchmark's task of a line.

    Args:
        given: what the user says; it is taken before all else.
        named: what the line, its file and its folder are called, the first that is known counts.
        known: the benchmark's tasks.
        layout: for the sentence.

    Raises:
        ValueError: none of them is known.
    """
    if given is not None:
        if given not in known:
            raise ValueError(f"{layout} has no task {given!r}{did_you_mean(given, known)}, it has {', '.join(known)}")
        return given
    names = list(dict.fromkeys(name for name in named if name))
    for name in names:
        if name in known:
            return name
    called = " or ".join(map(repr, names)) or "nothing"
    raise ValueError(
        f"which task of {layout} it is decides how it is asked and scored, and {called} is none: give "
        f"--layout {layout}:TASK, of {', '.join(known)}"
    )


def _is_answer(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, (str, int)) and bool(str(value).strip())
