"""Every method by name, and selectors made from texts. CONTRIBUTING.md says what a new method takes."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import reprlib
from collections.abc import Iterator, MutableMapping
from typing import Any, get_args, get_type_hints

from sparseattn.selectors.base import Selector
from sparseattn.selectors.identity import identity
from sparseattn.selectors.methods import BASE, METHODS
from sparseattn.utils.suggest import did_you_mean


class Methods(MutableMapping[str, type[Selector]]):
    """Classes of selectors by name, each imported when it is asked for. Add one with `SELECTORS["mine"] = Mine`."""

    def __init__(self) -> None:
        self._classes: dict[str, str | type[Selector]] = {name: BASE + METHODS[name].place for name in sorted(METHODS)}

    def __getitem__(self, name: str) -> type[Selector]:
        found = self._classes[name]
        if isinstance(found, str):
            module, _, kind = found.partition(":")
            found = self._classes[name] = getattr(importlib.import_module(module), kind)
        return found

    def __setitem__(self, name: str, method: type[Selector]) -> None:
        self._classes[name] = method

    def __delitem__(self, name: str) -> None:
        del self._classes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._classes  # which imports nothing

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


SELECTORS = Methods()

LONGEST = 10_000  # characters of a selector's text
DEEPEST = 20  # brackets of any kind within each other
_SPEC = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)(?::(?P<args>[A-Za-z_]\w*=.*))?")
# A value in quotes, or a character: an apostrophe within a value is one.
_PIECE = re.compile(r"""(?<==)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|.""", re.S)


def make_selector(spec: str) -> Selector:
    """The selector that a text names: `name[:arg=value,...]` or `package.module:Class[:arg=value,...]`.

    Values are Python literals; what is not one is a string (`quest:page=32,group=sum`), which takes quotes if it has a
    comma or a bracket. `str` of a selector is the shortest such text (`Named.label`). A value that is a selector
    itself, which its argument's annotation tells, is such a text again, in brackets if it has arguments, and brackets
    nest: `twostage:pages=lowbit,times=4`, `twostage:pages=[quest:page=8,int8=True],times=4`. A shell may want quotes
    around them. A module is imported, which runs its code with the rights of this process: take no such text from where
    you would take no program. For texts out of files, see `sparseattn.selectors.trust`.

    Raises:
        ValueError: an unknown name or argument (with the nearest known one), brackets that do not match or are nested
            more than `DEEPEST` deep, a text of more than `LONGEST` characters, or a value the selector refuses.
    """
    given, texts = parsed(spec)
    method = _find(given)
    types = get_type_hints(method.__init__)
    known = list(inspect.signature(method).parameters)
    arguments: dict[str, Any] = {}
    for name, text in texts:
        if name in arguments:
            raise ValueError(f"{spec!r} gives {name!r} twice")
        if text is None or name not in known:
            raise ValueError(
                f"{given} has no argument {name!r}{did_you_mean(name, known)}; it takes {', '.join(known) or 'none'}"
            )
        arguments[name] = _value(method, name, text, types.get(name))
    try:
        selector = method(**arguments)
        repr(selector)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{spec!r}: {error}") from error
    return selector


def parsed(spec: str) -> tuple[str, list[tuple[str, str | None]]]:
    """Return the name in a selector's text, and its arguments: name and text of each, None for one without "=".

    Raises:
        ValueError: text of no selector, brackets that do not match or are nested more than `DEEPEST` deep, or more
            than `LONGEST` characters.
    """
    _check_size(spec)
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ValueError(
            f"{spec!r} is not a selector: write NAME or NAME:arg=value,arg=value, with NAME one of "
            f"{', '.join(SELECTORS)} or package.module:Class"
        )
    pairs = [pair.partition("=") for pair in _pairs(match["args"])] if match["args"] else []
    return match["name"], [(name, text if equals else None) for name, equals, text in pairs]


def _check_size(spec: str) -> None:
    """ValueError for a text that would take long to read, before anything of it is."""
    if len(spec) > LONGEST:
        raise ValueError(f"the text of a selector has at most {LONGEST:,} characters, got {len(spec):,}")
    depth = 0
    for letter in spec:
        depth += (letter in "[({") - (letter in "])}")
        if depth > DEEPEST:
            raise ValueError(f"brackets in {reprlib.repr(spec)} are nested more than {DEEPEST} deep")


def as_selector(given: Selector | str) -> Selector:
    """`given`, or the selector that it names (`make_selector`); ValueError for anything else."""
    made = make_selector(given) if isinstance(given, str) else given
    if not isinstance(made, Selector):
        raise ValueError(f'selector is a name ("quest") or an instance of a Selector, such as Quest(), got {made!r}')
    return made


def _pairs(text: str) -> list[str]:
    """`"a=1,b=[c:d=2,e=3]"` at the commas outside of brackets and quotes; ValueError where brackets do not match."""
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
        raise ValueError(f"{text!r} {what}: a selector with arguments, as a value, is name=[NAME:arg=value,...]")
    return pairs


def _value(method: type[Selector], name: str, text: str, kind: Any) -> Any:
    """`text` as the argument's annotated type; without a plain one, a Python literal, else the text itself."""
    if kind is Selector or Selector in get_args(kind):
        bracketed = text.startswith("[") and text.endswith("]")
        if "=" in text and not bracketed:
            raise ValueError(
                f"{identity(method)}'s {name} is a selector, whose arguments stand in brackets: {name}=[NAME:arg=value,"
                f"...], got {text!r}"
            )
        return make_selector(text[1:-1] if bracketed else text)
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
        raise ValueError(f"{identity(method)}'s {name} is of type {kind.__name__}, got {text!r}")
    return value


def _find(name: str) -> type[Selector]:
    if name in SELECTORS:
        return SELECTORS[name]
    module, colon, attribute = name.partition(":")
    if module in SELECTORS:
        raise ValueError(f"{name!r}: arguments are written {module}:name=value, got {attribute!r}")
    if not colon:
        raise ValueError(
            f"no selector is called {name!r}{did_you_mean(name, SELECTORS)}; known are {', '.join(SELECTORS)}, "
            f"and package.module:Class for your own"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ValueError(f"{name!r}: cannot import {module!r} ({error})") from error
    except AttributeError:
        raise ValueError(f"{name!r}: module {module!r} has no {attribute!r}") from None
    if not (inspect.isclass(found) and issubclass(found, Selector)) or inspect.isabstract(found):
        raise ValueError(f"{name!r} is not a concrete subclass of sparseattn.Selector")
    return found
