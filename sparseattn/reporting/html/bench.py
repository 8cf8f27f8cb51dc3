"""The section of `bench.jsonl`: what methods lose against what they read, by trace, and by layer and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseattn.core.budget import Budget, budget_label
from sparseattn.reporting import replay_tables
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.shared_fields import BUDGET, COUNT, MEANS, NAME, ORIGIN, distinct, models_of
from sparseattn.reporting.html.shared_fields import HEADS as NUMBERS
from sparseattn.reporting.html.views import Heat, Lines, Section, Subject, View, axis, column, cost, text
from sparseattn.reporting.table import Table
from sparseattn.utils.json_fields import FieldError, Items, Maybe, Object, Values

FILE = "bench.jsonl"

QUALITY = (
    axis("relative_error", log=True, rule=replay_tables.TOLERANCE),
    *(axis(key, top=None) for key in ("recovered", "mass", "recall@10", "recall@100")),
)
COST = tuple(map(cost, ("bytes_share", "attended", "scanned_share")))
HEADS = tuple(map(axis, ("relative_error", "recovered", "mass")))


def _heads_fit(record: Mapping[str, Any], name: str) -> None:
    """Raise FieldError unless maps of heads have a row a layer, and rows of one length."""
    maps, count = record.get("heads", {}), len(record["layers"])
    widths = {len(row) for rows in maps.values() for row in rows}
    for measure, rows in maps.items():
        if len(rows) != count or len(widths) != 1:
            raise FieldError(f"heads.{measure} is a list for each of {count} layers, all of one length")


FIELDS = Object(
    {
        "trace": NAME,
        "label": NAME,
        "budget": BUDGET,
        "mean": MEANS,
        "worst": MEANS,
        "sink": COUNT,
        "window": COUNT,
        "last": COUNT,
        "layers": Items(COUNT, 1),
    },
    {"heads": Values(Items(NUMBERS)), "tokens": Maybe(COUNT), **ORIGIN},
    _heads_fit,
)


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no record of `bench`; `before` are those above it."""
    FIELDS.check(record)


@dataclass(frozen=True)
class Recorded:
    """A line of the file, as closing lines read it."""

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
    """Return frontiers, maps of heads where the records hold heads (`--per-head`), and the table."""
    measured = [Recorded(record) for record in records]
    lead = replay_tables.finding(measured)
    findings = [] if lead is None else [lead.removeprefix(replay_tables.IN_SHORT)]  # the page's own words
    findings += [*replay_tables.own_methods(measured), replay_tables.verdict(measured)]
    views: list[View] = [_frontier(records)]
    if maps := _heads(records):
        views.append(maps)
    views.append(_table(records))
    methods = dict.fromkeys(reading.label for reading in measured)
    about = Subject(models_of(records), distinct(records, "tokens"), distinct(records, "trace"))
    return Section("frontier", "Quality and cost of each method", findings, views, tuple(methods), about)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _frontier(records: Sequence[Record]) -> Lines:
    first = records[0]
    points = [
        {
            "method": record["label"],
            "facet": record["trace"],
            "at": f"budget {budget_label(record['budget'])}",
            "values": {axis.key: record["mean"].get(axis.key) for axis in (*QUALITY, *COST)},
        }
        for record in records
    ]
    note = (
        f"One point per budget: the mean over layers and heads for the last {first['last']} tokens. Every method also "
        f"reads the first {first['sink']} and the last {first['window']} tokens, which are counted."
    )
    return Lines("Quality and cost", "trace", COST, QUALITY, points, note)


def _heads(records: Sequence[Record]) -> Heat | None:
    """Return maps of heads; None where no line holds heads, or none that is shown."""
    with_heads = [record for record in records if "heads" in record]
    measures = [measure for measure in HEADS if all(measure.key in record["heads"] for record in with_heads)]
    if not with_heads or not measures:
        return None
    panels: list[dict[str, Any]] = [
        {
            "method": record["label"],
            "choice": {"trace": record["trace"], "budget": budget_label(record["budget"])},
            "columns": list(range(len(record["heads"][measures[0].key][0]))),
            "rows": record["layers"],
            "values": {measure.key: record["heads"][measure.key] for measure in measures},
        }
        for record in with_heads
    ]
    note = "Rows are layers, columns are query heads. All maps share one colour scale."
    return Heat("Quality by layer and head", "query head", "layer", ("trace", "budget"), measures, panels, note=note)


def _table(records: Sequence[Record]) -> Table:
    keys = ("attended", "bytes_share", "relative_error")
    more = ("recovered", "mass", "recall@10", "scanned_share")
    columns = [
        *map(text, ("trace", "method", "budget")),
        *map(column, keys),
        column("relative_error", "worst head"),
        *map(column, more[:2]),
        column("recall@10", "recall@10"),
        column("scanned_share", "scored"),
    ]
    rows = [
        [
            *(record["trace"], record["label"], budget_label(record["budget"])),
            *map(record["mean"].get, keys),
            record["worst"].get("relative_error"),
            *map(record["mean"].get, more),
        ]
        for record in records
    ]
    return Table("Every measurement", columns, rows, row_head=1)
