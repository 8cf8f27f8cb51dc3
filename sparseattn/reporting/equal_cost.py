"""At which rows and at which bytes `bench` compares methods, where an option says nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from sparseattn.core.budget import Budget, Mass, budget_label, parse_budget

ROWS = 256  # the budget whose rows to compare at, where it was measured and none is named
BYTES = 0.10  # of the cache: what Quest with pages of 16 reads for 256 of 8,192 rows


def chosen_rows(given: str | None, budgets: Sequence[Budget]) -> Budget:
    """Return the budget whose rows to compare at: the one asked for, else `ROWS`, else the middle one measured.

    Raises:
        ValueError: one asked for that is not measured.
    """
    rows = [budget for budget in budgets if not isinstance(budget, Mass)]  # a mass takes other rows at every head
    if given is None:
        return ROWS if ROWS in rows else (rows or budgets)[len(rows or budgets) // 2]
    budget = parse_budget(given)
    if budget not in rows:
        listed = ", ".join(map(budget_label, rows)) or "none of which is rows"
        raise ValueError(f"--rows is one of the budgets of --budget, {listed}, got {given}")
    return budget


def chosen_bytes(given: str | None) -> float:
    """Return the share of the cache's bytes to compare at, `BYTES` if none is asked for.

    Raises:
        ValueError: what is asked for is no share.
    """
    try:
        share = BYTES if given is None else parse_budget(given)
    except ValueError:
        share = None
    if not isinstance(share, float):
        raise ValueError(f"--bytes is a share of the cache's bytes, such as 10%, got {given}")
    return share
