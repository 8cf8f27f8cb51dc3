"""Typed fields of an object that was read from JSON, checked at the door where it is read.

A kind tells what a field must be; `Object` is a kind made of others. What is refused is said in a sentence with the
field, what is due and what was given: "mean.kl is a number from 0 to 1e+15, got 'x'".
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

MOST = 1e15  # of any number: sums and means of more are no longer what they seem


class FieldError(ValueError):
    """A field that is not what it must be, in one sentence without the file's name."""


class Kind(Protocol):
    """What a field must be."""

    def check(self, value: Any, name: str) -> None:
        """FieldError, beginning with `name`, where the value is another."""


def refuse(name: str, due: str, value: Any) -> FieldError:
    """Return the error of a field: its name, what is due, and what was given, shortened."""
    return FieldError(f"{name} {due}, got {reprlib.repr(value)}")


@dataclass(frozen=True)
class Text:
    """A text; `empty` ones too, or one of `among`."""

    empty: bool = True
    among: tuple[str, ...] = ()

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, str):
            raise refuse(name, "is text", value)
        if not value and not self.empty:
            raise refuse(name, "is text that is not empty", value)
        if self.among and value not in self.among:
            raise refuse(name, f"is one of {', '.join(self.among)}", value)


@dataclass(frozen=True)
class Number:
    """A finite number within bounds; a whole one where `whole`."""

    least: float = -MOST
    most: float = MOST
    whole: bool = False

    def check(self, value: Any, name: str) -> None:
        right = isinstance(value, int if self.whole else (int, float)) and not isinstance(value, bool)
        if not right or not self.least <= value <= self.most:  # NaN is not
            what = "whole number" if self.whole else "number"
            raise refuse(name, f"is a {what} from {self.least:g} to {self.most:g}", value)


@dataclass(frozen=True)
class Flag:
    """true or false."""

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, bool):
            raise refuse(name, "is true or false", value)


@dataclass(frozen=True)
class Maybe:
    """null, or what `kind` says."""

    kind: Kind

    def check(self, value: Any, name: str) -> None:
        if value is not None:
            self.kind.check(value, name)


@dataclass(frozen=True)
class Either:
    """What any of the kinds says; `due` says them in words: "is text or a number"."""

    kinds: tuple[Kind, ...]
    due: str

    def check(self, value: Any, name: str) -> None:
        for kind in self.kinds:
            try:
                return kind.check(value, name)
            except FieldError:
                continue
        raise refuse(name, self.due, value)


@dataclass(frozen=True)
class Items:
    """A list of so many items at least, each of a kind; of `count` items where that is given."""

    kind: Kind
    least: int = 0
    count: int | None = None

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, list):
            raise refuse(name, "is a list", value)
        if len(value) < self.least or (self.count is not None and len(value) != self.count):
            due = f"{self.least} items or more" if self.count is None else f"{self.count} items"
            raise FieldError(f"{name} is a list of {due}, got {len(value)}")
        for i, item in enumerate(value):
            self.kind.check(item, f"{name}[{i}]")


@dataclass(frozen=True)
class Values:
    """An object of so many fields at least, whatever their names, each of a kind."""

    kind: Kind
    least: int = 0

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise refuse(name, "is an object", value)
        if len(value) < self.least:
            raise FieldError(f"{name} is an object of {self.least} fields or more, got {len(value)}")
        for key, inner in value.items():
            self.kind.check(inner, f"{name}.{reprlib.repr(key)[1:-1]}")


@dataclass(frozen=True)
class Object:
    """An object with these fields, and those of `more` where it has them; others besides, unless `closed`.

    `rule` sees an object whose fields are right, and its name: what they must be to each other.
    """

    fields: Mapping[str, Kind] = field(default_factory=dict)
    more: Mapping[str, Kind] = field(default_factory=dict)
    rule: Callable[[Mapping[str, Any], str], None] | None = None
    closed: bool = False

    def check(self, value: Any, name: str = "") -> None:
        if not isinstance(value, Mapping):
            raise refuse(name or "a record", "is an object", value)
        for key, kind in self.fields.items():
            if key not in value:
                raise FieldError(f"{_inner(name, key)} is missing")
            kind.check(value[key], _inner(name, key))
        for key, kind in self.more.items():
            if key in value:
                kind.check(value[key], _inner(name, key))
        known = (*self.fields, *self.more)
        if self.closed and (unknown := [key for key in value if key not in known]):
            raise FieldError(f"{name} has {', '.join(known)}, got {reprlib.repr(unknown[0])}")
        if self.rule is not None:
            self.rule(value, name)


def _inner(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
