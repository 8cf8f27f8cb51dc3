"""The section of `recommend.jsonl`: what each layer loses with each method, and the plans that were chosen from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.budget import budget_label
from sparseattn.cli.page.folders import Record
from sparseattn.cli.page.views import Heat, Lines, Measure, Section, Table, View
from sparseattn.selectors import make_selector

FILE = "recommend.jsonl"
KIND = "record"  # what a line is of: settings, frontier, trial or plan

COST = (Measure("bytes_heads", "bytes read, of the layer's", "share", log=True),)
LOSS = (
    Measure("kl", "KL divergence by one layer alone, nats a token", "number", log=True, better="low"),
    Measure("error_heads", "error of the output", "share", log=True, better="low"),
)


def section(records: Sequence[Record]) -> Section:
    """Frontiers over all layers, a map of methods by layers, and a table of the plans' layers."""
    points = _points([one for one in records if one[KIND] == "frontier"])
    plans = [one for one in records if one[KIND] == "plan"]
    methods = dict.fromkeys(method for method, _, _ in points)
    views: list[View] = [_frontier(points), _map(points)] if points else []
    if plans:
        views.append(_table(plans))
    said = [_said(one) for one in reversed(plans)]
    return Section("plan", "Which method each layer gets", said, views, tuple(methods))


def _name(method: str) -> str:
    """As other sections call it; what this release does not know keeps its text."""
    try:
        return make_selector(method).label()
    except ValueError:
        return method


def _points(frontiers: Sequence[Record]) -> dict[tuple[str, str, int], dict[str, float]]:
    """(method, budget, layer) -> measures, the mean over windows and heads."""
    names = {one["method"]: _name(one["method"]) for one in frontiers}
    found: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    for one in frontiers:
        for point in one["points"]:
            measured = {name: _mean(point[name]) for name in ("error_heads", "bytes_heads")}
            at = names[one["method"]], budget_label(point.get("budget")), one["layer"]
            found.setdefault(at, []).append({"kl": point["kl"], **measured})
    return {at: {name: _mean([one[name] for one in mine]) for name in mine[0]} for at, mine in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _frontier(points: Mapping[tuple[str, str, int], Mapping[str, float]]) -> Lines:
    groups: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for (method, budget, _), measured in points.items():
        groups.setdefault((method, budget), []).append(measured)
    drawn = [
        {
            "method": method,
            "facet": "the mean over layers",
            "at": f"budget {budget}",
            "values": {name: _mean([one[name] for one in mine]) for name in mine[0]},
        }
        for (method, budget), mine in groups.items()
        if len(mine) == len({layer for _, _, layer in points})  # means over other layers compare with nothing
    ]
    note = "A point a budget, the mean over windows and layers: one layer is sparse at a time, all others are dense."
    return Lines("What methods lose in a layer", "layers", COST, LOSS, drawn, note)


def _map(points: Mapping[tuple[str, str, int], Mapping[str, float]]) -> Heat:
    layers = sorted({layer for _, _, layer in points})
    panels: list[dict[str, Any]] = []
    for budget in dict.fromkeys(budget for _, budget, _ in points):
        methods = list(dict.fromkeys(method for method, mine, _ in points if mine == budget))
        cells = {
            measure.key: [[points.get((method, budget, n), {}).get(measure.key) for n in layers] for method in methods]
            for measure in LOSS
        }
        panels.append(
            {"method": None, "choice": {"budget": budget}, "columns": layers, "rows": methods, "values": cells}
        )
    note = "One layer is sparse at a time, all others are dense; the mean over windows."
    return Heat("What each layer loses", "layer", "method", ("budget",), LOSS, panels, True, note)


def _table(plans: Sequence[Record]) -> Table:
    columns = [Measure(name, name, "text") for name in ("plan", "layer", "heads", "method", "budget")]
    rows = []
    for plan in plans:
        for layer, given in plan["layers"].items():
            roles = given if isinstance(given, list) else [given]
            for head, role in enumerate(roles):
                role = {"method": role} if isinstance(role, str) else role
                budget = "" if "budget" not in role else budget_label(role["budget"])
                heads = "all" if len(roles) == 1 else f"KV head {head}"
                rows.append([plan["name"], str(layer), heads, _name(role["method"]), budget])
    return Table("What each plan gives each layer", columns, rows, method=3)


def _said(plan: Record) -> str:
    cost, verified = plan["cost"], plan["verified"]
    predicted = " (predicted)" if cost["predicted"] else ""
    told = f"{cost['plan'] / cost['full']:.0%} of full attention's {cost['unit']}{predicted}"
    kl, same = (verified[name]["mean"] for name in ("kl", "same_top"))
    return (
        f"The plan {plan['name']} costs {told}. On {verified['windows']} windows held out its predictions differ by "
        f"{kl:.3g} nats a token, and {same:.0%} of the likeliest tokens are the same."
    )
