"""Classes by name, each imported when it is asked for, and objects made from texts `name:arg=value,...`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import reprlib
from collections.abc import Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from sparseattn.utils.suggest import did_you_mean

Kind = TypeVar("Kind")

LONGEST = 10_000  # characters of a text
DEEPEST = 20  # brackets of any kind within each other
_SPEC = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)(?::(?P<args>[A-Za-z_]\w*=.*))?")
# A value in quotes, or a character: an apostrophe within a value is one.
_PIECE = re.compile(r"""(?<==)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|.""", re.S)


class Registry(MutableMapping[str, type[Kind]], Generic[Kind]):
    """Classes of one kind by name. Add one with `REGISTRY["mine"] = Mine`.

    Args:
        noun: what the kind is called in errors, such as "selector".
        kind: the base class.
        places: name -> `package.module:Class`.
    """

    def __init__(self, noun: str, kind: type[Kind], places: Mapping[str, str]) -> None:
        self.noun, self.kind = noun, kind
        self._classes: dict[str, str | type[Kind]] = dict(sorted(places.items()))

    def __getitem__(self, name: str) -> type[Kind]:
        listed = self._classes[name]
        if isinstance(listed, str):
            module, _, kind = listed.partition(":")
            listed = self._classes[name] = getattr(importlib.import_module(module), kind)
        return listed

    def __setitem__(self, name: str, method: type[Kind]) -> None:
        self._classes[name] = method

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._classes  # which imports nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def make(self, spec: str) -> Kind:
        """Return what a text names: `name[:arg=value,...]` or `package.module:Class[:arg=value,...]`.

        Values are Python literals; what is not one is a string (`quest:page=32,group=sum`), which takes quotes if it
        has a comma or a bracket. A value of the kind itself, which its argument's annotation tells, is such a text
        again, in brackets if it has arguments. A module is imported, which runs its code with the rights of this
        process.

        Raises:
            ValueError: an unknown name or argument (with the nearest known one), brackets that do not match or are
                nested more than `DEEPEST` deep, a text of more than `LONGEST` characters, or a value that is refused.
        """
        given, texts = self.parsed(spec)
        method = self._find(given)
        types = get_type_hints(method.__init__)
        known = list(inspect.signature(method).parameters)
        arguments: dict[str, Any] = {}
        for name, text in texts:
            if name in arguments:
                raise ValueError(f"{spec!r} gives {name!r} twice")
            if text is None or name not in known:
                raise ValueError(
                    f"{given} has no argument {name!r}{did_you_mean(name, known)}; it takes "
                    f"{', '.join(known) or 'none'}"
                )
            arguments[name] = self._value(given, name, text, types.get(name))
        try:
            made = method(**arguments)
            repr(made)
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            unset = isinstance(error, AttributeError) and error.name in known
            stored = f". {method.__name__}.__init__ must store each argument under its own name, or call "
            advice = f"{stored}super().__init__ of a base class that does" if unset else ""
            raise ValueError(f"{spec!r}: {error}{advice}") from error
        return made

    def parsed(self, spec: str) -> tuple[str, list[tuple[str, str | None]]]:
        """Return the name in a text, and its arguments: name and text of each, None for one without "=".

        Raises:
            ValueError: a text of nothing of this kind, brackets that do not match or are nested more than `DEEPEST`
                deep, or more than `LONGEST` characters.
        """
        _check_size(spec, self.noun)
        _refuse_file(spec)
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ValueError(
                f"{spec!r} is not a {self.noun}: write NAME or NAME:arg=value,arg=value, with NAME one of "
                f"{', '.join(self)} or package.module:Class"
            )
        pairs = [pair.partition("=") for pair in split_pairs(match["args"], self.noun)] if match["args"] else []
        return match["name"], [(name, text if equals else None) for name, equals, text in pairs]

    def _value(self, owner: str, name: str, text: str, kind: Any) -> Any:
        """`text` as the argument's annotated type; without a plain one, a Python literal, else the text itself."""
        if kind is self.kind or self.kind in get_args(kind):
            bracketed = text.startswith("[") and text.endswith("]")
            if "=" in text and not bracketed:
                raise ValueError(
                    f"{owner}'s {name} is a {self.noun}, whose arguments stand in brackets: {name}=[NAME:arg=value,"
                    f"...], got {text!r}"
                )
            return self.make(text[1:-1] if bracketed else text)
        return _plain_value(owner, name, text, kind)

    def _find(self, name: str) -> type[Kind]:
        if name in self:
            return self[name]
        module, colon, attribute = name.partition(":")
        if module in self:
            raise ValueError(f"{name!r}: arguments are written {module}:name=value, got {attribute!r}")
        if not colon:
            package, dot, last = name.rpartition(".")
            meant = f" (did you mean '{package}:{last}'?)" if dot else did_you_mean(name, self)
            raise ValueError(
                f"no {self.noun} is called {name!r}{meant}; known are {', '.join(self)}, "
                f"and package.module:Class for your own"
            )
        try:
            imported = importlib.import_module(module)
        except ImportError as error:
            advice = ""
            if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
                advice = f": {error.name}.py must lie in the current folder or on PYTHONPATH"
            raise ValueError(f"{name!r}: cannot import {module!r} ({error}){advice}") from error
        return self._class_of(imported, name)

    def _class_of(self, module: ModuleType, name: str) -> type[Kind]:
        """Return the class that `module:Class` names; ValueError for none of this kind, or one that lacks a part."""
        attribute = name.partition(":")[2]
        kinds = [
            attribute_name
            for attribute_name, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, self.kind)
        ]
        own = [
            attribute_name
            for attribute_name in kinds
            if vars(module)[attribute_name].__module__ == name.partition(":")[0]
        ]
        named = getattr(module, attribute, None)
        if named is None:
            raise ValueError(
                f"{name!r}: module {name.partition(':')[0]!r} has no {attribute!r}{did_you_mean(attribute, own)}; its "
                f"{self.noun}s are {', '.join(own) or 'none'}"
            )
        if not (inspect.isclass(named) and issubclass(named, self.kind)):
            raise ValueError(f"{name!r} is not a subclass of sparseattn.{self.kind.__name__}")
        if lacking := sorted(getattr(named, "__abstractmethods__", ())):
            raise ValueError(f"{name!r} does not define {' and '.join(lacking)}, which every {self.noun} does")
        return named


def split_pairs(text: str, noun: str) -> list[str]:
    """Return `"a=1,b=[c:d=2,e=3]"` cut at the commas outside of brackets and quotes.

    Raises:
        ValueError: brackets that do not match; `noun` says what stands in them.
    """
    pairs, depth = [""], 0
    for piece in _PIECE.findall(text):
        depth += (piece == "[") - (piece == "]")
        if depth < 0:
            break
        if piece == "," and not depth:
            pairs.append("")
        else:
            pairs[-1] += piece
    if depth:
        what = "closes a bracket that it did not open" if depth < 0 else "leaves a bracket open"
        raise ValueError(f"{text!r} {what}: a {noun} with arguments, as a value, is name=[NAME:arg=value,...]")
    return pairs


def _refuse_file(spec: str) -> None:
    """ValueError for a text that names a file in place of a module."""
    if match := re.match(r"(?P<file>[^:=]*?(?P<stem>\w+)\.py)(?P<rest>:.*)?$", spec, re.S):
        folder = match["file"].rpartition("/")[0]
        where = f", with PYTHONPATH={folder} if that is not the current folder" if folder.strip("./") else ""
        raise ValueError(f"{spec!r} names a file: write its module, {match['stem']}{match['rest'] or ':Class'}{where}")


def _check_size(spec: str, noun: str) -> None:
    """ValueError for a text that would take long to read, before anything of it is."""
    if len(spec) > LONGEST:
        raise ValueError(f"the text of a {noun} has at most {LONGEST:,} characters, got {len(spec):,}")
    depth = 0
    for letter in spec:
        depth += (letter in "[({") - (letter in "])}")
        if depth > DEEPEST:
            raise ValueError(f"brackets in {reprlib.repr(spec)} are nested more than {DEEPEST} deep")


def _plain_value(owner: str, name: str, text: str, kind: Any) -> Any:
    """`text` as a value of a plain type; without one, a Python literal, else the text itself."""
    if kind is str and text[:1] not in ("'", '"'):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two of a long row of signs
        value = text
    if kind is str:
        return value if isinstance(value, str) else text
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool) and type(value) is not kind:
        raise ValueError(f"{owner}'s {name} is of type {kind.__name__}, got {text!r}")
    return value
