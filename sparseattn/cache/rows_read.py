"""How many rows a step reads by its settings alone, and from which length on it reads fewer than all.

Behind a prefill, and of a selector that names as many rows as it may. One that goes by what the rows hold (a mass, a
probability) may name fewer.
"""

from __future__ import annotations

from sparseattn.core.budget import Budget, budget_of, parse_budget
from sparseattn.selectors.base import Selector
from sparseattn.selectors.baselines.window import Window

FARTHEST = 1 << 24  # rows: no model's context is as long


def rows_read(selector: Selector, budget: Budget, rows: int, sink: int, window: int, unit: int) -> int:
    """Return the rows that a query reads at most of a sequence of `rows` rows, its own among them.

    Args:
        selector: whose choice it is.
        budget: rows beyond sink and window.
        rows: of the sequence.
        sink, window: first and last rows that every query reads.
        unit: rows are sealed in multiples of this.

    Raises:
        ValueError: a budget that does not fit the selector.
    """
    sealed = max(rows - sink - window, 0) // unit * unit
    return rows - sealed + min(_chosen(selector, budget, rows), sealed)


def sparse_from(selector: Selector, budget: Budget, sink: int, window: int, unit: int) -> int | None:
    """Return the fewest rows of a sequence of which a query leaves some out; None: no length has them."""
    budget = parse_budget(budget)
    always_read = sink + window
    if not isinstance(budget, float):
        allowed = _chosen(selector, budget, FARTHEST)
        return None if allowed >= FARTHEST else always_read + (allowed // unit + 1) * unit
    for sealed in range(unit, FARTHEST, unit):
        if _chosen(selector, budget, always_read + sealed) < sealed:
            return always_read + sealed
    return None


def _chosen(selector: Selector, budget: Budget, rows: int) -> int:
    """Return how many rows beyond sink and window a query chooses at most, of a sequence long enough."""
    if isinstance(selector, Window):
        return 0
    span = max(selector.span, 1)
    return selector.allowed(budget_of(selector, budget, rows)) // span * span
