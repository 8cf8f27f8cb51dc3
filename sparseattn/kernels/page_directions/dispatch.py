"""Scores of pages by their directions, by the implementation that fits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.page_directions.reference import Form, Parts

SCORES = Operation(__package__, "torch", "numba", "triton")


def scores(
    query: Tensor,
    entries: Parts,
    valid: Tensor,
    form: Form,
    group: str,
    temperature: float,
    impl: str | None = None,
) -> Tensor:
    """Return the group's vote on `reference.estimates` of pages.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        entries: name -> `[B,H,P,..]`, see `Form.names`; anything where a page is not valid.
        valid: `[B,P]` bool.
        form: what the entries are.
        group: see `group_vote.dispatch.vote`.
        temperature: see `Selector.temperature`.
        impl: see `implementations`.

    Returns:
        `[B,Hs,P]` float32 (float64 of a float64 query), -inf where a page is not valid.
    """
    return _pick(impl, query).scores(query, entries, valid, form, group, temperature)


def scores_at(
    query: Tensor,
    store: Parts,
    table: Tensor,
    form: Form,
    group: str,
    temperature: float,
    impl: str | None = None,
) -> Tensor:
    """Return `scores` where the entries of all sequences lie in one store, as a serving engine's blocks do.

    Args:
        store: name -> `[entries,H,..]`.
        table: `[B,P]` int32, which entry of the store is a sequence's; negative: none.

    The rest as in `scores`.
    """
    return _pick(impl, query).scores_at(query, store, table, form, group, temperature)


def _pick(impl: str | None, query: Tensor) -> Any:
    """Return what scores: numba's code knows no gradients, so by default it leaves a query that needs one to torch."""
    return SCORES.pick(impl, query.device, query.dtype, query.requires_grad)
