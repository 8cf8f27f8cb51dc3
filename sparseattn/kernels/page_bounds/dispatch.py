"""Quest's scores of pages, by the implementation that fits. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.page_bounds.bounds import PageBounds

SCORES = Operation(__package__, "torch", "numba", "triton")


def page_scores(
    query: Tensor, bounds: PageBounds, group: str, impl: str | None = None, temperature: float | None = None
) -> Tensor:
    """Return the group's vote on the upper bound of every page's logits, `reference.page_bounds / temperature`.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        bounds: of P pages, of the query's dtype or int8, with `valid`.
        group: see `group_vote.dispatch.vote`.
        impl: see `implementations`.
        temperature: what bounds are divided by, see `Selector.temperature`; None: `sqrt(D)`.

    Returns:
        `[B,Hs,P]` float32 (float64 for float64), -inf where a page is not valid.
    """
    kernel = SCORES.pick(impl, query.device, query.dtype, query.requires_grad)
    return kernel.scores(query, bounds, group, temperature or query.shape[-1] ** 0.5)


def page_scores_at(
    query: Tensor,
    store: PageBounds,
    table: Tensor,
    group: str,
    impl: str | None = None,
    temperature: float | None = None,
) -> Tensor:
    """Return `page_scores` where the bounds of all sequences' pages lie in one store, as a serving engine's blocks do.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        store: `[pages,H,D]` of the query's dtype.
        table: `[B,P]` int32, which page of the store is a sequence's; negative: none.
        group, impl, temperature: see `page_scores`.

    Returns:
        `[B,Hs,P]` float32, -inf where the table names none.
    """
    kernel = SCORES.pick(impl, query.device, query.dtype, query.requires_grad)
    return kernel.scores_at(query, store, table, group, temperature or query.shape[-1] ** 0.5)
