"""What one method did at one budget on one trace: measures by layer, head and token, and the record of them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.activity import Activity
from sparseattn.core.budget import Budget, budget_record
from sparseattn.evaluation import measure_table
from sparseattn.evaluation.step_measures import COUNTED


@dataclass(frozen=True)
class Evaluation:
    """What one selector did at one budget on one trace.

    Args:
        trace, selector, label, budget: what was measured; `selector` is its repr, `label` its short form.
        settings: sink, window, seal, last, tokens and the rest that a repetition needs.
        layers: model layers, in the order of the first dimension of `heads`.
        heads: measure -> `[layers,H*G]` float64, the mean over the decoded tokens for each query head (measures of a
            KV head are repeated for its group). See `MEASURES`.
        steps: measure -> `[layers,H*G,T]` float32, the same token by token, of the measures that `evaluate` was asked
            for so.
        activity: rows and bytes of the measured steps, by layer; None for heads that were put together elsewhere.
    """

    trace: str
    selector: str
    label: str
    budget: Budget
    settings: dict[str, Any]
    layers: tuple[int, ...]
    heads: dict[str, Tensor] = field(repr=False)
    steps: dict[str, Tensor] = field(default_factory=dict, repr=False)
    activity: Activity | None = field(default=None, repr=False)

    def mean(self, measure: str) -> float:
        """Return the mean over layers and heads that are not NaN; of `lookup_hits` over all lookups, whichever head's
        they are."""
        values = self.heads[measure]
        weight = self.heads[COUNTED[measure]] if measure in COUNTED else torch.ones_like(values)
        known = ~values.isnan()
        return float((values * weight)[known].sum() / weight[known].sum())

    def by_step(self, measure: str) -> Tensor:
        """Return `[layers,T]` float32: the mean over heads that are not NaN at every decoded token, of one of
        `steps`."""
        return self.steps[measure].nanmean(1)

    def worst(self, measure: str) -> float:
        """Return the head where the measure is worst, of those that are not NaN."""
        values = self.heads[measure]
        values = values[~values.isnan()]
        if not len(values):
            return math.nan
        return float(values.min() if measure_table.measure(measure).better == measure_table.HIGH else values.max())

    def far(self, share: float) -> Evaluation:
        """Return the same of the heads with at least this share of their attention on indexed rows; the others become
        NaN.

        `settings` then hold the share, `far`, and which heads these are, `far_heads`: [layer, query head] of each.

        Raises:
            ValueError: there is no such head.
        """
        chosen = self.heads["indexed_mass"] >= share
        if not chosen.any():
            most = float(self.heads["indexed_mass"].max())
            raise ValueError(
                f"no head of {self.trace} has {share:g} of its attention on indexed rows, the most is {most:.3f}"
            )
        heads = {name: values.masked_fill(~chosen, math.nan) for name, values in self.heads.items()}
        steps = {name: values.masked_fill(~chosen[..., None], math.nan) for name, values in self.steps.items()}
        heads_chosen = [[self.layers[i], head] for i, head in chosen.nonzero().tolist()]
        settings = {**self.settings, "far": share, "far_heads": heads_chosen}
        return replace(self, settings=settings, heads=heads, steps=steps)

    def record(self, per_head: bool | Collection[str] = False) -> dict[str, Any]:
        """Return a flat JSON-able record: settings, mean and worst head of each measure, what was measured by step as
        `[layers][T]`, and the heads apart of every measure, or of those named, if asked."""
        out: dict[str, Any] = {
            "trace": self.trace,
            "selector": self.selector,
            "label": self.label,
            "budget": budget_record(self.budget),
            **self.settings,
            "layers": list(self.layers),
            "mean": {name: json_number(self.mean(name)) for name in self.heads},
            "worst": {name: json_number(self.worst(name)) for name in self.heads},
        }
        if self.activity is not None:
            out["activity"] = self.activity.to_dict()
        if self.steps:
            out["steps"] = {
                name: [[json_number(value) for value in layer] for layer in self.by_step(name).tolist()]
                for name in self.steps
            }
        if per_head:
            out["heads"] = {
                name: [[json_number(value) for value in layer] for layer in values.tolist()]
                for name, values in self.heads.items()
                if per_head is True or name in per_head
            }
        return out


def json_number(value: float) -> float | None:
    """Return the number, or None where it is NaN or infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None
