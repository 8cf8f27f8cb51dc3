"""Families of methods: how near each comes to full attention's predictions, for what bytes, and how sure that is.

Functions take a record of agreement and its measurements, a row a window, and give the rows of one kind of table.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from scripts.evidence.expressions import mean
from scripts.evidence.labels import shown
from sparseattn.cli.values import EXACT
from sparseattn.codecs.registry import ROW_CODECS
from sparseattn.evaluation.intervals import student

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "dict[str, Any]"

FULL = "full"  # the method of full attention
LEAST = 1e-6  # errors below are rounding
CLOSE = (0.1, 0.03, 0.01)  # nats a token
RANKED_AT = 256  # rows at which methods are ranked
ROUNDED, CONTROLS = "rounded rows", "controls"
# Family -> names of its methods.
FAMILIES = {
    "exact keys (oracle)": "exact",
    "page scores": "quest unique mean quad clse ellipsoid infllm",
    "keys of few bits": "lowbit fier selfindex pq pqcache querypq twostage pariskv",
    "channels": "sparq doublesparsity loki rocketkv",
    "graphs": "retrieval",
    "buckets": "kmeans moments saap",
    "dropping rows": "h2o tova snapkv pyramidkv",
    "sampling": "magicpig vattention",
    "top-p": "topp",
    "estimated tails": "tailed retroinfer",
    "reuse": "freekv kascade",
    CONTROLS: "recent random window",
}


GROUPS = {name: group for group, names in FAMILIES.items() for name in names.split()}


def rounded(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With `codec` and `bits` of the rows of a label such as `quest, kivi:bits=8 rows`, and its `method`."""
    found = []
    for row in rows:
        label = str(row.get("label", row.get("method")))
        kept = re.fullmatch(r"(.*), (\S+) rows", label)
        codec = kept[2] if kept else EXACT
        bits = 16 if codec == EXACT else int(dict(ROW_CODECS.parsed(codec)[1]).get("bits") or 0)
        found.append({**row, "plain": kept[1] if kept else label, "codec": codec, "bits": bits})
    return found


def families(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With `family`, and `method` as people type it with the bits of its rows, in the order of the families."""
    found = [
        {
            **row,
            "family": GROUPS[row["plain"].partition(":")[0]] if row["bits"] == 16 else ROUNDED,
            "typed": shown(row["plain"]),
        }
        for row in rounded(record, rows)
        if row["method"] != FULL
    ]
    order = [*FAMILIES, ROUNDED]
    seen: dict[Any, set[Any]] = {}
    for row in found:
        row["method"] = row["typed"] + (f", {row['bits']} bits" if row["bits"] < 16 else "")
        seen.setdefault(row["method"], set()).add((row["text"], row["start"]))
    named = [{**row, "windows": len(seen[row["method"]])} for row in found]
    return sorted(named, key=lambda row: order.index(row["family"]))


def points(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a method and budget, with its family: mean divergence and bytes over windows."""
    windows: dict[Any, list[Row]] = {}
    for row in families(record, rows):
        windows.setdefault((row["family"], row["method"], row["budget"]), []).append(row)
    return [
        {"family": family, "method": method, "budget": budget}
        | {name: mean(row[name] for row in mine) for name in ("kl", "bytes_share")}
        for (family, method, budget), mine in windows.items()
    ]


def ranked(record: Record, rows: Sequence[Row]) -> list[Row]:
    """Those at `RANKED_AT` rows, the nearest method first, with the ranks that each method may have.

    `first` is one more than the methods that are nearer beyond chance, and `last` leaves out those that are farther
    beyond chance: where Student's 95 % interval of the difference of logarithms, paired by window, does not hold 0.
    Methods that were measured on fewer windows than others are left out.
    """
    windows: dict[str, dict[Any, Row]] = {}
    for row in families(record, rows):
        if row["budget"] in (RANKED_AT, None):
            windows.setdefault(row["method"], {})[row["text"], row["start"]] = row
    most = max(map(len, windows.values()))
    of = {name: mine for name, mine in windows.items() if len(mine) == most}
    logs = {name: {at: math.log(max(row["kl"], LEAST)) for at, row in mine.items()} for name, mine in of.items()}
    nearer = {
        name: {other for other in of if other != name and _certainly_nearer(logs[other], logs[name])} for name in of
    }
    found = []
    for name, mine in of.items():
        farther = sum(name in ahead for ahead in nearer.values())
        place = {"first": 1 + len(nearer[name]), "last": len(of) - farther, "at": RANKED_AT}
        found += [{**row, **place} for row in mine.values()]
    return sorted(found, key=lambda row: mean(logs[row["method"]].values()))


def _certainly_nearer(logs: Mapping[Any, float], others: Mapping[Any, float]) -> bool:
    """Whether the first divergences, by window, are the smaller ones by more than chance."""
    interval = student([logs[at] - others[at] for at in logs])
    return interval is not None and interval[1] < 0


def nearest(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a family and closeness in nats a token: the method that comes so near for the fewest bytes, if one does."""
    every = [point for point in points(record, rows) if point["family"] != CONTROLS]
    found = []
    for family, close in itertools.product(dict.fromkeys(point["family"] for point in every), CLOSE):
        near = [point for point in every if point["family"] == family and point["kl"] <= close]
        best = min(near, key=lambda point: point["bytes_share"], default={"family": family})
        found.append({"method": None, "budget": None, "bytes_share": None, **best, "close": close})
    return found
