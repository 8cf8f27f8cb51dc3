"""Recall against keys scanned as a curve, and what is read off it: the central figure of RetrievalAttention
(https://arxiv.org/abs/2409.10516, Figures 3a and 6). `recall_sweep.py` measures them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparseattn.evaluation import measure_table

MEASURES = ("recall", "scanned_share", "bytes_share")


@dataclass(frozen=True, eq=False)
class Point:
    """What an index does at one value of its knob.

    Args:
        value: of the knob; None for a selector without one.
        selector: its repr there.
        heads: measure -> `[heads]` float64, the mean over the queries for each query head of each layer, in order:
            `recall` of the exact top k; `scanned_share`, keys or representatives scored over the keys; `bytes_share`,
            bytes read, to choose and to attend, over those of all keys and values (of a KV head, repeated for its
            group). NaN for what the selector does not report.
        seconds: wall time of one `select`, for one token and all heads of a layer: median over the queries, mean over
            layers.
    """

    value: int | None
    selector: str
    heads: dict[str, Tensor] = field(repr=False)
    seconds: float

    def mean(self, measure: str) -> float:
        """Mean over layers and heads."""
        return float(self.heads[measure].mean())

    def worst(self, measure: str) -> float:
        """Return the head where the measure is worst."""
        values = self.heads[measure]
        return float(values.min() if measure_table.measure(measure).better == measure_table.HIGH else values.max())


@dataclass(frozen=True, eq=False)
class Curve:
    """One index over a sweep of its knob.

    Args:
        selector: its repr as configured; `points` tell the knob's values.
        knob: its knob's name, or None.
        settings: k, keys, queries, layers, heads, group and size: N, Q, layers measured, H, G, D.
        points: by rising value of the knob.
        build_seconds: to build the index of a layer, mean over layers; code is compiled before.
        index_bytes: of the index beyond the cache's keys and values, per key and KV head.
    """

    selector: str
    knob: str | None
    settings: dict[str, Any]
    points: tuple[Point, ...]
    build_seconds: float
    index_bytes: float

    def scanned_at(self, recall: float) -> float:
        """Share of the keys to scan for a mean recall; NaN: not reached. See `crossing`."""
        return crossing(self._of("scanned_share"), self._of("recall"), recall)

    def seconds_at(self, recall: float) -> float:
        """Seconds per token there, interpolated as in `crossing`; NaN: not reached."""
        scanned, recalls = self._of("scanned_share"), self._of("recall")
        order = sorted(range(len(scanned)), key=scanned.__getitem__)
        seconds = [self.points[i].seconds for i in order]
        return _first([recalls[i] for i in order], seconds, recall)

    def recall_at(self, share: float, worst: bool = False) -> float:
        """Recall, mean or of the worst head, within a share of the keys scanned (mean over heads). See `within`."""
        recalls = [point.worst("recall") for point in self.points] if worst else self._of("recall")
        return within(self._of("scanned_share"), recalls, share)

    def _of(self, measure: str) -> list[float]:
        return [point.mean(measure) for point in self.points]

    def records(self) -> list[dict[str, Any]]:
        """Return a flat JSON-able record a point."""
        shared = {"build_seconds": self.build_seconds, "index_bytes_per_key": self.index_bytes}
        return [
            {
                "selector": point.selector,
                "knob": self.knob,
                "value": point.value,
                **self.settings,
                "mean": {name: _number(point.mean(name)) for name in MEASURES},
                "worst": {name: _number(point.worst(name)) for name in MEASURES},
                "select_ms": 1000 * point.seconds,
                **shared,
            }
            for point in self.points
        ]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def crossing(scanned: Sequence[float], recall: Sequence[float], level: float) -> float:
    """Return the share scanned at which recall first arrives at `level`, log-linear in the share between measured
    points.

    The first point's share where that arrives already (an upper bound), NaN where none does.
    """
    order = sorted(range(len(scanned)), key=scanned.__getitem__)
    return _first([recall[i] for i in order], [scanned[i] for i in order], level, logarithmic=True)


def _first(rising: Sequence[float], others: Sequence[float], level: float, logarithmic: bool = False) -> float:
    """`others` where `rising` first arrives at `level`."""
    for i, (here, other) in enumerate(zip(rising, others, strict=True)):
        if here >= level:
            if i == 0:
                return other
            before, part = others[i - 1], (level - rising[i - 1]) / (here - rising[i - 1])
            if logarithmic and before > 0:
                return before * (other / before) ** part
            return before + part * (other - before)
    return math.nan


def within(scanned: Sequence[float], recall: Sequence[float], share: float) -> float:
    """Recall within a share scanned, linear in the share's logarithm between measured points.

    The last point's recall beyond it, NaN below the first: no setting scans so little.
    """
    points = sorted(zip(scanned, recall, strict=True), key=lambda point: point[0])
    below = [point for point in points if point[0] <= share]
    if not below:
        return math.nan
    (low, here), beyond = below[-1], points[len(below) :]
    if not beyond or low <= 0:
        return here
    high, there = beyond[0]
    return here + (there - here) * math.log(share / low) / math.log(high / low)
