"""What a method is called: in labels of experiments, in records and in index files."""

from __future__ import annotations

import ast
import inspect
from typing import Any

from sparseattn.selectors.methods import NAMES


def identity(method: type[Any]) -> str:
    """Return what index files and records call a class, wherever its module lies.

    A registered class goes by its name in the registry (`quest`), another one of this package by `sparseattn:Class`,
    and a class of a user by `module:Class`.
    """
    place = f"{method.__module__}:{method.__qualname__}"
    if place in NAMES:
        return NAMES[place]
    return f"sparseattn:{method.__qualname__}" if method.__module__.startswith("sparseattn.") else place


class Named:
    """A method whose constructor's arguments are its configuration, each stored under its own name.

    Attributes:
        knob: the argument that trades recall for work in `select`; set on a built selector, it holds from the next
            query on. None: there is no such argument.
    """

    knob: str | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, as they are now."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def label(self, *, knob: bool = True) -> str:
        """Return the class and the arguments that differ from their defaults, a part by its label.

        Args:
            knob: whether the `knob` is among them.
        """
        parameters, shown = inspect.signature(type(self)).parameters, []
        for name, value in self.arguments().items():
            default = parameters[name].default
            if isinstance(value, Named):
                if not _is_default(value, default):
                    shown.append(f"{name}={value.label()}")
            elif value != default and (knob or name != self.knob):
                shown.append(f"{name}={value!r}")
        return type(self).__name__ + (f"({', '.join(shown)})" if shown else "")

    def index_arguments(self) -> dict[str, Any]:
        """Return, for JSON, what the index of given rows depends on: the constructor's arguments but the knob; of a
        part, its class and what its index depends on."""
        return {
            name: {"selector": identity(type(value)), **value.index_arguments()} if isinstance(value, Named) else value
            for name, value in self.arguments().items()
            if name != self.knob
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"


def _is_default(part: Named, default: object) -> bool:
    """Whether a part is the method that its argument's default names, such as "quest" or "exact:group=softmax"."""
    if not isinstance(default, str):
        return False
    name, _, text = default.partition(":")
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair)
    arguments = ", ".join(f"{argument}={_literal(value)!r}" for argument, value in pairs)
    shown = type(part).__name__ + (f"({arguments})" if arguments else "")
    return identity(type(part)) == name and part.label() == shown


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
