"""Views of `recall`: keys scanned for a recall, by index, and how that grows with the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from scripts.evidence.condensing import rows
from scripts.evidence.markdown import bullets, parts, significant, table, text, ticked
from scripts.evidence.views_traces import spec
from sparseattn.evaluation.recall_curve import Curve, Point

Record: TypeAlias = "Mapping[str, Any]"

LEVEL = 0.95  # of recall@k
ASKED, CONTROL = "queries to keys", "keys to keys"


def claim(*records: Record) -> str:
    """Whether an index of keys scans more for queries than for keys, and a graph that queries guided less than it."""
    lines = []
    for record in records:
        found = Swept(record)
        keys = found.keys[-1]
        needed = {
            (label, direction): found.curve(label, keys, direction).scanned_at(LEVEL)
            for label in ("IVF", "HNSW(metric='l2')", "RetrievalAttention")
            for direction in (ASKED, CONTROL)
        }
        ratio = needed["IVF", ASKED] / needed["IVF", CONTROL]
        better = needed["HNSW(metric='l2')", ASKED] / needed["RetrievalAttention", ASKED]
        less = needed["RetrievalAttention", ASKED] / needed["IVF", ASKED]
        lines.append(
            f"**`{found.name}`, {keys:,} keys**: IVF scans {ratio:.1f} times as many keys for queries as for held-out "
            f"keys. For queries RetrievalAttention's graph scans {less:.2f} of what IVF does, and HNSW with l2 "
            f"{better:.1f} times as many as the graph."
        )
    return bullets(*lines)


class Swept:
    """The curves of a record, by source, gap, number of keys, direction and index."""

    def __init__(self, record: Record) -> None:
        self.rows = rows(record)
        self.labels = list(dict.fromkeys(one["label"] for one in self.rows))
        self.keys = sorted({one["keys"] for one in self.rows})
        self.gaps = list(dict.fromkeys(one["gap"] for one in self.rows if one["direction"] == ASKED))
        self.name = self.rows[0]["source"]

    def curve(self, label: str, keys: int, direction: str, gap: float | None = None) -> Curve:
        """As `sparseattn.evaluation.recall_curve` has it, of means alone."""
        mine = [
            one
            for one in self.rows
            if (one["label"], one["keys"], one["direction"]) == (label, keys, direction)
            and (direction == CONTROL or one["gap"] == gap)
        ]
        if not mine:
            raise LookupError(f"the record has no {label} of {keys} keys, {direction}")
        measures = [name for name in ("recall", "scanned_share", "bytes_share") if f"mean.{name}" in mine[0]]
        points = tuple(
            Point(
                one["value"],
                one["selector"],
                {name: torch.tensor([_known(one[f"mean.{name}"])], dtype=torch.float64) for name in measures},
                one["select_ms"] / 1000,
            )
            for one in mine
        )
        one = mine[0]
        settings = {name: one[name] for name in ("k", "keys", "queries", "layers", "heads", "group", "size")}
        return Curve(one["selector"], one["knob"], settings, points, one["build_seconds"], one["index_bytes_per_key"])

    def needed(self, label: str, keys: int, direction: str, gap: float | None = None) -> str:
        """Keys scanned for `LEVEL`, as a share; "> most that was tried" where it was not reached."""
        curve = self.curve(label, keys, direction, gap)
        share = curve.scanned_at(LEVEL)
        if share == share:
            return f"{significant(100 * share)} %"
        most = max(point.mean("scanned_share") for point in curve.points)
        return f"> {significant(100 * most)} %"


def _known(value: float | None) -> float:
    return float("nan") if value is None else value


def on_trace(record: Record) -> str:
    """Keys scanned by index, for queries and for held-out keys, at every number of keys."""
    found = Swept(record)
    one = found.rows[0]
    words = text(
        f"`{found.name}`: {one['heads'] * one['group']} query heads of {one['heads']} KV heads, D {one['size']}, in "
        f"layers {', '.join(map(str, one['layers']))}; {one['queries']} queries. Keys scanned for recall@{one['k']} of "
        f"{LEVEL}:"
    )
    head = ["", *(f"{keys:,} keys" for keys in found.keys), f"keys to keys, {found.keys[-1]:,}"]
    lines = []
    for label in found.labels:
        cells = [found.needed(label, keys, ASKED) for keys in found.keys]
        lines.append([ticked(spec(label)), *cells, found.needed(label, found.keys[-1], CONTROL)])
    return parts(words, table(head, lines))


def growing(record: Record) -> str:
    """How many keys are scanned as keys grow: of the fewest and the most keys."""
    found = Swept(record)
    few, many = found.keys[0], found.keys[-1]
    said = []
    for label in found.labels:
        low, high = (found.curve(label, keys, ASKED).scanned_at(LEVEL) * keys for keys in (few, many))
        if low == low and high == high:
            said.append(f"{ticked(spec(label))} {significant(low)} and {significant(high)}")
    if not said:
        raise LookupError("no index reaches the recall at both ends")
    return text(
        f"From {few:,} to {many:,} keys, {many / few:.0f} times as many, the keys scanned are: {'; '.join(said)}."
    )


def synthetic(record: Record) -> str:
    """Keys scanned by index and gap."""
    found = Swept(record)
    keys = found.keys[-1]
    one = found.rows[0]
    words = text(
        f"{keys:,} keys of size {one['size']}, {one['queries']} queries; keys scanned for recall@{one['k']} of {LEVEL}:"
    )
    head = ["", *(f"gap {gap:g}" for gap in found.gaps), "keys to keys"]
    lines = [
        [
            ticked(spec(label)),
            *(found.needed(label, keys, ASKED, gap) for gap in found.gaps),
            found.needed(label, keys, CONTROL),
        ]
        for label in found.labels
    ]
    return parts(words, table(head, lines))
