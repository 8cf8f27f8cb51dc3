"""Budgets are rows beyond sink and window; at the door also a share of the context, a mass, or unlimited."""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

MASS = "mass:"
MOST = 10**15  # rows: no context has as many, and a float holds every number up to it


@dataclass(frozen=True)
class Mass:
    """As many rows as it takes, for each head and step, until the rows attended hold a share of the attention.

    The selector estimates what the rows it would choose weigh, and the rows it would not (`Selector.weigh`); sink and
    window are weighed exactly. Rows are read from the heaviest on until all that is attended holds `share`, so that the
    mass that is held is as good as the estimate. As text "mass:0.95", or with `most` "mass:0.95:2048".

    Args:
        share: of the softmax over everything, in (0, 1]. 1: every row that the selector would name.
        most: rows beyond sink and window at most: rows, a share of the context, or None for all.

    Raises:
        ValueError: a share or `most` out of its range.
    """

    share: float
    most: int | float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not isinstance(self.share, (int, float)) or not 0 < self.share <= 1:
            raise ValueError(f"a mass is a share of the attention in (0, 1], got {self.share!r}")
        if self.most is not None and (isinstance(self.most, bool) or not isinstance(self.most, (int, float))):
            raise ValueError(f"most of a mass is rows (int), a share of the context (float) or None, got {self.most!r}")
        budget_rows(self.most, 1)

    def __str__(self) -> str:
        most = f"{100 * self.most:.12g}%" if isinstance(self.most, float) else self.most
        return f"{MASS}{self.share:.12g}" + ("" if most is None else f":{most}")


Rows: TypeAlias = "int | float | Mass | None"
Budget: TypeAlias = "Rows | str"


class Reader(Protocol):
    """What a budget is for: a selector."""

    @property
    def span(self) -> int: ...
    @property
    def estimates(self) -> bool: ...
    @property
    def uses_budget(self) -> bool: ...
    def allowed(self, budget: int) -> int: ...


class Allowance(NamedTuple):
    """What a budget allows at a step.

    Args:
        rows: rows per head beyond sink and window, 1 or more.
        mass: the share of the attention that is to be held; None where the budget is no mass, or the selector has no
            use for it.
    """

    rows: int
    mass: float | None


def budget_rows(budget: Budget, context: int, span: int = 1, reader: object = "the selector") -> int:
    """Rows that `budget` allows in a context of `context` rows: an int is rows, a float in (0, 1] a share of the
    context (rounded down, at least one span), a `Mass` its `most`, None the whole context, a text what `parse_budget`
    makes of it.

    Raises:
        ValueError: fewer rows than one, or than the `span` that the selector, called `reader`, reads at a time; a share
            outside (0, 1]; more than `MOST`; another type or text.
    """
    budget = parse_budget(budget)
    if isinstance(budget, Mass):
        budget = budget.most
    if budget is None:
        return max(context, span)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise ValueError(
            f"a budget is rows (int), a share of the context (float), a Mass, None or a text such as "
            f'"5%" or "mass:0.95", got {budget!r}'
        )
    if isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"a budget given as a float is a share of the context in (0, 1], got {budget}")
        return max(math.floor(budget * context + 1e-9), span)  # 0.29 * 100 is 28.999...
    if not 1 <= budget <= MOST:
        bound = "at least 1 row" if budget < 1 else f"at most {MOST:,} rows"
        raise ValueError(f"a budget is {bound}, got {reprlib.repr(budget)}")
    if budget < span:
        raise ValueError(
            f"a budget of {budget} rows is less than one span of {reader}, which reads {span} rows at a time"
        )
    return budget


def budget_of(selector: Reader, budget: Budget, context: int) -> int:
    """`budget_rows` for a selector; ValueError too for a mass where it does not say what its rows weigh."""
    if type(budget) is int and max(selector.span, 1) <= budget <= MOST:
        return budget
    budget = parse_budget(budget)
    if isinstance(budget, Mass) and selector.uses_budget and not selector.estimates:
        raise ValueError(
            f"{selector} does not estimate what its rows weigh (weigh), so it cannot read until they hold a mass: "
            f"give it rows or a share of the context, not {budget}"
        )
    return budget_rows(budget, context, selector.span, selector)


def allowance(selector: Reader, budget: Budget, context: int, capacity: int | None = None) -> Allowance:
    """Return what `budget` allows a selector to read at a step of a cache.

    Args:
        context: rows of the longest sequence.
        capacity: rows that there can be, in a cache of fixed storage.

    Raises:
        ValueError: see `budget_of`.
    """
    if isinstance(budget, str):
        budget = parse_budget(budget)
    unlimited = budget is None or (isinstance(budget, Mass) and budget.most is None)
    most = context if capacity is None else capacity
    rows = budget_of(selector, budget, most if unlimited else context)
    if not unlimited:
        rows = selector.allowed(rows)
    # More rows than there are, or can be, change nothing but the number of slots.
    rows = min(rows, max(most, selector.span))
    return Allowance(rows, budget.share if isinstance(budget, Mass) and selector.uses_budget else None)


def parse_budget(given: Budget) -> Rows:
    """`"64"` is 64 rows, `"1%"` one hundredth of the context, `"all"` everything, `"mass:0.95"` and `"mass:0.95:2048"`
    a `Mass`; what is no text stays as it is.

    Raises:
        ValueError: another text, or a number in it that is out of range.
    """
    if not isinstance(given, str):
        return given
    text, budget = given.strip(), None
    if text.startswith(MASS):
        return _mass(text)
    try:
        if text == "all":
            return None
        budget = float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError:
        raise ValueError(
            f'a budget is rows ("64"), a mass ("mass:0.95"), a share ("1%") or "all", got {given!r}'
        ) from None
    budget_rows(budget, 1)
    return budget


def _mass(text: str) -> Mass:
    share, colon, most = text[len(MASS) :].partition(":")
    try:
        wanted = float(share)
    except ValueError:
        raise ValueError(
            f"a mass is a share of the attention and, after a colon, the most rows or share of the context that it may "
            f'take ("mass:0.95", "mass:0.95:2048", "mass:0.95:10%"), got {text!r}'
        ) from None
    rows = parse_budget(most) if colon else None
    if isinstance(rows, Mass):
        raise ValueError(f"most of a mass is rows or a share of the context, got {text!r}")
    return Mass(wanted, rows)


def budget_label(budget: Budget) -> str:
    """Return a budget as it is written on the command line."""
    if budget is None:
        return "all"
    if isinstance(budget, (str, Mass)):
        return str(budget)
    return str(budget) if isinstance(budget, int) else f"{100 * budget:.6g}%"


def budget_record(budget: Budget) -> Any:
    """Return a budget as JSON holds it, which `parse_budget` reads back."""
    return str(budget) if isinstance(budget, Mass) else budget


def budget_order(budget: Budget, context: int) -> tuple[int, float]:
    """Return what sorts budgets: the rows allowed, then the mass."""
    budget = parse_budget(budget)
    return budget_rows(budget, context), budget.share if isinstance(budget, Mass) else math.inf
