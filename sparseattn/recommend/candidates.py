"""What a layer may do: full attention, the window, and each method at each budget."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparseattn.core.budget import Budget
from sparseattn.roles.role import DENSE, WINDOW, Role
from sparseattn.selectors.abilities import FollowsLayers, LooksAhead


def candidates(
    methods: Sequence[str], budgets: Sequence[Budget], context: int, windows: bool = True
) -> list[list[Role]]:
    """Every method with the budgets that it can have; full attention is none of them, the window alone is. The roles of
    a list have one selector.

    Args:
        methods: as `make_selector` reads them.
        budgets: rows beyond sink and window, or shares of the context.
        context: rows of a window; a budget in rows of half of them or more is left out, as is one that a method cannot
            have.
        windows: whether the window may be larger than it is, by a budget.

    Raises:
        ValueError: no such method, one that none of the budgets fits, or one that no layer can have without another.
    """
    budgets = [b for b in budgets if not isinstance(b, int) or b < context / 2]
    if not budgets:
        raise ValueError(f"no budget is below half of a window's {context} rows: give smaller ones, or longer windows")
    roles = [[Role(WINDOW)]]
    if windows and (recent := _fitting(WINDOW, budgets)):
        roles.append(recent)
    for method in dict.fromkeys(methods):
        if method in (DENSE, WINDOW):
            continue
        plain = Role(method)
        _check_alone(plain)
        if not plain.selector.uses_budget:
            roles.append([plain])
        elif fitting := _fitting(method, budgets):
            roles.append(fitting)
        else:
            Role(method, budgets[-1])  # says why
    return roles


def _check_alone(role: Role) -> None:
    """ValueError for a method that goes by another layer: what each layer loses is measured with the others full."""
    reasons = {LooksAhead: "the query of the layer before", FollowsLayers: "the choice of another layer"}
    for ability, why in reasons.items():
        if role.selector.find(ability):
            raise ValueError(
                f"{role.method!r} goes by {why}, and layers are measured one by one: take methods by which each layer "
                f"chooses for itself"
            )


def _fitting(method: str, budgets: Sequence[Budget]) -> list[Role]:
    roles = []
    for budget in budgets:
        with contextlib.suppress(ValueError):
            roles.append(Role(method, budget))
    return roles
