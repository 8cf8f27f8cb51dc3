"""Roles of two papers: PyramidKV, https://arxiv.org/abs/2406.02069, and DuoAttention, https://arxiv.org/abs/2410.10819."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence

from torch import Tensor

from sparseattn.core.budget import budget_rows
from sparseattn.roles.role import DENSE, WINDOW
from sparseattn.roles.roles import Given, Roles


def pyramid(layers: int, budget: int | float, beta: float = 20, *, unit: int = 1) -> list[int] | list[float]:
    """PyramidKV's budgets (https://arxiv.org/abs/2406.02069): most in the first layer, falling linearly to the last.

    From 2B - B/beta to B/beta, so that their mean is B. Rows are rounded alike above and below the mean, which stays B
    exactly. In the paper B counts no window, as budgets here.

    Args:
        layers: how many.
        budget: B, their mean: rows (int) or a share of the context (float).
        beta: how steep, 1 (all alike) or more; 20 as by default in the authors' code.
        unit: rows are multiples of it, and so is B: the page of a method that reads whole pages.

    Returns:
        A budget for each layer, of `budget`'s type.

    Raises:
        ValueError: an argument out of its range, B that is no multiple of the unit, a last layer below one unit, or a
            first layer above the whole context.
    """
    if layers < 1 or unit < 1 or not (math.isfinite(beta) and beta >= 1):
        raise ValueError(f"layers and unit are 1 or more, and so is beta, got {layers}, {unit} and {beta}")
    budget_rows(budget, 1)
    steps = [1 - 2 * layer / (layers - 1) if layers > 1 else 0.0 for layer in range(layers)]  # 1 to -1
    most = budget - budget / beta  # above the mean
    if isinstance(budget, float):
        if budget + most > 1:
            raise ValueError(
                f"budgets of mean {budget:g} and beta {beta:g} begin at {budget + most:g} of the context: at most 1"
            )
        return [budget + most * step for step in steps]
    if budget % unit:
        raise ValueError(f"budgets in multiples of {unit} rows have a mean of such, got {budget}")
    rows = [budget + unit * int(math.copysign(math.floor(abs(most * step) / unit + 0.5), step)) for step in steps]
    if rows[-1] < unit:
        raise ValueError(
            f"budgets of mean {budget} and beta {beta:g} end at {budget / beta:g} rows, less than the {unit} that are "
            f"read at a time: give more rows or a smaller beta"
        )
    return rows


def duo(
    scores: Mapping[int, Sequence[float]] | Sequence[Sequence[float]] | Tensor,
    threshold: float,
    *,
    retrieval: Given = DENSE,
    streaming: Given = WINDOW,
    name: str = "duo",
) -> Roles:
    """DuoAttention's roles (https://arxiv.org/abs/2410.10819): retrieval heads read every row, streaming heads sink and
    window.

    Args:
        scores: of each KV head of each layer, `[L,H]` or by layer: the paper's gates, 0 to 1, which it optimises on
            passkey prompts, or anything else that tells how much a head looks back.
        threshold: a head of a larger score is a retrieval head.
        retrieval, streaming: their roles; the paper's by default. `Role("window", 192)` reads 192 rows more than the
            cache's window.
        name: what tables call it.

    Raises:
        ValueError: no scores of heads, or what `Roles` refuses.
    """
    if isinstance(scores, Tensor):
        scores = scores.tolist()
    each = dict(scores if isinstance(scores, Mapping) else enumerate(scores))
    for layer, heads in each.items():
        if not isinstance(heads, Sequence) or not heads or not all(_is_number(score) for score in heads):
            raise ValueError(
                f"scores are lists of numbers, one for each KV head of a layer, got {reprlib.repr(heads)} for layer "
                f"{layer}"
            )
    made = {layer: [retrieval if score > threshold else streaming for score in heads] for layer, heads in each.items()}
    return Roles(made, name, {"threshold": threshold})


def _is_number(score: object) -> bool:
    return isinstance(score, (int, float)) and math.isfinite(score)
