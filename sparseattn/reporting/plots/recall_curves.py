"""The pictures of `recall`: recall against keys scanned, and what it takes as keys grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.evaluation.recall_curve import Curve
from sparseattn.reporting.line_style import name_ends, style
from sparseattn.reporting.plots.panels import (
    COUNT,
    SHARE,
    THOUSANDS,
    few_numbers,
    heading,
    logarithmic,
    numbers,
    panel_grid,
    save,
    shown,
)
from sparseattn.reporting.recall_tables import Recalled


def recall(columns: Sequence[Recalled], level: float, path: Path) -> None:
    """Draw recall against the share of keys scanned: a column a source, queries to keys above, keys to keys below."""
    labels = list(columns[0].curves)
    figure, axes = panel_grid(2, len(columns), (2.1, 2.5), labels, sharex=True, sharey=True)
    every = [curve for column in columns for curves in (column.curves, column.control) for curve in curves.values()]
    shares = [point.mean("scanned_share") for curve in every for point in curve.points]
    shares = [share for share in shares if share > 0]  # neither none nor unknown
    for j, column in enumerate(columns):
        axes[0][j].set_title(shown(column.title), fontsize=10)
        axes[1][j].set_xlabel("keys scanned / keys")
        for axis, curves in zip((axes[0][j], axes[1][j]), (column.curves, column.control), strict=True):
            for label, curve in curves.items():
                points = sorted((point.mean("scanned_share"), point.mean("recall")) for point in curve.points)
                axis.plot(*zip(*points, strict=True), **style(labels.index(label), label))
            axis.axhline(level, color="grey", linestyle="--", linewidth=1)
            axis.set_xlim(min(shares, default=0.01) / 1.3, max(shares, default=1.0) * 1.3)
            logarithmic(axis, SHARE)
            axis.tick_params(labelsize=8)
            axis.set_ylim(0, 1.03)
            axis.grid(alpha=0.3)
    k = columns[0].curves[labels[0]].settings["k"]
    for axis, direction in zip((axes[0][0], axes[1][0]), ("queries to keys", "keys to keys"), strict=True):
        axis.set_ylabel(f"{direction}\nrecall@{k}")
    shared = "; keys to keys knows no gap" if len({id(column.control) for column in columns}) < len(columns) else ""
    heading(figure, f"Recall against keys scanned: one point per setting of the index, mean over heads{shared}")
    name_ends(figure, axes.flat)
    save(figure, path)


def scaling(
    titles: Sequence[str], lines: Mapping[str, Sequence[Mapping[int, Curve]]], level: float, path: Path, source: str
) -> None:
    """Draw what it takes to reach `level` as the keys of `source` grow: keys scanned above, time below.

    Args:
        lines: label -> for each column (`titles`) the number of keys -> its curve.
    """
    figure, axes = panel_grid(2, len(titles), (2.6, 2.7), list(lines), sharex=True, sharey="row")
    for panels, (measure, unit) in zip(axes, ((Curve.scanned_at, SHARE), (_milliseconds_at, COUNT)), strict=True):
        reached = {
            label: [{n: measure(curve, level) for n, curve in sorted(column.items())} for column in columns]
            for label, columns in lines.items()
        }
        _growth(panels, reached, unit)
    for j, title in enumerate(titles):
        axes[0][j].set_title(shown(title), fontsize=10)
        axes[1][j].set_xlabel("keys (k = 1,024)")
    axes[0][0].set_ylabel("keys scanned / keys")
    axes[1][0].set_ylabel("ms per token and layer")
    what = f"{source}: to find {level:g} of the exact top rows; a point is missing where that was not reached"
    heading(figure, shown(what))
    name_ends(figure, axes.flat)
    save(figure, path)


def _growth(panels: Any, reached: Mapping[str, Sequence[Mapping[int, float]]], unit: Any) -> None:
    """Draw one measure against the number of keys, a panel a source and a line a label."""
    some = any(value > 0 for columns in reached.values() for column in columns for value in column.values())
    for j, axis in enumerate(panels):
        for k, (label, columns) in enumerate(reached.items()):
            axis.plot(list(columns[j]), list(columns[j].values()), **style(k, label))
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({n for columns in reached.values() for n in columns[j]}))
        numbers(axis.xaxis, THOUSANDS)
        axis.set_yscale("log" if some else "linear")  # without a value, a logarithmic axis is an error
        (few_numbers if some else numbers)(axis.yaxis, unit)
        axis.grid(alpha=0.3)


def _milliseconds_at(curve: Curve, level: float) -> float:
    return 1000 * curve.seconds_at(level)
