"""Where methods fail: by layer, at equal rows and at equal bytes, and whether they fail at the same heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.budget import Budget, Mass, budget_record, budget_rows
from sparseattn.evaluation.rank_correlation import rank_correlation
from sparseattn.evaluation.result import Evaluation, json_number

JUDGED = ("recovered", "relative_error")  # what methods are compared by
MISSED = 0.5  # a head of whose weight on indexed rows a method recovers less is missed
NEAR = 0.05  # as many rows: what a method attends more than asked for at its least budget, such as rows that wait
SCANS_ALL = 0.5  # a method that scores a larger share of the rows to choose scores every key: an oracle, no rival


class NothingToCompare(ValueError):
    """No method was measured under the condition, in one sentence."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One method as it is compared: measured at a budget, or mixed of two measured neighbours.

    A share `part` of the tokens decoded at the budget of `high`, the others at that of `low`, read in the mean the rows
    and bytes between theirs, and recover and err in the mean what lies between. So what a mixture says can be had; a
    single budget of the same rows or bytes does at least as well where the gain shrinks with the budget.

    Args:
        low, high: of one selector on one trace; the same where nothing is mixed.
        part: 0 to 1.
    """

    low: Evaluation
    high: Evaluation
    part: float = 0.0

    def heads(self, measure: str) -> Tensor:
        """`[layers,H*G]` float64, NaN for heads left out."""
        low, high = self.low.heads[measure], self.high.heads[measure]
        return low if self.low is self.high else low + self.part * (high - low)

    def layers(self, measure: str) -> Tensor:
        """`[layers]` float64, the mean over the heads of each layer; NaN for a layer without any."""
        return self.heads(measure).nanmean(1)

    def mean(self, measure: str) -> float:
        """Mean over layers and heads."""
        return float(self.heads(measure).nanmean())

    @property
    def scans_all(self) -> bool:
        """Whether it scores every key to choose."""
        return self.mean("scanned_share") > SCANS_ALL

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """The budget measured, or the two that are mixed."""
        return (self.low.budget,) if self.low is self.high else (self.low.budget, self.high.budget)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The methods of one trace under one condition.

    Args:
        equal: "rows" or "bytes".
        at: the budget that the rows are those of, or the share of the cache's bytes.
        readings: label of a method -> what it does there.
        left_out: label -> why it cannot be compared there, a clause with a verb.
        attended: rows in the softmax of a query head that are compared at, sink and window among them; None at equal
            bytes.
    """

    equal: str
    at: Budget
    readings: dict[str, Reading]
    left_out: dict[str, str] = field(default_factory=dict)
    attended: float | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the model."""
        return next(iter(self.readings.values())).low.layers

    @property
    def rivals(self) -> list[str]:
        """The labels of methods that do not score every key; of one that does not say what it scores too."""
        return [label for label, reading in self.readings.items() if not reading.scans_all]

    def count(self) -> int:
        """Heads compared, over all layers."""
        reading = next(iter(self.readings.values()))
        return int((~reading.heads("recovered").isnan()).sum())

    def correlation(self, measure: str = "recovered") -> Tensor:
        """`[M,M]` float64: Spearman's rank correlation of two methods' heads, all layers' together.

        NaN for a method that does the same at every head.
        """
        heads = torch.stack([reading.heads(measure).flatten() for reading in self.readings.values()])  # [M,heads]
        heads = heads[:, ~heads.isnan().any(0)]  # heads that were left out
        return rank_correlation(heads[:, None].expand(-1, len(heads), -1), heads.expand(len(heads), -1, -1))

    def missed(self) -> Tensor:
        """`[M,M]` int64: heads that both methods miss; on the diagonal, that a method misses."""
        missing = torch.stack(
            [(reading.heads("recovered") < MISSED).flatten() for reading in self.readings.values()]
        ).long()
        return missing @ missing.T

    def wins(self) -> dict[str, int]:
        """Rival -> heads at which none of the rivals recovers more; rivals that recover the same share a head."""
        if not self.rivals:
            return {}
        recovered = torch.stack([self.readings[label].heads("recovered") for label in self.rivals])  # [M,layers,H*G]
        return dict(zip(self.rivals, (recovered == recovered.amax(0)).sum((1, 2)).tolist(), strict=True))

    def winners(self) -> dict[int, str]:
        """Layer -> the rival that recovers most there, in the mean over its heads."""
        if not self.rivals:
            return {}
        recovered = torch.stack([self.readings[label].layers("recovered") for label in self.rivals])  # [M,layers]
        best = recovered.argmax(0).tolist()
        known = (~recovered[0].isnan()).tolist()
        return {layer: self.rivals[i] for layer, i, some in zip(self.layers, best, known, strict=True) if some}

    def record(self) -> dict[str, Any]:
        """Return a JSON-able record; matrices have a row and a column for each of `methods`."""
        first, both, wins = next(iter(self.readings.values())).low, self.missed(), self.wins()
        return {
            "trace": first.trace,
            "equal": self.equal,
            "at": budget_record(self.at),
            "attended": self.attended,
            **{key: value for key, value in first.settings.items() if key != "seal"},  # of a selector, where not asked
            "layers": list(self.layers),
            "heads": self.count(),
            "methods": [
                {
                    "label": label,
                    "selector": reading.low.selector,
                    "budgets": list(map(budget_record, reading.budgets)),
                    "part": reading.part,
                    "mean": {name: json_number(reading.mean(name)) for name in (*JUDGED, "bytes_share", "attended")},
                    **{name: [json_number(value) for value in reading.layers(name).tolist()] for name in JUDGED},
                    "scans_all": reading.scans_all,
                    "missed": int(both[i, i]),
                    "wins": wins.get(label),
                }
                for i, (label, reading) in enumerate(self.readings.items())
            ],
            "left_out": self.left_out,
            "missed_by_both": both.tolist(),
            "spearman": {
                name: [[json_number(value) for value in row] for row in self.correlation(name).tolist()]
                for name in JUDGED
            },
        }


def at_rows(results: Sequence[Evaluation], budget: Budget) -> Comparison:
    """Return the methods of one trace where a query head attends as many rows, in the mean over layers and heads.

    These are the rows of sink, window and budget together, `Comparison.attended`. A budget is what a method may read at
    most: some attend fewer rows at it, and some more, as rows wait for a whole span. So a method is mixed of the two
    measured budgets that attend fewer and more, as in `at_bytes`; one that always attends fewer is compared at its
    most, with its own rows. One that always attends more is left out, but for less than `NEAR` more.

    Args:
        results: of one trace.
        budget: among those measured.

    Raises:
        NothingToCompare: nothing was measured at this budget, or no method attends so few rows.
    """
    if all(result.budget != budget for result in results):
        raise NothingToCompare(f"nothing was measured at the budget {budget!r}")
    if isinstance(budget, Mass):
        raise NothingToCompare(f"rows to be equal at are those of a budget in rows, and {budget} takes what it needs")
    settings = results[0].settings
    every = settings.get("every", 1)
    # In the mean over the tokens measured.
    context = settings["tokens"] - settings["last"] + every * (settings["last"] // every + 1) / 2
    rows = min(settings["sink"] + settings["window"] + budget_rows(budget, int(context)), context)
    readings, left_out = {}, {}
    for label, mine in _by_label(results).items():
        points = sorted(((result.mean("attended"), result) for result in mine), key=lambda point: point[0])
        least, nearest = points[0]
        reading = Reading(nearest, nearest) if rows < least <= (1 + NEAR) * rows else _mixed(points, rows)
        if reading is None:
            left_out[label] = f"attends {least:.0f} rows at least"
        else:
            readings[label] = reading
    if not readings:
        raise NothingToCompare(f"no method attends {rows:.0f} rows or fewer: {_listed(left_out)}")
    return Comparison("rows", budget, readings, left_out, rows)


def at_bytes(results: Sequence[Evaluation], share: float) -> Comparison:
    """Return the methods of one trace where they read this share of the cache's bytes, in the mean over layers and
    heads.

    A method is mixed of the two measured budgets that read less and more. One whose every budget reads less is compared
    at the one that reads most, with its own bytes. One that reads more at every budget, or does not say what it reads,
    is left out. Nothing is extrapolated.

    Args:
        results: of one trace.
        share: of the bytes of the whole cache, such as 0.1.

    Raises:
        NothingToCompare: no method reads so little.
    """
    readings, left_out = {}, {}
    for label, mine in _by_label(results).items():
        points = [(result.mean("bytes_share"), result) for result in mine]
        if any(math.isnan(read) for read, _ in points):
            left_out[label] = "does not say what it reads"
            continue
        points.sort(key=lambda point: point[0])
        reading = _mixed(points, share)
        if reading is None:
            left_out[label] = f"reads {points[0][0]:.1%} at least"
        else:
            readings[label] = reading
    if not readings:
        raise NothingToCompare(
            f"no method was measured at {share:.1%} of the cache's bytes or less: {_listed(left_out)}"
        )
    return Comparison("bytes", share, readings, left_out)


def _mixed(points: Sequence[tuple[float, Evaluation]], wanted: float) -> Reading | None:
    """Return what takes as much as wanted, of rising (what it takes, measured); where all take less the most, else
    None."""
    below = [point for point in points if point[0] <= wanted]
    if not below:
        return None
    (least, low), above = below[-1], points[len(below) :]
    if least == wanted or not above:
        return Reading(low, low)
    most, high = above[0]
    return Reading(low, high, (wanted - least) / (most - least))


def _listed(left_out: dict[str, str]) -> str:
    return ", ".join(f"{label} {why}" for label, why in left_out.items())


def _by_label(results: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    grouped: dict[str, list[Evaluation]] = {}
    for result in results:
        grouped.setdefault(result.label, []).append(result)
    return grouped
