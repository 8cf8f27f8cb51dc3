"""The best pages by Quest's bounds and the attention over their rows in one call. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen
from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.page_bounds.bounds import VotedBounds

ATTEND_BOUNDED = Operation(__package__, "torch", "numba")
BoundedStep: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Chosen] | None]  # see `bounded_step`


def bounded_step(
    query: Tensor,
    voted: VotedBounds,
    count: int,
    page: int,
    keys: Tensor,
    values: Tensor,
    bounds: Bounds,
    *,
    scale: float,
    impl: str | None = None,
) -> BoundedStep:
    """Return a function that chooses pages as `page_scores` and `best_pages` do, and attends to them, sink and recent
    rows as `attend` does.

    Between two layers of a model the processor's caches hold weights, so that every line of Python costs several times
    what it costs in a loop of its own. So what is the same at every step until rows are sealed is looked up once.

    Args:
        query: one such as is given at each step, `[B,H,G,D]`.
        voted: bounds `[B,H,P,D]` of the query's dtype, with `valid`, and the group's vote: "sum", "max" or "each".
        count: pages of a list.
        page: rows of one, a power of two.
        keys, values: as of `attend`, storage that stays.
        bounds: of tensors that hold at each step what is to be read.
        scale: factor of the logits.
        impl: see `implementations`.

    Returns:
        a function of a query `[B,H,G,D]`, after RoPE, and of how many recent rows a sequence has at most, which returns
        `[B,H,G,D]` in the query's dtype and what was chosen; None where the query, or its sum, is not finite. For one
        thread at a time.
    """
    kernel = ATTEND_BOUNDED.pick(impl, query.device, query.dtype)
    step: BoundedStep = kernel.bounded_step(query, voted, count, page, keys, values, bounds, scale)
    return step
