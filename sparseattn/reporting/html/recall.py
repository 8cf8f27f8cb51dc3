"""The section of `recall.jsonl`: what indexes scan to find the best keys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sparseattn.evaluation.recall_curve import MEASURES, Curve, Point
from sparseattn.reporting import recall_tables
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.shared_fields import COUNT, NAME, ORIGIN, distinct, models_of
from sparseattn.reporting.html.views import Lines, Section, Subject, View, axis, column, cost, text
from sparseattn.reporting.table import Table
from sparseattn.utils.json_fields import Maybe, Number, Object, Text, Values

FILE = "recall.jsonl"

QUALITY = (axis("recall", rule=recall_tables.LEVEL),)
COST = (cost("scanned_share", label="keys scanned (%)"), cost("bytes_share"), cost("select_ms"))
ASKED, CONTROL = "queries to keys", "keys to keys"


MEANS = Values(Maybe(Number(0)))
FIELDS = Object(
    {
        "source": NAME,
        "label": NAME,
        "direction": NAME,
        "selector": Text(),
        "knob": Maybe(Text()),
        "gap": Maybe(Number()),
        "value": Maybe(Number()),
        "mean": MEANS,
        "worst": MEANS,
        **dict.fromkeys(("k", "keys", "queries"), COUNT),
        **dict.fromkeys(("select_ms", "build_seconds", "index_bytes_per_key"), Number(0)),
    },
    ORIGIN,
)


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no record of `recall`; `before` are those above it."""
    FIELDS.check(record)


def section(records: Sequence[Record]) -> Section:
    """Return recall against keys scanned for each source of queries, the control beside it, and a table."""
    points = [
        {
            "method": record["label"],
            "facet": _facet(record),
            "at": f"{record['knob']} {record['value']}" if record["knob"] else "no knob",
            "values": {**record["mean"], "select_ms": record["select_ms"]},
        }
        for record in records
    ]
    first = records[0]
    note = (
        f"One point per setting of the index. Recall is that of the {first['k']} best keys, the mean over heads and "
        f"{first['queries']} queries. “{CONTROL}” is the control: held-out keys take the place of queries."
    )
    lines = Lines("Recall against keys scanned", "queries", COST, QUALITY, points, note)
    methods = dict.fromkeys(record["label"] for record in records)
    views: list[View] = [lines, _table(records)]
    about = Subject(models_of(records), distinct(records, "keys"), distinct(records, "source"))
    return Section("recall", "Recall of the best keys", _findings(records), views, tuple(methods), about)


def _facet(record: Record) -> str:
    gap = "" if record["gap"] is None else f", gap {record['gap']:g}"
    return f"{record['source']}{gap}, {record['keys']:,} keys: {record['direction']}"


def _findings(records: Sequence[Record]) -> list[str]:
    """Return the command's closing lines."""
    verdicts = []
    groups: dict[tuple[str, int, float | None], list[Record]] = {}
    for record in records:
        groups.setdefault((record["source"], record["keys"], record["gap"]), []).append(record)
    for (source, keys, gap), group in groups.items():
        of_queries = [record for record in group if record["direction"] == ASKED]
        if of_queries:
            title = f"{source}, {keys:,} keys" if gap is None else f"gap {gap:g}, {keys:,} keys"
            verdicts.append(recall_tables.verdict(recall_tables.Recalled(title, _curves(of_queries), {})))
    return verdicts


def _curves(records: Sequence[Record]) -> dict[str, Curve]:
    """Return label -> its curve, of means alone."""
    by_label: dict[str, list[Record]] = {}
    for record in records:
        by_label.setdefault(record["label"], []).append(record)
    return {label: _curve(group) for label, group in by_label.items()}


def _curve(group: Sequence[Record]) -> Curve:
    def number(value: float | None) -> float:
        return math.nan if value is None else value

    points = tuple(
        Point(
            record["value"],
            record["selector"],
            {name: torch.tensor([number(record["mean"].get(name))], dtype=torch.float64) for name in MEASURES},
            record["select_ms"] / 1000,
        )
        for record in group
    )
    first = group[0]
    settings = {name: first[name] for name in ("k", "keys", "queries")}
    return Curve(
        first["selector"], first["knob"], settings, points, first["build_seconds"], first["index_bytes_per_key"]
    )


def _table(records: Sequence[Record]) -> Table:
    columns = [
        *map(text, ("queries", "method", "knob")),
        column("recall"),
        column("recall", "worst head"),
        *map(column, ("scanned_share", "bytes_share", "select_ms", "build_seconds")),
    ]
    rows = [
        [
            *(_facet(record), record["label"], f"{record['knob']} {record['value']}" if record["knob"] else None),
            *(record["mean"].get("recall"), record["worst"].get("recall")),
            *(record["mean"].get("scanned_share"), record["mean"].get("bytes_share")),
            *(record["select_ms"], record["build_seconds"]),
        ]
        for record in records
    ]
    return Table("Every measurement", columns, rows, row_head=1)
