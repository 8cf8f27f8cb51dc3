"""How a run of lm-eval decodes: the method, its budget, the zones that no method chooses in, and the tails."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sparseattn.core.budget import Budget, budget_label, parse_budget
from sparseattn.evaluation.harness.tails import Tails
from sparseattn.models.sparse_cache import BUDGET, SELECTOR, SINK, WINDOW, SparseCache
from sparseattn.roles.plan import Plan
from sparseattn.roles.roles import Roles
from sparseattn.selectors.registry import make_selector


@dataclass(frozen=True)
class SparseSettings:
    """How to decode.

    Args:
        selector: as text; None: quest, unless there are roles or a plan.
        budget: rows beyond sink and window, as text.
        sink, window: first and last rows, which every query reads.
        seal: as in `KVCache`; None: the selector's span.
        dense_layers: how many of the first layers stay dense.
        roles, plan: paths of files, instead of a selector.
        trust: modules whose classes these files may name.
        tail: how long the sparse end of a prompt is, as `Tails.parse` takes it.

    Raises:
        ValueError: no such method, budget or tail, or a file of roles and a plan.
    """

    selector: str | None = None
    budget: str | int | float = str(BUDGET)
    sink: int = SINK
    window: int = WINDOW
    seal: int | None = None
    dense_layers: int = 0
    roles: str | None = None
    plan: str | None = None
    trust: Sequence[str] = ()
    tail: str | int | None = None

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.selector, self.roles, self.plan)) > 1:
            raise ValueError("--selector, --roles and --plan each say what a layer reads: give one of them")
        if self.selector is not None:
            make_selector(self.selector)
        _ = self.rows, self.tails

    @property
    def rows(self) -> Budget:
        """The budget."""
        return parse_budget(str(self.budget))

    @property
    def own_rows(self) -> Budget:
        """The budget that all layers have; None where there is none, or where roles or a plan say another."""
        if self.roles is not None or self.plan is not None or not make_selector(self.selector or SELECTOR).uses_budget:
            return None
        return self.rows

    @property
    def tails(self) -> Tails:
        """How long tails are."""
        return Tails.parse(self.tail)

    def cache(self, model: Any) -> SparseCache:
        """Return an empty cache, with what it reads counted; it prepares the model.

        Raises:
            ValueError: settings that do not fit the model.
        """
        given: dict[str, Any] = {"selector": self.selector, "budget": self.rows}
        if self.roles is not None:
            given = {"roles": Roles.load(self.roles, self.trust), "budget": self.rows}
        if self.plan is not None:
            given = {"plan": Plan.load(self.plan, self.trust)}
            if given["plan"].uses_budget:
                given["budget"] = self.rows
        zones: dict[str, Any] = {"sink": self.sink, "window": self.window, "dense_layers": self.dense_layers}
        return SparseCache(model, **given, **zones, seal=self.seal, check=True)

    @property
    def label(self) -> str:
        """The method, as tables call it."""
        for path in (self.plan, self.roles):
            if path is not None:
                return os.path.basename(path)
        return make_selector(self.selector or SELECTOR).label()

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, as results have them."""
        return {
            "selector": self.label,
            "budget": budget_label(self.rows),
            "sink": self.sink,
            "window": self.window,
            "seal": self.seal,
            "dense_layers": self.dense_layers,
            "tail": str(self.tails),
        }

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as `--model_args` would name them."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(SparseSettings, name)}

    def digest(self, model: Any) -> str:
        """Return what tells runs apart whose answers may differ: of these settings, and of what says which model."""
        source = ""
        for path in (self.roles, self.plan):
            if path is not None:
                with open(path, "rb") as file:
                    source = hashlib.sha256(file.read()).hexdigest()
        if not source:
            source = make_selector(self.selector or SELECTOR).source()
        text = json.dumps([model, source, self.to_dict()], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
