"""Budgets are rows beyond sink and window; at the door they may also be a share of the context, or unlimited."""

from __future__ import annotations

import math
from typing import TypeAlias

Rows: TypeAlias = "int | float | None"
Budget: TypeAlias = "Rows | str"


def budget_rows(budget: Budget, context: int, span: int = 1, reader: object = "the selector") -> int:
    """Rows that `budget` allows in a context of `context` rows: an int is rows, a float in (0, 1] a share of the
    context (rounded down, at least one span), None the whole context, a text what `parse_budget` makes of it.

    Raises:
        ValueError: fewer rows than one, or than the `span` that the selector, called `reader`, reads at a time; a share
            outside (0, 1]; another type or text.
    """
    budget = parse_budget(budget)
    if budget is None:
        return max(context, span)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ValueError(
            f'a budget is rows (int), a share of the context (float), None or a text such as "5%", got {budget!r}'
        )
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"a budget given as a float is a share of the context in (0, 1], got {budget}")
        return max(math.floor(budget * context + 1e-9), span)  # 0.29 * 100 is 28.999...
    if budget < 1:
        raise ValueError(f"a budget is at least 1 row, got {budget}")
    if budget < span:
        raise ValueError(
            f"a budget of {budget} rows is less than one span of {reader}, which reads {span} rows at a time"
        )
    return budget


def parse_budget(given: Budget) -> Rows:
    """`"64"` is 64 rows, `"1%"` one hundredth of the context, `"all"` everything; what is no text stays as it is.

    Raises:
        ValueError: another text, or a number in it that is out of range.
    """
    if not isinstance(given, str):
        return given
    text, budget = given.strip(), None
    try:
        if text == "all":
            return None
        budget = float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError:
        raise ValueError(f'a budget is rows ("64"), a share ("1%") or "all", got {given!r}') from None
    budget_rows(budget, 1)
    return budget
