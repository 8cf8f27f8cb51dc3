"""The tables of `recall` and its closing lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparseattn.evaluation.measure_table import measure
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.reporting.table import Column, Table

LEVEL = 0.95  # the recall to reach
LEVELS = (0.90, LEVEL)
SHARES = (0.03, 0.10)


@dataclass(frozen=True, eq=False)
class Recalled:
    """What `recall` measured of one source of queries.

    Args:
        title: the source.
        curves: label of a selector -> its curve, for the source's queries.
        control: the same, for held-out keys in place of queries.
    """

    title: str
    curves: Mapping[str, Curve]
    control: Mapping[str, Curve]


def table(title: str, curves: Mapping[str, Curve]) -> Table:
    """Return a table with a row a selector: what recall takes, and what a share of the keys gives."""
    first = next(iter(curves.values()))
    k, points = first.settings["k"], [point for curve in curves.values() for point in curve.points]
    heads = points[0].heads["recall"].numel()
    among = f", mean over {heads} heads (worst head)" if heads > 1 else ""
    out = Table(
        f"{title}: recall@{k}, {first.settings['queries']} queries{among}",
        [
            Column.text("selector"),
            *(Column(f"scan % for {level:.2f}") for level in LEVELS),
            *(Column(f"R at {share:.0%}") for share in SHARES),
            Column.of("select_ms", f"ms at {LEVEL}"),
            *map(Column.of, ("build_seconds", "index_bytes_per_key")),
        ],
    )
    for label, curve in curves.items():
        out.add(
            label,
            *(_reached(curve, level) for level in LEVELS),
            *(_recall_within(curve, share, heads > 1) for share in SHARES),
            1000 * curve.seconds_at(LEVEL),
            curve.build_seconds,
            curve.index_bytes,
        )
    return out


def _reached(curve: Curve, level: float) -> str:
    """Return the share scanned where `level` is reached, in percent: at most the least setting's, or more."""
    share, points = curve.scanned_at(level), curve.points
    scanned = [point.mean("scanned_share") for point in points]
    if not math.isnan(share):
        return ("≤" if share == min(scanned) and curve.knob is not None else "") + _percent(share)
    return "never" if curve.knob is None else f">{_percent(scanned[-1])}"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "?"  # the selector does not say
    return f"{100 * share:.2g}" if share < 0.1 else f"{100 * share:.1f}"


def _recall_within(curve: Curve, share: float, worst: bool) -> str:
    recall = measure("recall")
    mean = curve.recall_at(share)
    if math.isnan(mean):
        return "-"  # no setting scans so little
    return recall(mean) + (f" ({recall(curve.recall_at(share, worst=True))})" if worst else "")


def verdict(column: Recalled) -> str:
    """Say what every selector scans to reach `LEVEL` for one source's queries."""
    parts = []
    for label, curve in column.curves.items():
        share, last = curve.scanned_at(LEVEL), curve.points[-1]
        if math.isnan(share):
            rest = f"{last.mean('recall'):.2f} at {_percent(last.mean('scanned_share'))}%"
            parts.append(f"{label} {'never' if curve.knob is None else 'more'} ({rest})")
        else:
            parts.append(f"{label} {_percent(share)}%")
    return f"{column.title}: of the keys, recall {LEVEL} takes {', '.join(parts)}."
