"""The section of `inspect.jsonl`: which rows heads need, whatever the method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sparseattn.cli import inspect_report
from sparseattn.cli.page.folders import Record
from sparseattn.cli.page.views import Heat, Measure, Section
from sparseattn.inspection import MEASURES, Inspection

FILE = "inspect.jsonl"

SHARES = ("far_mass", "top_share", "overlap", "hits", "best_share", "bound_share")
LEADING = ("needed", "top_share@256", "far_mass", "distance_ratio")  # shown first of what a file holds


def section(records: Sequence[Record]) -> Section:
    """A map of layers and heads for each trace."""
    names = [name for name in MEASURES if all(name in one["heads"] for one in records)]
    names.sort(key=lambda name: LEADING.index(name) if name in LEADING else len(LEADING))
    by_trace: dict[str, list[Record]] = {}
    for one in records:
        by_trace.setdefault(one["trace"], []).append(one)
    panels: list[dict[str, Any]] = [
        {
            "method": None,
            "choice": {"trace": trace},
            "columns": list(range(len(mine[0]["heads"][names[0]]))),
            "rows": [one["layer"] for one in mine],
            "values": {name: [one["heads"][name] for one in mine] for name in names},
        }
        for trace, mine in by_trace.items()
    ]
    one = records[0]
    note = (
        f"A row a layer, a column a query head; the mean over the last {one['last']} tokens. Far rows are those beyond "
        f"a sink of {one['sink']} and a window of {one['window']}."
    )
    measures = [_measure(name) for name in names]
    view = Heat("What each head needs", "query head", "layer", ("trace",), measures, panels, note=note)
    said = [sentence for mine in by_trace.values() for sentence in _findings(mine)]
    return Section("needs", "Which rows heads need", said, [view])


def _measure(name: str) -> Measure:
    share = name.partition("@")[0] in SHARES
    form = "share" if share else "count" if name.startswith(("needed", "rows")) else "number"
    return Measure(name, MEASURES[name], form, log=name == "needed", top=1.0 if share else None)


def _findings(mine: Sequence[Record]) -> list[str]:
    settings = {name: mine[0][name] for name in ("sink", "window", "last", "tokens")}
    heads = {
        one["layer"]: {
            name: torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
            for name, values in one["heads"].items()
        }
        for one in mine
    }
    return inspect_report.findings(Inspection(mine[0]["trace"], settings, heads))
