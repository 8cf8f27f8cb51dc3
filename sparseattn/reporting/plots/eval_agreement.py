"""The picture of `eval` for agreement: divergence from full attention against what is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from sparseattn.evaluation import intervals
from sparseattn.evaluation.measure_table import Measure, measure
from sparseattn.evaluation.tasks.compared import FULL
from sparseattn.reporting import agreement_tables
from sparseattn.reporting.eval_records import Record, mean_of, method_of, rows_of, select
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots.panels import (
    COUNT,
    heading,
    interval,
    logarithmic,
    numbers,
    panel_grid,
    save,
    shown,
    unit,
)
from sparseattn.reporting.terminal import plain

Points: TypeAlias = "Mapping[str, Sequence[Sequence[Record]]]"  # method -> the records of each budget
Cost: TypeAlias = "tuple[Measure, Callable[[Sequence[Record]], float]]"


def agreement(records: Sequence[Record], path: Path) -> None:
    """Draw divergence from full attention against rows, and bytes if all say what they read: a row of panels for each
    text and length, a point a budget. Bars are intervals over windows; what does not diverge has no place on the axis.
    """
    panels = agreement_tables.panels(records)
    sparse = {place: [record for record in group if record["method"] != FULL] for place, group in panels.items()}
    every = [record for group in sparse.values() for record in group]
    methods = list(dict.fromkeys(map(method_of, every)))
    costs: list[Cost] = [(measure("rows"), lambda group: mean_of(group, "rows"))]
    if all(record.get("bytes_share") is not None for record in every):
        costs.append((measure("bytes_share"), agreement_tables.bytes_share))
    figure, axes = panel_grid(len(panels), len(costs), (2.8, 2.6), methods, sharex="col", sharey="row")
    for line, (place, group) in zip(axes, sparse.items(), strict=True):
        points = {method: [select(group, row) for row in rows_of(group) if row[0] == method] for method in methods}
        for axis, cost in zip(line, costs, strict=True):
            _against(axis, points, cost)
        line[0].set_ylabel(measure("kl").label)
        line[0].set_title(shown(agreement_tables.title(place, group)), fontsize=10, loc="left")
    for axis, (known, _) in zip(axes[-1], costs, strict=True):
        axis.set_xlabel(known.label)
    head = f"{records[0]['settings']['model']}: divergence of the next token's distribution from full attention's"
    barred = any(len(select(group, rows_of(group)[0])) > 1 for group in sparse.values() if group)
    heading(figure, shown(head) + ("\nbars: 95% intervals over windows, cut at the foot" if barred else ""))
    name_ends(figure, axes.flat)
    save(figure, path)


def _against(axis: Any, points: Points, cost: Cost) -> None:
    """Draw the divergence of one text against one cost, a line a method."""
    known, cost_of = cost
    means = [mean_of(group, "kl") for groups in points.values() for group in groups]
    floor = min((mean for mean in means if mean > 0), default=1.0) / 2
    for k, (method, groups) in enumerate(points.items()):
        look = style(k, plain(method))
        placed = sorted((cost_of(group), [record["kl"] for record in group]) for group in groups)
        placed = [(x, kl) for x, kl in placed if sum(kl) > 0]
        axis.plot([x for x, _ in placed], [sum(kl) / len(kl) for _, kl in placed], **look)
        for x, kl in placed:
            if (around := intervals.student(kl)) is not None:
                interval(axis, x, (max(around[0], floor), max(around[1], floor)), look["color"])
    logarithmic(axis, unit(known))
    if any(mean > 0 for mean in means):  # without a value, a logarithmic axis is an error
        axis.set_yscale("log")
        axis.set_ylim(bottom=floor)
    numbers(axis.yaxis, COUNT)
    axis.grid(alpha=0.3)
