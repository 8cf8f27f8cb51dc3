"""Roles: which method each layer of a model uses, or each KV head of it, with which budget; a value, and a file.

The file, format version 1, is JSON:

    format    "sparseattn-roles"
    version   1
    name      what tables call it; without one, the file's name
    layers    object: number of a model's layer -> a role, for all its heads, or a list of roles, one for each KV head
    meta      object of anything, kept as it is: where the roles come from; may be missing

A role is "dense", "window" or a selector as `make_selector` reads it, or an object of such a `method` and a `budget` of
its own: rows, a share ("5%" or 0.05) or "all".

Helpers for two papers: `pyramid` (PyramidKV, https://arxiv.org/abs/2406.02069) and `duo` (DuoAttention,
https://arxiv.org/abs/2410.10819).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparseattn.core.budget import Budget, Rows, budget_of, budget_record, budget_rows, parse_budget
from sparseattn.core.context import Heads, LayerContext
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.recent import Recent
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.registry import as_selector, make_selector
from sparseattn.selectors.trust import check_trusted, trusted_modules
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_text import parse

FORMAT, VERSION = "sparseattn-roles", 1
DENSE, WINDOW = "dense", "window"
KEYS = ("format", "version", "name", "layers", "meta")
Some = TypeVar("Some", bound="Roles")


@dataclass(frozen=True, eq=False)
class Role:
    """What a head does.

    Args:
        method: "dense" reads every row, "window" sink and window alone; anything else is for `make_selector`.
        budget: rows beyond sink and window, as in `decode`, with the text "all" for no limit; None: the one that is
            asked for where the roles are used. With a budget, "window" reads so many rows more (`Recent`).

    Raises:
        ValueError: no such method, a budget that does not fit it, or one for a method that has no use for it.
    """

    method: str
    budget: Budget = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise ValueError(
                f'a role is "{DENSE}", "{WINDOW}" or a selector as text, such as "quest:page=16", got '
                f"{reprlib.repr(self.method)}"
            )
        selector = self.selector
        if self.budget is None:
            return
        if self.method == DENSE or not selector.uses_budget:
            raise ValueError(f"{self.method} has no use for a budget, got {reprlib.repr(self.budget)}")
        budget_of(selector, self.budget, 1)

    @functools.cached_property
    def selector(self) -> Selector:
        """Its configuration, which serves no cache: see `Share.fresh`."""
        if self.method == DENSE or (self.method == WINDOW and self.budget is not None):
            return Recent()
        return Window() if self.method == WINDOW else make_selector(self.method)

    @property
    def label(self) -> str:
        """For tables."""
        what = self.method if self.method in (DENSE, WINDOW) else self.selector.label()
        return what + self._at

    @property
    def _at(self) -> str:
        if self.budget is None:
            return ""
        return f" at {100 * self.budget:.6g}%" if isinstance(self.budget, float) else f" at {self.budget}"

    def record(self) -> str | dict[str, Any]:
        """As in a file."""
        return self.method if self.budget is None else {"method": self.method, "budget": budget_record(self.budget)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Role) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, str]:
        """With the budget's type in it: 1 is a row and 1.0 the whole context."""
        return self.method, repr(self.budget)

    def __str__(self) -> str:
        return self.method + self._at


Given: TypeAlias = "Role | str"


@dataclass(frozen=True, eq=False)
class Share:
    """The KV heads of a layer that have one method, and the method.

    Args:
        selector: its configuration.
        heads: which they are; None: all of the layer's.
        role: None where one selector serves a whole model.
    """

    selector: Selector
    heads: Heads | None = None
    role: Role | None = None

    @property
    def label(self) -> str:
        """Of the method, for tables."""
        return self.selector.label() if self.role is None else self.role.label

    @property
    def own(self) -> bool:
        """Whether it has a budget that holds whatever is asked for."""
        return self.role is not None and (self.role.method == DENSE or self.role.budget is not None)

    def budget(self, asked: Budget) -> Rows:
        """What it may read where the budget `asked` is for those that have none of their own."""
        if self.role is not None and self.role.method == DENSE:
            return None
        return parse_budget(asked if self.role is None or self.role.budget is None else self.role.budget)

    def fresh(self, layer: LayerContext) -> Selector:
        """Return a selector for its heads in a layer of a model, bound to what is known of it."""
        key_bytes = self.selector.layer_context.key_bytes if layer.key_bytes is None else layer.key_bytes
        return self.selector.for_layer(replace(layer, heads=self.heads, key_bytes=key_bytes))

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """Its heads of all a layer's in a dimension; a view where they are neighbours."""
        if self.heads is None:
            return x
        first, last = self.heads.which[0], self.heads.which[-1]
        if last - first + 1 == len(self.heads.which):
            return x.narrow(dim, first, last - first + 1)
        return x.index_select(dim, self._index(x.device))

    @functools.cached_property
    def _indices(self) -> dict[torch.device, Tensor]:
        return {}

    def _index(self, device: torch.device) -> Tensor:
        """The heads on a device, copied there once, so that no step waits for it."""
        if device not in self._indices:
            assert self.heads is not None
            self._indices[device] = torch.tensor(self.heads.which).to(device)
        return self._indices[device]


def together(shares: Sequence[Share], parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """What each share's heads gave, in the order of the layer's heads; the opposite of `Share.of`."""
    if len(shares) == 1:
        return parts[0]
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    out = parts[0].new_empty(shape)
    for share, part in zip(shares, parts, strict=True):
        out.index_copy_(dim, share._index(out.device), part)
    return out


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

    def check_budget(self, asked: Budget, context: int) -> None:
        """ValueError where a role without a budget of its own has no use for the one that is asked for."""
        for role in self.distinct():
            share = Share(role.selector, None, role)
            if not share.own:
                budget_of(role.selector, asked, context)

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
        """What results depend on: a hash of the roles, and the sources of their selectors."""
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
        """The roles of each layer, as in a file."""
        return {
            str(index): given.record() if isinstance(given, Role) else [role.record() for role in given]
            for index, given in self.layers.items()
        }

    def record(self) -> dict[str, Any]:
        """What `save` writes."""
        out = {"format": FORMAT, "version": VERSION, "name": self.name, "layers": self.records()}
        return {**out, "meta": self.meta} if self.meta else out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, whole or not at all."""
        write_atomic(path, (json.dumps(self.record(), indent=1) + "\n").encode())

    @classmethod
    def load(cls: type[Some], path: str | os.PathLike[str], trusted: Collection[str] = ()) -> Some:
        """Reads a file.

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
    """The layers of a file by number; ValueError for other keys."""
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


def pyramid(layers: int, budget: int | float, beta: float = 20, *, unit: int = 1) -> list[int] | list[float]:
    """PyramidKV's budgets (https://arxiv.org/abs/2406.02069): most in the first layer, falling linearly to the last.

    From 2B - B/beta to B/beta, so that their mean is B. Rows are rounded alike above and below the mean, which stays B
    exactly. In the paper B counts no window, as budgets here.

    Args:
        layers: how many.
        budget: B, their mean: rows (int) or a share of the context (float).
        beta: how steep, 1 (all alike) or more; 20 as by default in the authors' code.
        unit: rows are multiples of it, and so is B: the page of a method that reads whole pages.

    Returns:
        A budget for each layer, of `budget`'s type.

    Raises:
        ValueError: an argument out of its range, B that is no multiple of the unit, a last layer below one unit, or a
            first layer above the whole context.
    """
    if layers < 1 or unit < 1 or not (math.isfinite(beta) and beta >= 1):
        raise ValueError(f"layers and unit are 1 or more, and so is beta, got {layers}, {unit} and {beta}")
    budget_rows(budget, 1)
    steps = [1 - 2 * layer / (layers - 1) if layers > 1 else 0.0 for layer in range(layers)]  # 1 to -1
    most = budget - budget / beta  # above the mean
    if isinstance(budget, float):
        if budget + most > 1:
            raise ValueError(
                f"budgets of mean {budget:g} and beta {beta:g} begin at {budget + most:g} of the context: at most 1"
            )
        return [budget + most * step for step in steps]
    if budget % unit:
        raise ValueError(f"budgets in multiples of {unit} rows have a mean of such, got {budget}")
    rows = [budget + unit * int(math.copysign(math.floor(abs(most * step) / unit + 0.5), step)) for step in steps]
    if rows[-1] < unit:
        raise ValueError(
            f"budgets of mean {budget} and beta {beta:g} end at {budget / beta:g} rows, less than the {unit} that are "
            f"read at a time: give more rows or a smaller beta"
        )
    return rows


def duo(
    scores: Mapping[int, Sequence[float]] | Sequence[Sequence[float]] | Tensor,
    threshold: float,
    *,
    retrieval: Given = DENSE,
    streaming: Given = WINDOW,
    name: str = "duo",
) -> Roles:
    """DuoAttention's roles (https://arxiv.org/abs/2410.10819): retrieval heads read every row, streaming heads sink and
    window.

    Args:
        scores: of each KV head of each layer, `[L,H]` or by layer: the paper's gates, 0 to 1, which it optimises on
            passkey prompts, or anything else that tells how much a head looks back.
        threshold: a head of a larger score is a retrieval head.
        retrieval, streaming: their roles; the paper's by default. `Role("window", 192)` reads 192 rows more than the
            cache's window.
        name: what tables call it.

    Raises:
        ValueError: no scores of heads, or what `Roles` refuses.
    """
    if isinstance(scores, Tensor):
        scores = scores.tolist()
    each = dict(scores if isinstance(scores, Mapping) else enumerate(scores))
    for layer, heads in each.items():
        if not isinstance(heads, Sequence) or not heads or not all(_is_number(score) for score in heads):
            raise ValueError(
                f"scores are lists of numbers, one for each KV head of a layer, got {reprlib.repr(heads)} for layer "
                f"{layer}"
            )
    made = {layer: [retrieval if score > threshold else streaming for score in heads] for layer, heads in each.items()}
    return Roles(made, name, {"threshold": threshold})


def _is_number(score: object) -> bool:
    return isinstance(score, (int, float)) and math.isfinite(score)


def _roles(given: Any, where: str, known: dict[tuple[str, str], Role]) -> Role | tuple[Role, ...]:
    """The roles of a layer, from a file or from a caller; ValueError naming layer and head."""
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError(f"{where}: a list has a role for each KV head, got none")
        return tuple(_role(one, f"{where}, KV head {head}", known) for head, one in enumerate(given))
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


def rounded_label(label: str, bits: int | None) -> str:
    """A method's label where sealed rows are of `bits` bits."""
    return label if bits is None else f"{label}, {bits}-bit rows"


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers in few words: `[0, 1, 2, 5]` as "0-2,5"."""
    runs: list[list[int]] = []  # first and last
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in runs)
