"""What a method is called in tables, records, errors and index files: the text that `make_selector` reads."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from sparseattn.selectors.methods import NAMES
from sparseattn.utils.hashing import file_hash


def identity(method: type[Any]) -> str:
    """Return what index files and records call a class, wherever its module lies.

    A registered class goes by its name in the registry (`quest`), another one of this package by `sparseattn:Class`,
    and a class of a user by `module:Class`.
    """
    place = f"{method.__module__}:{method.__qualname__}"
    if place in NAMES:
        return NAMES[place]
    return f"sparseattn:{method.__qualname__}" if method.__module__.startswith("sparseattn.") else place


def own_code(method: type[Any]) -> str | None:
    """Return a hash of the files that say what a class of a user does, its bases' too; None for one of this package,
    and where there is no file, as in a notebook."""
    files: set[str | None] = set()
    for kind in method.__mro__:
        package = kind.__module__.split(".")[0]
        if package != "sparseattn" and package not in sys.stdlib_module_names:
            with contextlib.suppress(OSError, TypeError):  # of a module without a file
                files.add(inspect.getsourcefile(kind))
    hashes = sorted(file_hash(name) for name in files if name is not None and os.path.isfile(name))
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:16] if hashes else None


class Named:
    """A method whose constructor's arguments are its configuration, each stored under its own name.

    `str` gives its label, the shortest text that `make_selector` reads as this method, and `repr` the text with every
    argument. Both leave out what only Python could give, such as a class within a function.

    Attributes:
        knob: the argument that trades recall for work in `select`; set on a built selector, it holds from the next
            query on. None: there is no such argument.
    """

    knob: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, as they are now."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def label(self, *, knob: bool = True) -> str:
        """Return the shortest text that names this method, without arguments at their defaults: `lowbit:bits=1`.

        Args:
            knob: whether the `knob` is among them.
        """
        defaults = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        other = {name: value for name, value in self.arguments().items() if not _is_default(value, defaults[name])}
        return self._typed({name: value for name, value in other.items() if knob or name != self.knob}, str)

    def _typed(self, arguments: Mapping[str, Any], text_of: Callable[[Any], str]) -> str:
        """Return the text of this method with such arguments, of which `text_of` writes those that are methods."""
        written = [f"{name}={as_typed(value, text_of)}" for name, value in arguments.items()]
        return self.class_name() + (f":{','.join(written)}" if written else "")

    @classmethod
    def class_name(cls) -> str:
        """Return the text of the class, without arguments."""
        return identity(cls)

    def index_arguments(self) -> dict[str, Any]:
        """Return, for JSON, what the index of given rows depends on: the constructor's arguments but the knob; of a
        part, its class and what its index depends on."""
        return {
            name: {"selector": identity(type(value)), **value.index_arguments()} if isinstance(value, Named) else value
            for name, value in self.arguments().items()
            if name != self.knob
        }

    def __str__(self) -> str:
        return self.label()

    def __repr__(self) -> str:
        return self._typed(self.arguments(), repr)


def as_typed(value: object, text_of: Callable[[Any], str] = str) -> str:
    """Return an argument's value as one types it: a method by `text_of` it, in brackets if it has arguments itself; a
    text in quotes only if it would be read as something else without; a tuple as a list."""
    if isinstance(value, Named):
        text = text_of(value)
        return f"[{text}]" if "=" in text else text
    if isinstance(value, (list, tuple)):
        return f"[{','.join(as_typed(part) if isinstance(part, (list, tuple)) else repr(part) for part in value)}]"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return value if isinstance(value, str) and _is_plain(value) else repr(value)


def _is_plain(text: str) -> bool:
    """Whether a text needs no quotes: it is no Python literal, and nothing in it ends or nests a value."""
    if not text or text != text.strip() or not text.isprintable() or set(text) & set("[],") or text[0] in "'\"":
        return False
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return True
    return False


def _is_default(value: object, default: object) -> bool:
    """Whether an argument's value is its default; a method is, if the default is its label."""
    return str(value) == default if isinstance(value, Named) else bool(value == default)
