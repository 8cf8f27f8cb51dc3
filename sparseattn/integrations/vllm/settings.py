"""What the plug-in is told, by `--additional-config` or the environment, and what it refuses."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseattn.selectors import make_selector
from sparseattn.selectors.paged import PageSelector
from sparseattn.selectors.window import Window

KEY = "sparseattn"  # of vLLM's additional_config
PAGE = 16  # rows that are counted together by a method without pages
VARIABLE = "SPARSEATTN_VLLM"  # the same in the environment, as JSON


@dataclass(frozen=True)
class Settings:
    """How decoding reads the cache of an engine.

    Args:
        selector: a text for `make_selector` that names a method whose index is by page, or "window".
        budget: rows that a KV head (or, with `group=each`, a query head) reads beyond sink and window; whole pages.
        sink: first rows, which every query reads, rounded up to whole entries of the index.
        window: last rows, likewise.
        dense_layers: first layers of full attention that stay dense.
        above: rows of a sequence up to which all its attention stays dense.
    """

    selector: str
    budget: int
    sink: int = 4
    window: int = 64
    dense_layers: int = 2
    above: int = 4096

    def make(self) -> PageSelector | Window:
        """The selector, new.

        Raises:
            ValueError: see `parse`.
        """
        made = make_selector(self.selector)
        if isinstance(made, Window):
            return made
        if not isinstance(made, PageSelector):
            raise ValueError(
                f"vLLM's cache is kept by page, and {type(made).__name__} ({self.selector!r}) has another kind of "
                f"index: serve quest, lowbit:page=16, window, or a PageSelector of your own"
            )
        if made.learns or made.evicts:
            what = "learns from a prompt's queries" if made.learns else "drops rows"
            raise ValueError(f"{self.selector!r} {what}, and blocks that sequences share cannot follow that")
        if made.observes or made.tails:
            raise ValueError(
                f"{self.selector!r} cannot be served: in vLLM a method neither learns from what its selections got nor "
                f"has rows of its own"
            )
        if why := made.why_not_shared():
            raise ValueError(f"{self.selector!r} cannot be served: {why}")
        return made

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows of a page and of an entry of the index, and pages that the budget allows beyond sink and window."""
        made = self.make()
        if isinstance(made, PageSelector):
            return made.page, made.unit, self.budget // made.page
        return PAGE, PAGE, 0


def parse(given: Mapping[str, Any]) -> Settings:
    """Settings from a mapping, as JSON holds it.

    Raises:
        ValueError: an unknown name or one that is missing, a value of another kind or out of its range, an unknown
            selector or one whose index is not by page, a budget below a page.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f'"{KEY}" is a JSON object such as {{"selector": "quest", "budget": 2048}}, got {given!r}')
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    for name in given:
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f'"{KEY}" has no setting {name!r}{hint}; it takes {", ".join(fields)}')
    for name, field in fields.items():
        if name not in given:
            if field.default is dataclasses.MISSING:
                raise ValueError(f'"{KEY}" needs {name!r}, such as {{"selector": "quest", "budget": 2048}}')
            continue
        value: Any = given[name]
        kind = str if name == "selector" else int
        if type(value) is not kind:
            raise ValueError(f'"{KEY}": {name} is {"a text" if kind is str else "a whole number"}, got {value!r}')
        least = 1 if name in ("budget", "window") else 0
        if isinstance(value, int) and value < least:
            raise ValueError(f'"{KEY}": {name} is {least} or more, got {value}')
    settings = Settings(**given)
    made = settings.make()
    if isinstance(made, PageSelector) and settings.budget < made.page:
        raise ValueError(
            f'"{KEY}": {settings.selector} reads whole pages of {made.page} rows, so the budget is at least that, got '
            f"{settings.budget}"
        )
    return settings


def configured(additional: Mapping[str, Any] | None) -> Settings | None:
    """The settings of vLLM's `additional_config`, or else of the environment; None where there are none.

    Raises:
        ValueError: see `parse`; a variable that is not JSON.
    """
    if additional and KEY in additional:
        return parse(additional[KEY])
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the environment's {VARIABLE} is no JSON ({error}): {text!r}") from error
    return parse(given)
