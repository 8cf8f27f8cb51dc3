"""Where plans lie among the curves of single methods: a dot each, and the best single method for the same loss.

Everything is as the frontiers were measured: one layer is sparse at a time, the mean over windows and layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.core.budget import budget_label
from sparseattn.recommend.single import between
from sparseattn.reporting.html.folders import Record

BYTES, KL, ERROR = "bytes_heads", "kl", "error_heads"
Roles = list[tuple[str, str]]  # method and budget of each KV head, or of all


def roles_of(given: Any) -> Roles:
    """Return the method and the budget's label of each KV head as a plan's record has them; one where all agree."""
    roles = given if isinstance(given, list) else [given]
    each = [role if isinstance(role, dict) else {"method": role} for role in roles]
    return [(role["method"], budget_label(role["budget"]) if "budget" in role else "") for role in each]


def plan_points(plans: Sequence[Record], frontiers: Sequence[Record], curves: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return a dot for each plan whose roles were all measured: `name`, `values` by measure, and `beside`.

    Args:
        plans, frontiers: records.
        curves: points of single methods with one budget for all layers: `method` and `values`.
    """
    measured = _measured(frontiers)
    dots = []
    for plan in plans:
        layers = [_of_layer(measured.get(int(layer), {}), roles_of(given)) for layer, given in plan["layers"].items()]
        known = [point for point in layers if point is not None]
        if len(known) == len(layers):
            values = {name: mean([point[name] for point in known]) for name in (BYTES, KL, ERROR)}
            beside = {name: best for name in (KL, ERROR) if (best := _best_single(curves, name, values[name]))}
            dots.append({"name": f"plan {plan['name']}", "values": values, "beside": beside})
    return dots


def mean(values: Sequence[float]) -> float:
    """Return the mean of one value or more."""
    return sum(values) / len(values)


def _measured(frontiers: Sequence[Record]) -> dict[int, dict[tuple[str, str], list[Mapping[str, Any]]]]:
    """Return layer -> method and budget -> what each window measured."""
    by_layer: dict[int, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for frontier in frontiers:
        for point in frontier["points"]:
            role = frontier["method"], "" if point.get("budget") is None else budget_label(point["budget"])
            by_layer.setdefault(frontier["layer"], {}).setdefault(role, []).append(point)
    return by_layer


def _of_layer(measured: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], roles: Roles) -> dict[str, float] | None:
    """Return what a layer reads and loses with a role for each KV head; None where one was not measured."""
    each = [_of_head(measured, role, None if len(roles) == 1 else head) for head, role in enumerate(roles)]
    known = [point for point in each if point is not None]
    if len(known) < len(each):
        return None
    return {name: (sum if name == KL else mean)([point[name] for point in known]) for name in (BYTES, KL, ERROR)}


def _of_head(
    measured: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], role: tuple[str, str], head: int | None
) -> dict[str, float] | None:
    """Return the same of one KV head, or of all where `head` is None."""
    if role[0] == "dense":
        return {BYTES: 1.0, KL: 0.0, ERROR: 0.0}
    if role not in measured:
        return None
    windows = measured[role]
    if head is None:
        means = {name: mean([mean(window[name]) for window in windows]) for name in (BYTES, ERROR)}
        return {**means, KL: mean([window[KL] for window in windows])}
    of_head = {BYTES: BYTES, KL: "kl_heads", ERROR: ERROR}
    return {name: mean([window[key][head] for window in windows]) for name, key in of_head.items()}


def _best_single(curves: Sequence[Mapping[str, Any]], loss: str, at: float) -> dict[str, Any] | None:
    """Return the method that loses as much for the fewest bytes, and its bytes; None where every method loses more."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for curve in curves:
        lines.setdefault(curve["method"], []).append((curve["values"][loss], curve["values"][BYTES]))
    costs = {method: cost for method, line in lines.items() if (cost := between(line, at)) is not None}
    if not costs:
        return None
    best = min(costs, key=costs.__getitem__)
    return {"method": best, "value": costs[best]}
