"""The section of `inspect.jsonl`: which rows heads need, whatever the method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sparseattn.evaluation.attention_stats import MEASURES, PAGES, Inspection
from sparseattn.evaluation.measure_table import NEEDED
from sparseattn.reporting import inspect_tables
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.shared_fields import COUNT, HEADS, NAME, ORIGIN, distinct, models_of
from sparseattn.reporting.html.views import Heat, Section, Subject, axis
from sparseattn.utils.json_fields import FieldError, Object

FILE = "inspect.jsonl"

LEADING = ("needed", "top_share@256", "far_mass", "distance_ratio")  # shown first of what a file holds


IN_FINDINGS = (  # measures that the findings speak of
    *("distance_ratio", "far_mass", f"top_share@{NEEDED}", "overlap@1"),
    *(f"{name}@{PAGES[0]}" for name in ("hits", "best_share", "bound_share")),
)


def _rows_fit(record: Mapping[str, Any], name: str) -> None:
    """Raise FieldError unless there are rows beyond sink and window, and every measure has as many heads."""
    if record["sink"] + record["window"] >= record["tokens"]:
        raise FieldError(f"tokens is more than sink and window, got {record['tokens']}")
    count = _heads_of(record)
    for measure in MEASURES:
        if len(record["heads"].get(measure, ())) not in (0, count):
            raise FieldError(f"heads.{measure} is a list of {count} items, as heads.{IN_FINDINGS[0]} is")


def _heads_of(record: Mapping[str, Any]) -> int:
    return len(record["heads"][IN_FINDINGS[0]])


FIELDS = Object(
    {
        "trace": NAME,
        **dict.fromkeys(("layer", "sink", "window", "last", "tokens"), COUNT),
        "heads": Object(dict.fromkeys(IN_FINDINGS, HEADS), dict.fromkeys(MEASURES, HEADS)),
    },
    ORIGIN,
    _rows_fit,
)


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no record of `inspect`, or has other heads than its trace has `before`."""
    FIELDS.check(record)
    if any((other["trace"], other["layer"]) == (record["trace"], record["layer"]) for other in before):
        raise FieldError(f"the trace {record['trace']} has a line of layer {record['layer']} already")
    first = next((other for other in before if other["trace"] == record["trace"]), record)
    if _heads_of(first) != _heads_of(record):
        raise FieldError(f"heads are {_heads_of(first)}, as in the trace's first line, got {_heads_of(record)}")


def section(records: Sequence[Record]) -> Section:
    """Return a map of layers and heads for each trace."""
    names = [name for name in MEASURES if all(name in record["heads"] for record in records)]
    names.sort(key=lambda name: LEADING.index(name) if name in LEADING else len(LEADING))
    by_trace: dict[str, list[Record]] = {}
    for record in records:
        by_trace.setdefault(record["trace"], []).append(record)
    panels: list[dict[str, Any]] = [
        {
            "method": None,
            "choice": {"trace": trace},
            "columns": list(range(len(lines[0]["heads"][names[0]]))),
            "rows": [line["layer"] for line in lines],
            "values": {name: [line["heads"][name] for line in lines] for name in names},
        }
        for trace, lines in by_trace.items()
    ]
    record = records[0]
    note = (
        f"Rows are layers, columns are query heads; each cell is the mean over the last {record['last']} tokens. Far "
        f"tokens are all but the first {record['sink']} and the last {record['window']}."
    )
    measures = [axis(name, log=name == "needed") for name in names]
    view = Heat("Needs by layer and head", "query head", "layer", ("trace",), measures, panels, note=note)
    findings = [sentence for lines in by_trace.values() for sentence in _findings(lines)]
    about = Subject(models_of(records), distinct(records, "tokens"), list(by_trace))
    return Section("needs", "What each head needs", findings, [view], subject=about)


def _findings(lines: Sequence[Record]) -> list[str]:
    settings = {name: lines[0][name] for name in ("sink", "window", "last", "tokens")}
    heads = {
        record["layer"]: {
            name: torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
            for name, values in record["heads"].items()
        }
        for record in lines
    }
    return inspect_tables.findings(Inspection(lines[0]["trace"], settings, heads))
