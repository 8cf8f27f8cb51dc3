"""The section of `bench.jsonl`: what methods lose against what they read, by trace, and by layer and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparseattn.budget import Budget, budget_label
from sparseattn.cli import report
from sparseattn.cli.page.folders import Record
from sparseattn.cli.page.views import Heat, Lines, Measure, Section, Table, View

FILE = "bench.jsonl"

QUALITY = (
    Measure("relative_error", "error of the output", "share", log=True, better="low", rule=report.TOLERANCE),
    Measure("recovered", "share recovered of the far attention", "share", better="high"),
    Measure("mass", "share of all attention held", "share", better="high"),
    Measure("recall@10", "recall of the 10 best rows", "share", better="high"),
    Measure("recall@100", "recall of the 100 best rows", "share", better="high"),
)
COST = (
    Measure("bytes_share", "bytes read, of the cache's", "share", log=True),
    Measure("attended", "rows attended per query head", "count", log=True),
    Measure("scanned_share", "rows scored to choose, of the context", "share", log=True),
)
HEADS = (
    Measure("relative_error", "error of the output", "share", better="low"),
    Measure("recovered", "share recovered of the far attention", "share", better="high", top=1.0),
    Measure("mass", "share of all attention held", "share", better="high", top=1.0),
)


@dataclass(frozen=True)
class Recorded:
    """A line of the file, as what `report` speaks of."""

    record: Record

    @property
    def trace(self) -> str:
        return str(self.record["trace"])

    @property
    def label(self) -> str:
        return str(self.record["label"])

    @property
    def budget(self) -> Budget:
        budget: Budget = self.record["budget"]
        return budget

    def mean(self, measure: str) -> float:
        return _number(self.record["mean"].get(measure))

    def worst(self, measure: str) -> float:
        return _number(self.record["worst"].get(measure))


def section(records: Sequence[Record]) -> Section:
    """Frontiers, maps of heads where the records hold heads (`--per-head`), and the table."""
    measured = [Recorded(one) for one in records]
    lead = report.finding(measured)
    said = [] if lead is None else [lead.removeprefix(report.IN_SHORT)]  # the page's own words
    said.append(report.verdict(measured))
    views: list[View] = [_frontier(records)]
    if any("heads" in one for one in records):
        views.append(_heads(records))
    views.append(_table(records))
    methods = dict.fromkeys(one.label for one in measured)
    return Section("frontier", "What methods lose, and what they read", said, views, tuple(methods))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _frontier(records: Sequence[Record]) -> Lines:
    one = records[0]
    points = [
        {
            "method": record["label"],
            "facet": record["trace"],
            "at": f"budget {budget_label(record['budget'])}",
            "values": {measure.key: record["mean"].get(measure.key) for measure in (*QUALITY, *COST)},
        }
        for record in records
    ]
    note = (
        f"A point a budget, the mean over layers and heads of the last {one['last']} tokens. Sink {one['sink']} and "
        f"window {one['window']} are read by every method, and counted. The thin line is an error of "
        f"{report.TOLERANCE:.0%}."
    )
    return Lines("Quality against cost", "trace", COST, QUALITY, points, note)


def _heads(records: Sequence[Record]) -> Heat:
    held = [one for one in records if "heads" in one]
    measures = [measure for measure in HEADS if all(measure.key in one["heads"] for one in held)]
    panels: list[dict[str, Any]] = [
        {
            "method": one["label"],
            "choice": {"trace": one["trace"], "budget": budget_label(one["budget"])},
            "columns": list(range(len(one["heads"][measures[0].key][0]))),
            "rows": one["layers"],
            "values": {measure.key: one["heads"][measure.key] for measure in measures},
        }
        for one in held
    ]
    note = "A row a layer, a column a query head, all methods on one scale of colours."
    return Heat("Where each method fails", "query head", "layer", ("trace", "budget"), measures, panels, note=note)


def _table(records: Sequence[Record]) -> Table:
    columns = [
        Measure("trace", "trace", "text"),
        Measure("label", "method", "text"),
        Measure("budget", "budget", "text"),
        Measure("attended", "rows", "count"),
        Measure("bytes_share", "bytes", "share"),
        Measure("relative_error", "error", "share"),
        Measure("worst", "worst head", "share"),
        Measure("recovered", "recovered", "share"),
        Measure("mass", "mass", "share"),
        Measure("recall@10", "recall@10", "share"),
        Measure("scanned_share", "scored", "share"),
    ]
    rows = []
    for one in records:
        mean = one["mean"]
        cells = [one["trace"], one["label"], budget_label(one["budget"])]
        cells += [mean.get(name) for name in ("attended", "bytes_share", "relative_error")]
        cells += [one["worst"].get("relative_error")]
        cells += [mean.get(name) for name in ("recovered", "mass", "recall@10", "scanned_share")]
        rows.append(cells)
    return Table("Every measurement", columns, rows, method=1)
