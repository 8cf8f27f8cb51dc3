"""What the plug-in is told, by `--additional-config` or the environment, and what it refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparseattn.roles.plan import Plan
from sparseattn.roles.role import DENSE, WINDOW, Role
from sparseattn.selectors.abilities import Evicts, HasTail, Observes
from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.combined.tailed import Tailed
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.registry import make_selector
from sparseattn.selectors.tokens.querypq import QueryPQ
from sparseattn.serving.vllm import defaults
from sparseattn.serving.vllm.above import AUTO
from sparseattn.serving.vllm.block_codes import BlockCodes
from sparseattn.serving.vllm.block_tails import BlockTails
from sparseattn.serving.vllm.defaults import REFUSE, STOCK
from sparseattn.utils import json_text
from sparseattn.utils.json_fields import Either, Flag, Number, Object, Text
from sparseattn.utils.suggest import did_you_mean

KEY = "sparseattn"  # of vLLM's additional_config
PAGE = 16  # rows that are counted together by a method without pages
VARIABLE = "SPARSEATTN_VLLM"  # the same in the environment, as JSON
_ROWS = Number(0, whole=True)
FIELDS = Object(
    more={
        "selector": Text(),
        "budget": Number(1, whole=True),
        "sink": _ROWS,
        "window": Number(1, whole=True),
        "dense_layers": _ROWS,
        "above": Either((_ROWS, Text(among=(AUTO,))), f'is rows or "{AUTO}"'),
        "modules": Text(),
        "on_mismatch": Text(),
        "per_request": Flag(),
        "max_budget": Number(1, whole=True),
    }
)


@dataclass(frozen=True)
class Settings:
    """How decoding reads the cache of an engine.

    Args:
        selector: a text for `make_selector` that names a method whose index is by page, or "window".
        budget: rows that a KV head (or, with `group=each`, a query head) reads beyond sink and window; whole pages.
        sink: first rows, which every query reads, rounded up to whole entries of the index.
        window: last rows, likewise.
        dense_layers: first layers of full attention that stay dense.
        above: rows of a sequence up to which all its attention stays dense; in JSON "auto" stands for `measured`.
        layers: of a plan, instead of selector and budget: the number of every layer of full attention, as text ->
            "dense", "window", or {"method": ..., "budget": ...}. Methods may differ, their pages and entries not.
        modules: folder, as a whole path, in which an engine looks for the module of a `module:Class` too, behind all
            folders of Python's; "": in none. Settings are what a user says, so that classes they name are imported.
        on_mismatch: what an engine does that is not as sparseattn knows it: "refuse" to start, or serve as "stock".
        per_request: whether a request may ask for a budget of its own, or for dense decoding.
        max_budget: the largest budget that a request may ask for, which then may not ask for dense decoding; None: any.
        measured: whether the engine is to measure `above` at its start, see `break_even.py`.
    """

    selector: str = ""
    budget: int = 0
    sink: int = defaults.SINK
    window: int = defaults.WINDOW
    dense_layers: int = defaults.DENSE_LAYERS
    above: int = defaults.ABOVE
    layers: Mapping[str, Any] | None = None
    modules: str = ""
    on_mismatch: str = REFUSE
    per_request: bool = True
    max_budget: int | None = None
    measured: bool = False

    def __post_init__(self) -> None:
        """ValueError for a `max_budget` that lets no request ask for anything."""
        if self.max_budget is None:
            return
        if not self.per_request:
            raise ValueError(
                f'"{KEY}": max_budget {self.max_budget} limits what requests ask, and per_request false lets them ask '
                f"nothing: give one of them"
            )
        if self.max_budget < (page := self.shape[0]):
            raise ValueError(
                f'"{KEY}": max_budget is {page} rows or more, a page of {self.called}, got {self.max_budget}'
            )

    @classmethod
    def of_plan(cls, plan: Plan, above: int | str = above) -> Settings:
        """How an engine serves a plan.

        Raises:
            ValueError: see `parse`; heads of a layer that differ.
        """
        return parse({"layers": plan.records(), "sink": plan.sink, "window": plan.window, "above": above})

    def to_dict(self) -> dict[str, Any]:
        """Return what `parse` makes them of."""
        unused = ["layers"] if self.layers is None else ["selector", "budget", "dense_layers"]
        unused += ["modules"] * (not self.modules) + ["on_mismatch"] * (self.on_mismatch == REFUSE) + ["measured"]
        unused += ["per_request"] * self.per_request + ["max_budget"] * (self.max_budget is None)
        written = {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}
        return {**written, "above": AUTO} if self.measured else written

    def is_dense(self, layer: int) -> bool:
        """Whether a plan leaves a layer dense.

        Raises:
            ValueError: it says nothing of the layer.
        """
        return self.layers is not None and self._given(layer) == DENSE

    def _given(self, layer: int) -> Any:
        assert self.layers is not None
        if str(layer) not in self.layers:
            raise ValueError(f'"{KEY}": layers name every layer of full attention, and layer {layer} is missing')
        return self.layers[str(layer)]

    def make(self, layer: int = 0) -> PageSelector | Window:
        """Return the selector of a layer that is not dense, new.

        Raises:
            ValueError: see `parse`.
        """
        return servable(self._of(layer)[0])

    def pages(self, layer: int) -> int:
        """Return the rows that a selection head of a layer reads beyond sink and window."""
        text, budget = self._of(layer)
        made = servable(text)
        return budget // made.page if isinstance(made, PageSelector) else 0

    def _of(self, layer: int) -> tuple[str, int]:
        """Selector, as text, and budget of a layer."""
        if self.layers is None:
            return self.selector, self.budget
        given = self._given(layer)
        return (given, 0) if isinstance(given, str) else (given["method"], given["budget"])

    def each(self) -> list[PageSelector | Window]:
        """Return the selectors of all layers, each once."""
        if self.layers is None:
            return [servable(self.selector)]
        texts = (self._of(int(layer))[0] for layer in self.layers if not self.is_dense(int(layer)))
        return [servable(text) for text in dict.fromkeys(texts)]

    @property
    def called(self) -> str:
        """The method, in a few words."""
        return self.selector if self.layers is None else f"a plan of {len(self.layers)} layers"

    @property
    def label(self) -> str:
        """The method with its budget."""
        return f"{self.selector}, budget {self.budget}" if self.layers is None else self.called

    @functools.cached_property  # every step asks, and the methods of all layers are made to say it
    def shape(self) -> tuple[int, int]:
        """Rows of a page and of an entry of the index.

        Raises:
            ValueError: those of two methods differ.
        """
        sizes = {(made.page, made.unit): made for made in self.each() if isinstance(made, PageSelector)}
        if len(sizes) > 1:
            first, second, *_ = (f"{made.label()} has {page} and {unit}" for (page, unit), made in sizes.items())
            raise ValueError(
                f"in vLLM all layers of a plan have pages and entries of as many rows: {first}, {second}; entries of a "
                f"method with a tail have the tail's rows= at least"
            )
        return next(iter(sizes), (PAGE, PAGE))


def servable(text: str) -> PageSelector | Window:
    """Return a selector that an engine can serve; ValueError for any other."""
    made = make_selector(text)
    if isinstance(made, Window):
        return made
    method = made.inner if isinstance(made, Tailed) else made
    if isinstance(method, QueryPQ):
        method = BlockCodes(method)
        if why := method.why_not_shared():  # before what it would learn otherwise
            raise ValueError(f"{text!r} cannot be served: {why}")
    if not isinstance(method, PageSelector):
        raise ValueError(
            f"vLLM's cache is kept by page, and {text} has another kind of index: serve quest, lowbit, "
            f"querypq:artefact=FILE or a PageSelector of your own, each by itself or within tailed, or window"
        )
    made = BlockTails(made, method) if isinstance(made, Tailed) else method
    if made.learns or made.find(Evicts):
        what = "learns from a prompt's queries" if made.learns else "drops rows"
        raise ValueError(f"{text!r} {what}, and blocks that sequences share cannot follow that")
    if made.find(Observes) or made.find(HasTail):
        raise ValueError(
            f"{text!r} cannot be served: in vLLM a method neither learns from what its selections got nor has rows of "
            f"its own"
        )
    if why := made.why_not_shared():
        raise ValueError(f"{text!r} cannot be served: {why}")
    return made


def parse(given: Mapping[str, Any]) -> Settings:
    """Return the settings from a mapping, as JSON holds it.

    Raises:
        ValueError: an unknown name or one that is missing, a value of another kind or out of its range, an unknown
            selector or one whose index is not by page, a budget below a page.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f'"{KEY}" is a JSON object such as {{"selector": "quest", "budget": 2048}}, got {given!r}')
    known = [field.name for field in dataclasses.fields(Settings) if field.name != "measured"]
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f'"{KEY}" has no setting {name!r}{hint}; it takes {", ".join(known)}')
    planned = given.get("layers") is not None
    for name in ("selector", "budget", "dense_layers"):
        if planned and name in given:
            raise ValueError(f'"{KEY}": layers say what each layer does: give them or {name}')
        if not planned and name not in given and name != "dense_layers":
            raise ValueError(f'"{KEY}" needs {name!r}, such as {{"selector": "quest", "budget": 2048}}')
    FIELDS.check(given, f'"{KEY}"')
    if (how := given.get("on_mismatch", REFUSE)) not in (REFUSE, STOCK):
        raise ValueError(f'"{KEY}": on_mismatch is "{REFUSE}" or "{STOCK}", got {how!r}')
    if (folder := given.get("modules", "")) and not os.path.isabs(folder):
        raise ValueError(f'"{KEY}": modules is the whole path of a folder, got {folder!r}')
    if given.get("above") == AUTO:
        given = {**given, "above": 0, "measured": True}
    with _reaching(folder):
        if planned:
            settings = Settings(**{**given, "dense_layers": 0, "layers": _layers(given["layers"])})
            _ = settings.shape
        else:
            settings = Settings(**given)
            _check_budget(settings.selector, settings.budget)
    return settings


def _layers(given: Any) -> dict[str, Any]:
    """Return the layers of a plan, checked; ValueError naming the layer."""
    if not isinstance(given, Mapping) or not given:
        raise ValueError(f'"{KEY}": layers are an object of numbers of layers -> roles, got {given!r}')
    records: dict[str, Any] = {}
    for layer, role in given.items():
        where = f'"{KEY}", layer {layer}'
        if not (isinstance(layer, str) and layer.isdecimal()):
            raise ValueError(f'"{KEY}": the keys of layers are numbers, such as "0", got {layer!r}')
        if isinstance(role, (list, tuple)):
            raise ValueError(
                f"{where}: vLLM serves one method for all heads of a layer, and this one has {len(role)} roles: make a "
                f"plan with `sparseattn recommend --for vllm`"
            )
        method: Any = role
        budget = None
        if isinstance(role, Mapping):
            method, budget = role.get("method"), role.get("budget")
        try:
            layer_role = Role(method, budget)
            if layer_role.method not in (DENSE, WINDOW):
                if type(budget) is not int:
                    raise ValueError(f"in vLLM a budget is rows, got {budget!r} for {method}")
                _check_budget(layer_role.method, budget)
            elif budget is not None:
                raise ValueError("in vLLM a window has no budget: all layers have the window of the settings")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        records[layer] = layer_role.record()
    if all(role == DENSE for role in records.values()):
        raise ValueError(f'"{KEY}": every layer is dense, so that nothing would be sparse')
    return records


def _check_budget(text: str, budget: int) -> None:
    """ValueError for a selector that cannot be served, or a budget below its page."""
    made = servable(text)
    if isinstance(made, PageSelector) and budget < made.page:
        raise ValueError(
            f'"{KEY}": {text} reads whole pages of {made.page} rows, so the budget is at least that, got {budget}'
        )


def configured(additional: Mapping[str, Any] | None) -> Settings | None:
    """Return the settings of vLLM's `additional_config`, or else of the environment; None where there are none.

    Raises:
        ValueError: see `parse`; a variable that is not JSON.
    """
    if additional and KEY in additional:
        return parse(additional[KEY])
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        given = json_text.parse(text)
    except ValueError as error:
        raise ValueError(f"the environment's {VARIABLE} is no JSON ({error}): {text!r}") from error
    return parse(given)


@contextlib.contextmanager
def _reaching(folder: str) -> Iterator[None]:
    """Let modules of the folder be imported within the block, those that are nowhere else; "" is none.

    Within the block alone: libraries look for optional packages as they run, and would find and run what is called so.
    """
    if not folder or folder in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
