"""Rows that are computed from a record: curves read off at equal cost, choices made anew, heads that look far.

Each of `FRAMES` takes a record and its measurements, and gives the rows of one kind of table.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from scripts.evidence.condensing import exploded
from scripts.evidence.expressions import known
from scripts.evidence.families import FULL, LEAST, families, nearest, ranked, rounded
from scripts.evidence.labels import shown
from sparseattn.evaluation.intervals import student
from sparseattn.evaluation.recall_curve import Curve, Point
from sparseattn.recommend.single import between
from sparseattn.reporting.eval_tables import ANSWERED
from sparseattn.selectors.registry import parsed

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "dict[str, Any]"

LEVEL = 0.95  # of recall@k
ASKED, CONTROL = "queries to keys", "keys to keys"
ROWS, BYTES = "mean.attended", "mean.bytes_share"
FAR = 0.3  # share of a query head's attention on indexed rows from which on it counts as looking far
INNER = {
    "freekv": "quest",
    "kascade": "exact:group=softmax",
}  # whose choices are read again where a label names none
ORDER = ("kmeans", "kmeans, no RoPE", "saap, no RoPE")  # SAAP's paper, rising: the first is of roped keys
PLAN = "plan "  # begins the label of one
DRAWS = 1000  # of windows, for an interval


def mean(values: Iterable[float | None]) -> float:
    """Of those that are known; NaN of none."""
    every = known(values)
    return sum(every) / len(every) if every else math.nan


# Comparisons at equal rows and at equal bytes, `bench --by-layer`


def comparisons(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a method and comparison: what is equal is `at_rows` or `at_bytes`, and `missed_with.LABEL` are the heads
    that another method misses, too."""
    found = []
    for one in record["by_layer"]:
        labels = [method["label"] for method in one["methods"]]
        for row, missed in zip(exploded(one, ("methods",)), one["missed_by_both"], strict=True):
            row["by_layer"], row["errors_by_layer"] = row.pop("recovered"), row.pop("relative_error")
            attended = row.pop("attended", None) or row["at"]
            row["at_rows"], row["at_bytes"] = (round(attended), None) if row["equal"] == "rows" else (None, row["at"])
            found.append(row | {f"missed_with.{label}": count for label, count in zip(labels, missed, strict=True)})
    return found


def layers(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a method, comparison and layer."""
    return [
        {**row, "layer": layer, "recovered": share}
        for row in comparisons(record, rows)
        for layer, share in zip(row["layers"], row["by_layer"], strict=True)
    ]


# Errors at equal cost


def ratio(rows: Sequence[Row], others: Sequence[Row], cost: str) -> float | None:
    """How many times the error of others rows have at equal cost: the geometric mean over the costs of both, errors in
    between on the line in logarithms; None where no cost is within what both were measured at."""
    points = ({row[cost]: max(row["mean.relative_error"], LEAST) for row in of} for of in (rows, others))
    curves = [np.log(sorted(errors.items())) for errors in points]
    costs = np.concatenate(curves)[:, 0]
    mine, theirs = (np.interp(costs, curve[:, 0], curve[:, 1], left=np.nan, right=np.nan) for curve in curves)
    shared = ~np.isnan(mine - theirs)
    return float(np.exp((mine - theirs)[shared].mean())) if shared.any() else None


def errors(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a pair of methods, with their `ratio` at equal rows and bytes, and a row a budget of both."""
    of = {
        label: [row for row in rows if row["label"] == label] for label in dict.fromkeys(row["label"] for row in rows)
    }
    found: list[Row] = []
    for (label, mine), (other, theirs) in itertools.permutations(of.items(), 2):
        pair = {"label": label, "other": shown(other)}
        equal = {name: ratio(mine, theirs, cost) for name, cost in (("at_rows", ROWS), ("at_bytes", BYTES))}
        found.append(pair | equal)
        for row, beside in itertools.product(mine, theirs):
            if row["budget"] == beside["budget"] and beside["mean.relative_error"]:
                share = row["mean.relative_error"] / beside["mean.relative_error"]
                found.append(pair | {"budget": row["budget"], "at_budget": share})
    return found


# Keys scanned, `recall`


def needed(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row an index, number of keys, direction and gap: the share of keys scanned for `LEVEL`, or the most tried."""
    curves: dict[Any, list[Row]] = {}
    for row in rows:
        curves.setdefault((row["label"], row["keys"], row["direction"], row["gap"]), []).append(row)
    found = []
    for mine in curves.values():
        share, most = curve(mine).scanned_at(LEVEL), max(row["mean.scanned_share"] for row in mine)
        reached = {"scanned": share, "most": None} if share == share else {"scanned": None, "most": most}
        found.append({**mine[0], **reached, "level": LEVEL, "asked": mine[0]["direction"].partition(" ")[0]})
    return found


def curve(rows: Sequence[Row]) -> Curve:
    """As `sparseattn.evaluation.recall_curve` has it, of means alone."""
    one = rows[0]
    names = [name for name in ("recall", "scanned_share", "bytes_share") if f"mean.{name}" in one]
    points = tuple(
        Point(
            row["value"],
            row["selector"],
            {name: torch.tensor([mean([row[f"mean.{name}"]])], dtype=torch.float64) for name in names},
            row["select_ms"] / 1000,
        )
        for row in rows
    )
    settings = {name: one[name] for name in ("k", "keys", "queries", "layers", "heads", "group", "size")}
    return Curve(one["selector"], one["knob"], settings, points, one["build_seconds"], one["index_bytes_per_key"])


# Methods by themselves


def by_step(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With the recall of the best ten rows at every token, the mean over layers, as mean, least and quarters."""
    found = []
    for row in rows:
        steps = [mean(at) for at in zip(*row["steps.recall@10"], strict=True)]
        line = known(steps)
        part = max(len(line) // 4, 1)
        quarters = {"first": mean(line[:part]), "last_quarter": mean(line[-part:])}
        found.append({**row, "mean": mean(line), "least": min(line), **quarters})
    return found


def reused(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With the `wrapper` that reads choices again, `of` which method, and `made`, the share of choices made anew: what
    was scanned of what that method scans, since a choice read again scans nothing."""
    scanned = {(row["label"], row["budget"]): row["mean.scanned"] for row in rows}
    found = []
    for row in rows:
        wrapper, inner = _wrapped(row["label"])
        made = row["mean.scanned"] / scanned[inner, row["budget"]] if scanned[inner, row["budget"]] else None
        found.append({**row, "wrapper": wrapper, "of": shown(inner), "made": made})
    return found


def _wrapped(label: str) -> tuple[str | None, str]:
    """The method that a label says to read choices again, and the label of the method within it; or it alone."""
    name, given = parsed(label)
    if name not in INNER:
        return None, label
    return name, (dict(given).get("inner") or INNER[name]).removeprefix("[").removesuffix("]")


def by_mass(record: Record, rows: Sequence[Row]) -> list[Row]:
    """Add `asked`, the share of the attention that the budget is, `method` without what was fitted to it, and the
    `gap` between what was promised and held."""
    return [
        {
            **row,
            "asked": float(row["budget"].removeprefix("mass:")),
            "method": re.sub(r"^sparseattn:Fitted:inner=\[?(.*?)\]?$", r"\1", shown(row["label"])),
            "gap": row["mean.promised"] - row["mean.mass"],
            "kept_promise": float(abs(row["mean.promised"] - row["mean.mass"]) <= 0.01),
        }
        for row in rows
    ]


def answered(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With `enough`, whether full attention answers so much of the task and length that others say something."""
    full: dict[Any, list[float]] = {}
    for row in rows:
        if row["method"] == FULL:
            full.setdefault((row["task"], row["length"]), []).append(row["score"])
    ordered = sorted(rows, key=lambda row: row["length"])
    return [{**row, "enough": mean(full[row["task"], row["length"]]) >= ANSWERED} for row in ordered]


def beside(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a method and budget that ran in vLLM, with its KL divergence over that of a `SparseCache`."""
    cached = {(row["selector"], row["budget"]): row["kl"] for row in rows if row["by"] == "SparseCache"}
    engine = [row for row in rows if row["by"] == "vLLM"]
    return [{**row, "kl_ratio": row["kl"] / cached[row["selector"], row["budget"]]} for row in engine]


def looseness(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a head."""
    names = ("offset", "deviation", "rank")
    return [
        {**row, **dict(zip(names, values, strict=True))}
        for row in rows
        for values in zip(*(row[name] for name in names), strict=True)
    ]


def limits(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a problem and method: the `kind` of keys, without layer and size, and its share of the true order's."""
    trace, found = "", []
    for row in rows:
        name, _, layer = row["keys"].partition(", layer ")
        if layer:  # "prose, layer 2", or "prose, layer 2, a million positions on"; what follows is made of its keys
            trace, kind = name, name + layer.lstrip("0123456789")
        else:
            kind = name.partition(", D = ")[0] if ", D = " in name else f"{trace}, {name}"
        drawn = row["size"] if ", D = " in name else None
        errors = {"rms": row["errors.2.rms.numba"], "of_bound": row["errors.2.of_bound.numba"], "drawn": drawn}
        found += [
            {
                "kind": kind,
                "order": row["order"],
                "budget": row["budget"],
                **errors,
                "method": at[8:-5],
                "share": value / row["order"],
            }
            for at, value in row.items()
            if re.fullmatch(r"methods\..*\.mean", at)
        ]
    return found


def kernels(record: Record, rows: Sequence[Row]) -> list[Row]:
    """With `of`, what a kernel was compiled for."""
    found = []
    for row in rows:
        named = ("D", "G", "span", "each", "kind", "rank", "bits", "bytes", "rows", "vote", "total", "best")
        more = {
            "per query head": row.get("per") == "query",
            "8-bit bounds": row.get("int8"),
            "in a shared store": row.get("table"),
            "8-bit levels": row.get("scales") == 8,
            "with a bias": row.get("bias"),
            "of listed rows": row.get("listed"),
            "as pages": row.get("pages"),
            "of parts": row.get("part"),
            f"{'pages' if row.get('bits') else 'blocks'} of {row.get('page')}": (row.get("page") or 0) > 1,
        }
        words = [f"{name}={row[name]}" for name in named if row.get(name) is not None]
        of = " ".join([row["dtype"], *words, *(phrase for phrase, holds in more.items() if holds)])
        found.append({**row, "of": of, "size": row.get("D") or 0})
    return sorted(found, key=lambda row: (row["kernel"], row["dtype"], row["size"], row["of"], row["arch"]))


# Plans


class Plans:
    """What each configuration did on every window: its divergence and its bytes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        found: dict[tuple[str, Any], dict[Any, tuple[float, float]]] = {}
        for row in rows:
            window = (row["text"], row["length"], row["start"])
            found.setdefault((row["method"], row["budget"]), {})[window] = row["kl"], row["bytes_share"]
        self.found = found
        self.windows = sorted(set.intersection(*(set(each) for each in found.values())))
        self.methods = list(dict.fromkeys(method for method, _ in found if not method.startswith(PLAN)))

    def of(self, label: str, budget: Any, windows: Sequence[Any]) -> tuple[float, float]:
        """Mean divergence and bytes over windows."""
        each = [self.found[label, budget][window] for window in windows]
        return sum(kl for kl, _ in each) / len(each), sum(share for _, share in each) / len(each)

    def single(self, kl: float, windows: Sequence[Any]) -> tuple[str, float] | None:
        """The method that has a divergence for the fewest bytes with one budget for all layers, and these bytes.

        See `single.between`; None where every method loses more at all its budgets.
        """
        best: tuple[str, float] | None = None
        for method in self.methods:
            budgets = [budget for label, budget in self.found if label == method]
            share = between((self.of(method, budget, windows) for budget in budgets), kl)
            if share is not None and (best is None or share < best[1]):
                best = method, share
        return best

    def ratio(self, plan: str, windows: Sequence[Any]) -> float | None:
        """A plan's bytes over those of the best single method at its divergence."""
        kl, share = self.of(plan, None, windows)
        other = self.single(kl, windows)
        return None if other is None else share / other[1]

    def interval(self, plan: str) -> tuple[float, float] | None:
        """Of the ratio, 95 %, by drawing windows anew."""
        draw = random.Random(0)
        drawn = (self.ratio(plan, draw.choices(self.windows, k=len(self.windows))) for _ in range(DRAWS))
        found = sorted(known(drawn))
        return (found[len(found) // 40], found[-1 - len(found) // 40]) if len(found) > DRAWS // 2 else None


def plans(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a plan, beside the best method and budget for all layers at its divergence."""
    own = [row for row in rows if row["method"] != FULL]
    every = Plans(own)
    texts, found = list(dict.fromkeys(f"`{row['text']}`" for row in own)), []
    for plan in dict.fromkeys(row["method"] for row in own if row["method"].startswith(PLAN)):
        mine = [row for row in own if row["method"] == plan]
        kl, share = every.of(plan, None, every.windows)
        around, single = student([row["kl"] for row in mine]), every.single(kl, every.windows)
        ratio, spread = every.ratio(plan, every.windows), every.interval(plan)
        row = {**{name: mine[0][name] for name in ("model", "length", "scored_tokens")}, "texts": texts}
        row |= {"plan": plan.removeprefix(PLAN), "windows": len(every.windows), "kl": kl, "bytes_share": share}
        row |= {"kl_low": max(around[0], 0) if around else None, "kl_high": around[1] if around else None}
        row |= {
            "same_top": mean(one["same_top"] for one in mine),
            "single": single and single[0],
            "its_bytes": single and single[1],
        }
        row |= {"saved": None if ratio is None else 1 - ratio}
        row |= {"saved_low": spread and 1 - spread[1], "saved_high": spread and 1 - spread[0]}
        found.append(row)
    return found


# What SmolLM2's artefact of SAAP finds


def heads(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a prompt, method, layer, query head and number of rows: what it recovered, where the head looks far."""
    found = []
    for prompt, one in record["prompts"].items():
        for method, (i, layer), which in itertools.product(one["methods"], enumerate(record["layers"]), (0, 1)):
            at = one["methods"][method][which]
            share = at["bytes_share"] if which == 0 else None
            for recovered, mass in zip(at["recovered"][i], one["indexed_mass"][i], strict=True):
                row = {"prompt": prompt, "method": method, "layer": layer, "rows": at["rows"], "few": which == 0}
                found.append(
                    {
                        **row,
                        "bytes_share": share,
                        "far": float(mass >= FAR),
                        "recovered": recovered if mass >= FAR else None,
                    }
                )
    return found


def groups(record: Record, rows: Sequence[Row]) -> list[Row]:
    """A row a prompt, layer, KV head with a query head that looks far, and number of rows: whether methods recover more
    than others."""
    rising = {
        "in_order": ORDER,
        "reversed": (ORDER[2], ORDER[0]),
        "saap_wins": ("kmeans", "saap"),
        "moments_win": ("saap", "moments"),
    }
    found = []
    for prompt, one in record["prompts"].items():
        for (i, layer), which in itertools.product(enumerate(record["layers"]), (0, 1)):
            mass, size = one["indexed_mass"][i], len(one["indexed_mass"][i]) // record["heads"]
            for first in range(0, len(mass), size):
                far = [head for head in range(first, first + size) if mass[head] >= FAR]
                by = {
                    method: sum(at[which]["recovered"][i][head] for head in far)
                    for method, at in one["methods"].items()
                }
                row = {
                    "prompt": prompt,
                    "layer": layer,
                    "rows": one["methods"]["saap"][which]["rows"],
                    "few": which == 0,
                }
                wins = {
                    name: float(all(by[low] < by[high] for low, high in itertools.pairwise(order)))
                    for name, order in rising.items()
                }
                found += [{**row, **wins}] if far else []
    return found


FRAMES: dict[str, Callable[[Record, Sequence[Row]], list[Row]]] = {
    one.__name__: one
    for one in (
        *(answered, beside, by_mass, by_step, comparisons, errors, families, groups, heads, kernels, layers, limits),
        *(looseness, nearest, needed, plans, ranked, reused, rounded),
    )
}
