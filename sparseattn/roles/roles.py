"""Roles: which method each layer of a model uses, or each KV head of it, with which budget; a value, and a file.

The file, format version 1, is JSON:

    format    "sparseattn-roles"
    version   1
    name      what tables call it; without one, the file's name
    layers    object: number of a model's layer -> a role, for all its heads, or a list of roles, one for each KV head
    meta      object of anything, kept as it is: where the roles come from; may be missing

A role is "dense", "window" or a selector as `make_selector` reads it, or an object of such a `method` and a `budget` of
its own: rows, a share ("5%" or 0.05) or "all".

`papers.py` makes those of two papers.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from sparseattn.core.budget import Budget, budget_of
from sparseattn.core.context import Heads
from sparseattn.roles.role import DENSE, Role, Share
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import as_selector
from sparseattn.selectors.trust import check_trusted, trusted_modules
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_text import parse

FORMAT, VERSION = "sparseattn-roles", 1
KEYS = ("format", "version", "name", "layers", "meta")
Some = TypeVar("Some", bound="Roles")


Given: TypeAlias = "Role | str"


class Roles:
    """A role for every layer of a model, or for every KV head of a layer.

    It stands where a selector stands in comparisons: in `evaluate`, `bench` and `eval`, and as `SparseCache(roles=)`.

    Args:
        layers: number of a model's layer -> a role (a `Role`, or its method as text) for all its heads, or a sequence
            of roles, one for each KV head. A sequence of these is of layers 0, 1, 2 and so on.
        name: what tables call it.
        meta: anything that JSON holds, to be kept with it.

    Raises:
        ValueError: no layer, a layer without heads, or what `Role` refuses; names layer and head.
    """

    FORMAT, VERSION, KIND = FORMAT, VERSION, "roles"  # of the file
    KEYS: tuple[str, ...] = KEYS

    def __init__(
        self,
        layers: Mapping[int, Given | Sequence[Given]] | Sequence[Given | Sequence[Given]],
        name: str = "roles",
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(layers, str) or not isinstance(layers, (Mapping, Sequence)) or not layers:
            raise ValueError(f"roles are of one layer or more, by number or in order, got {reprlib.repr(layers)}")
        each = dict(layers if isinstance(layers, Mapping) else enumerate(layers))
        for index in each:
            if type(index) is not int or index < 0:
                raise ValueError(f"a layer of roles is a number, 0 or more, got {index!r}")
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of roles is text, got {name!r}")
        self.name, self.meta = name, dict(meta or {})
        known: dict[tuple[str, str], Role] = {}  # equal roles are one, and so are their selectors
        self.layers: dict[int, Role | tuple[Role, ...]] = {
            index: _roles(each[index], f"layer {index}", known) for index in sorted(each)
        }

    # -- of a layer ----------------------------------------------------------------------------------------------------

    def shares(self, layer: int, heads: int) -> list[Share]:
        """Which of a layer's KV heads have which role, by the first head of each.

        Raises:
            ValueError: they say nothing of this layer, or are of another number of heads.
        """
        if layer not in self.layers:
            raise ValueError(
                f"roles {self.name} say nothing of layer {layer}: they are of layers {ranges(self.layers)}; name a "
                f'role for it, such as "{DENSE}"'
            )
        given = self.layers[layer]
        if isinstance(given, Role):
            return [Share(given.selector, None, given)]
        if len(given) != heads:
            raise ValueError(
                f"roles {self.name} name {len(given)} KV heads in layer {layer}, and it has {heads}: give one role for "
                f"each, or one for all"
            )
        where: dict[Role, list[int]] = {}
        for head, role in enumerate(given):
            where.setdefault(role, []).append(head)
        if len(where) == 1:
            return [Share(given[0].selector, None, given[0])]
        return [Share(role.selector, Heads(tuple(which), heads), role) for role, which in where.items()]

    def dense(self, layer: int) -> bool:
        """Whether all heads of a layer that is there are dense."""
        given = self.layers[layer]
        return all(role.method == DENSE for role in ([given] if isinstance(given, Role) else given))

    def distinct(self) -> list[Role]:
        """Every role once."""
        each = ([given] if isinstance(given, Role) else given for given in self.layers.values())
        return list(dict.fromkeys(itertools.chain.from_iterable(each)))

    def check_budget(self, given: Budget, context: int) -> None:
        """ValueError where a role without a budget of its own has no use for the one that is asked for."""
        for role in self.distinct():
            share = Share(role.selector, None, role)
            if not share.own:
                budget_of(role.selector, given, context)

    # -- what comparisons ask of a method --------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether any of its methods learns from queries."""
        return any(role.selector.learns for role in self.distinct())

    @property
    def host(self) -> bool:
        """Whether any of its selectors works in host memory only."""
        return any(role.selector.host for role in self.distinct())

    @property
    def uses_budget(self) -> bool:
        """Whether any role reads by the budget that is asked for."""
        return any(role.selector.uses_budget and not Share(role.selector, None, role).own for role in self.distinct())

    @property
    def unit(self) -> int:
        """The largest of its selectors'."""
        return max(role.selector.unit for role in self.distinct())

    def count_in(self, width: int) -> None:
        """Count an element of a key as `width` bytes, see `LayerContext.key_bytes`."""
        for role in self.distinct():
            role.selector.count_in(width)

    def label(self) -> str:
        """Its name in tables."""
        return f"roles {self.name}"

    def source(self) -> str:
        """Return what results depend on: a hash of the roles, and the sources of their selectors."""
        text = json.dumps(self.record()["layers"], sort_keys=True)
        sources = sorted({role.selector.source() for role in self.distinct()})
        digest = hashlib.sha256("\n".join([text, *sources]).encode()).hexdigest()[:16]
        return f"{self.KIND} {digest}"

    def __repr__(self) -> str:
        """With every role, neighbours that are alike together."""
        said = []
        alike = itertools.groupby(self.layers, lambda index: self.layers[index])
        for given, indices in alike:
            if isinstance(given, Role):
                what = str(given)
            else:
                runs = ((role, len(list(heads))) for role, heads in itertools.groupby(given))
                what = f"[{', '.join(f'{role} x{count}' if count > 1 else str(role) for role, count in runs)}]"
            said.append(f"{ranges(indices)}: {what}")
        return f"{type(self).__name__}({self.name}; {'; '.join(said)})"

    # -- the file ------------------------------------------------------------------------------------------------------

    def records(self) -> dict[str, Any]:
        """Return the roles of each layer, as in a file."""
        return {
            str(index): given.record() if isinstance(given, Role) else [role.record() for role in given]
            for index, given in self.layers.items()
        }

    def record(self) -> dict[str, Any]:
        """Return what `save` writes."""
        out = {"format": FORMAT, "version": VERSION, "name": self.name, "layers": self.records()}
        return {**out, "meta": self.meta} if self.meta else out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; ValueError where it would hold a number that JSON has not."""
        write_atomic(path, (json.dumps(self.record(), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls: type[Some], path: str | os.PathLike[str], trusted: Collection[str] = ()) -> Some:
        """Read a file.

        Args:
            path: the file.
            trusted: modules whose classes it may name as `module:Class`, such as `{"mine"}`, and those below them.
                Such a module is imported, which runs its code; no other is.

        Raises:
            ValueError: what is no such file; names the file and, of a role, layer and head. A module that is not
                trusted is refused before anything is imported.
            OSError: it cannot be read.
        """
        return cls._read(path, trusted)

    @classmethod
    def _read(cls: type[Some], path: str | os.PathLike[str], trusted: Collection[str], *more: Any) -> Some:
        known, path = trusted_modules(trusted), Path(path)
        try:
            return cls._of(parse(path.read_bytes()), path.stem, known, *more)
        except ValueError as error:
            raise ValueError(f"{path} is no file of {cls.KIND} that can be used: {error}") from None

    @classmethod
    def check_format(cls, record: Any) -> None:
        """ValueError for what is no object of this format and version, or holds other keys."""
        if not isinstance(record, dict) or record.get("format") != cls.FORMAT:
            raise ValueError(f'it is a JSON object with "format": "{cls.FORMAT}"')
        if record.get("version") != cls.VERSION:
            raise ValueError(f"its version is {reprlib.repr(record.get('version'))}, this release reads {cls.VERSION}")
        if strange := [key for key in record if key not in cls.KEYS]:
            more = cls.KEYS[-1]
            raise ValueError(
                f"it holds {', '.join(cls.KEYS)}, and anything else in {more}; got {reprlib.repr(strange[0])}"
            )

    @classmethod
    def _of(cls: type[Some], record: Any, name: str, trusted: Collection[str]) -> Some:
        cls.check_format(record)
        layers, meta = record.get("layers"), record.get("meta", {})
        if not isinstance(layers, dict) or not isinstance(meta, dict):
            raise ValueError("layers and meta are objects")
        check_layers(layers, trusted)
        return cls(numbered(layers), record.get("name", name), meta)


def numbered(layers: Any) -> dict[int, Any]:
    """Return the layers of a file by number; ValueError for other keys."""
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f"layers are an object of one layer or more, got {reprlib.repr(layers)}")
    for key in layers:
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key):
            raise ValueError(f'the keys of layers are numbers of layers, such as "0", got {reprlib.repr(key)}')
    return {int(key): given for key, given in layers.items()}


def check_layers(layers: Mapping[str, Any], trusted: Collection[str]) -> None:
    """ValueError, naming layer and KV head, where the layers of a file name a module that is not `trusted`."""
    for layer, given in layers.items():
        for head, role in enumerate(given if isinstance(given, list) else [given]):
            method = role.get("method") if isinstance(role, dict) else role
            try:
                check_trusted(method if isinstance(method, str) else "", trusted)
            except ValueError as error:
                where = f"layer {layer}" + (f", KV head {head}" if isinstance(given, list) else "")
                raise ValueError(f"{where}: {error}") from None


Method: TypeAlias = "Selector | Roles"


def as_method(given: Selector | Roles | str) -> Method:
    """`given`, or the selector that it names; ValueError for anything else."""
    return given if isinstance(given, Roles) else as_selector(given)


def shares_of(method: Method, layer: int, heads: int) -> list[Share]:
    """Who serves which of a layer's KV heads: one selector all of them, roles as they say.

    Raises:
        ValueError: roles that do not fit the layer.
    """
    return method.shares(layer, heads) if isinstance(method, Roles) else [Share(method)]


# -- helpers -----------------------------------------------------------------------------------------------------------


def _roles(given: Any, where: str, known: dict[tuple[str, str], Role]) -> Role | tuple[Role, ...]:
    """Return the roles of a layer, from a file or from a caller; ValueError naming layer and head."""
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError(f"{where}: a list has a role for each KV head, got none")
        return tuple(_role(role, f"{where}, KV head {head}", known) for head, role in enumerate(given))
    return _role(given, where, known)


def _role(given: Any, where: str, known: dict[tuple[str, str], Role]) -> Role:
    method, budget = given, None
    if isinstance(given, Role):
        method, budget = given.method, given.budget
    elif isinstance(given, dict):
        if "method" not in given or not set(given) <= {"method", "budget"} or given.get("budget", 0) is None:
            raise ValueError(f'{where}: a role is {{"method": ..., "budget": ...}}, got {reprlib.repr(given)}')
        method, budget = given["method"], given.get("budget")
    key = (repr(method), repr(budget))
    if key not in known:
        try:
            known[key] = Role(method, budget)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return known[key]


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers in few words: `[0, 1, 2, 5]` as "0-2,5"."""
    runs: list[list[int]] = []  # first and last
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
