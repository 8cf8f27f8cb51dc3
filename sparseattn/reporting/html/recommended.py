"""The section of `recommend.jsonl`: what each layer loses with each method, and the plans that were chosen from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.core.budget import budget_label
from sparseattn.recommend.records import KEY as KIND
from sparseattn.recommend.records import check_line
from sparseattn.reporting.html.folders import Record
from sparseattn.reporting.html.percentages import MISSING
from sparseattn.reporting.html.plan_points import mean, plan_points, roles_of
from sparseattn.reporting.html.shared_fields import COUNT, ORIGIN, distinct, models_of
from sparseattn.reporting.html.views import Given, Heat, Lines, Section, Subject, View, axis, cost, text
from sparseattn.reporting.table import Table
from sparseattn.selectors.registry import make_selector
from sparseattn.selectors.trust import named_modules
from sparseattn.utils.json_fields import FieldError, Object

FILE = "recommend.jsonl"

MEAN = "mean over layers"
COST = (cost("bytes_heads"),)
LOSS = (
    axis("kl", label="KL divergence from one layer, nats per token", log=True),
    axis("error_heads", log=True),
)
GIVEN = f"Columns are layers, rows are KV heads. The number is the budget; {MISSING} means none."


def check(record: Record, before: Sequence[Record]) -> None:
    """Raise FieldError where a line is no record of `recommend`, or names layers that no settings `before` it do."""
    Object(more={**ORIGIN, "length": COUNT}).check(record)
    check_line(record)
    if record[KIND] in ("frontier", "plan"):
        heads = _heads(before)
        named = map(int, record["layers"]) if record[KIND] == "plan" else [record["layer"]]
        for layer in named:
            if layer not in heads:
                raise FieldError(f"layer {layer} is not among the layers of a line of settings above")


def _heads(records: Sequence[Record]) -> dict[int, int]:
    """Return the KV heads of each layer."""
    return {
        layer[0]: layer[1] for record in records if record[KIND] == "settings" for layer in record.get("layers", ())
    }


def section(records: Sequence[Record]) -> Section:
    """Return frontiers over all layers, a map of methods by layers, and a table of the plans' layers."""
    frontiers = [record for record in records if record[KIND] == "frontier"]
    points = _points(frontiers)
    plans = [record for record in records if record[KIND] == "plan"]
    methods = dict.fromkeys(method for method, _, _ in points)
    curves = _curves(points)
    dots = plan_points(plans, frontiers, curves)
    views: list[View] = [_frontier(curves, dots), _map(points)] if points else []
    if plans:
        given = _given(plans[::-1], _heads(records))
        views = [*views[:1], Given("What the plan gives each layer", given, GIVEN), *views[1:], _table(given)]
    findings = [_finding(plan) for plan in reversed(plans)]
    settings = [record for record in records if record[KIND] == "settings"]
    texts = [text["name"] for record in settings for text in record.get("texts", ())]
    about = Subject(models_of(settings), distinct(settings, "length"), list(dict.fromkeys(texts)))
    return Section("plan", "Which method each layer gets", findings, views, tuple(methods), about)


def _name(method: str) -> str:
    """Return a method's name as other sections have it. What this release does not know keeps its text, and so does a
    class of another package's module: nothing is imported because a record names it."""
    if named_modules([method]):
        return method
    try:
        return make_selector(method).label()
    except (ValueError, ImportError):
        return method


def _points(frontiers: Sequence[Record]) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return (method, budget, layer) -> measures, the mean over windows and heads."""
    names = {frontier["method"]: _name(frontier["method"]) for frontier in frontiers}
    groups: dict[tuple[str, str, int], list[dict[str, float]]] = {}
    for frontier in frontiers:
        for point in frontier["points"]:
            measured = {name: mean(point[name]) for name in ("error_heads", "bytes_heads")}
            at = names[frontier["method"]], budget_label(point.get("budget")), frontier["layer"]
            groups.setdefault(at, []).append({"kl": point["kl"], **measured})
    return {at: {name: mean([point[name] for point in group]) for name in group[0]} for at, group in groups.items()}


def _curves(points: Mapping[tuple[str, str, int], Mapping[str, float]]) -> list[dict[str, Any]]:
    """Return a point for each method and budget that every layer has: the mean over layers."""
    groups: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for (method, budget, _), measured in points.items():
        groups.setdefault((method, budget), []).append(measured)
    return [
        {
            "method": method,
            "facet": MEAN,
            "at": f"budget {budget}",
            "values": {name: mean([point[name] for point in group]) for name in group[0]},
        }
        for (method, budget), group in groups.items()
        if len(group) == len({layer for _, _, layer in points})  # means over other layers compare with nothing
    ]


def _frontier(curves: Sequence[Mapping[str, Any]], dots: Sequence[Mapping[str, Any]]) -> Lines:
    note = "One point per budget: the mean over windows and layers, with one layer sparse at a time."
    if dots:
        note += " A ring marks the single method, with one budget for all layers, that loses as much as a plan."
    marked = [{**dot, "facet": MEAN} for dot in dots]
    return Lines(
        "Plans beside single methods" if dots else "Quality and cost", "layers", COST, LOSS, curves, note, marked
    )


def _map(points: Mapping[tuple[str, str, int], Mapping[str, float]]) -> Heat:
    layers = sorted({layer for _, _, layer in points})
    panels: list[dict[str, Any]] = []
    for budget in dict.fromkeys(budget for _, budget, _ in points):
        methods = list(dict.fromkeys(method for method, other, _ in points if other == budget))
        cells = {
            measure.key: [[points.get((method, budget, n), {}).get(measure.key) for n in layers] for method in methods]
            for measure in LOSS
        }
        panels.append(
            {"method": None, "choice": {"budget": budget}, "columns": layers, "rows": methods, "values": cells}
        )
    note = "The mean over windows. One layer is sparse at a time, all others are dense."
    return Heat("Loss by layer", "layer", "method", ("budget",), LOSS, panels, True, note)


def _given(plans: Sequence[Record], heads: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return by plan and layer the method and the budget of each KV head.

    Args:
        heads: of each layer.
    """
    shown = []
    for plan in plans:
        layers = []
        for layer, given in plan["layers"].items():
            each = [{"method": _name(method), "budget": budget} for method, budget in roles_of(given)]
            agree = len(each) == 1
            layers.append({"layer": int(layer), "agree": agree, "heads": each * heads[int(layer)] if agree else each})
        shown.append({"name": plan["name"], "layers": layers})
    return shown


def _table(given: Sequence[Mapping[str, Any]]) -> Table:
    columns = [text(name) for name in ("plan", "layer", "heads", "method", "budget")]
    rows = [
        [
            plan["name"],
            str(layer["layer"]),
            "all" if layer["agree"] else f"KV head {head}",
            frontier["method"],
            frontier["budget"] or None,
        ]
        for plan in given
        for layer in plan["layers"]
        for head, frontier in enumerate(layer["heads"][: 1 if layer["agree"] else None])
    ]
    return Table("What each plan gives each layer, as a table", columns, rows, row_head=3)


def _finding(plan: Record) -> str:
    costs, verified = plan["cost"], plan["verified"]
    predicted = " (predicted)" if costs["predicted"] else ""
    verb = "reads" if costs["unit"] == "bytes" else "takes"
    share = f"{costs['plan'] / costs['full']:.0%} of full attention's {costs['unit']}"
    share += (f" on {costs['machine']}" if costs.get("machine") else "") + predicted
    kl, same = (verified[name]["mean"] for name in ("kl", "same_top"))
    return (
        f"The plan {plan['name']} {verb} {share}. On {verified['windows']} held-out windows its KL divergence from "
        f"full attention is {kl:.2g} nats per token, and its top-1 agreement is {same:.0%}."
    )
