"""Which methods a page shows when it opens: a few, since the lines and maps of many hide each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparseattn.reporting.html.views import Explorer, Lines, Section
from sparseattn.reporting.replay_tables import CONTROLS

MOST = 5  # that are switched on when the page opens


def starting_methods(methods: Sequence[str], sections: Sequence[Section]) -> list[str]:
    """Return those switched on when the page opens, `MOST` at most: those that an explorer shows, then those that most
    often are beaten by no other method in both axes of a plot, controls last."""
    explored = [
        method["label"]
        for section in sections
        for view in section.views
        if isinstance(view, Explorer)
        for method in view.data["methods"]
    ]
    plots = [view for section in sections for view in section.views if isinstance(view, Lines)]
    unbeaten = [name for view in plots for name in _unbeaten(view)]
    ranked = sorted(
        methods,
        key=lambda name: (name not in explored, name in CONTROLS, -unbeaten.count(name), methods.index(name)),
    )
    return [name for name in methods if name in ranked[:MOST]]


def _unbeaten(view: Lines) -> list[str]:
    """Return the method of each point that no other point of its plot beats in both of the axes shown first."""
    x, y = view.x[0].key, view.y[0].key
    sign = -1 if view.y[0].better == "high" else 1
    by_facet: dict[str, list[tuple[float, float, str]]] = {}
    for point in view.points:
        across, up = (point["values"].get(key) for key in (x, y))
        if across is not None and up is not None and not math.isnan(across) and not math.isnan(up):
            by_facet.setdefault(point["facet"], []).append((across, sign * up, point["method"]))
    return [
        method
        for points in by_facet.values()
        for across, up, method in points
        if not any(a <= across and u <= up and (a, u) != (across, up) for a, u, _ in points)
    ]
