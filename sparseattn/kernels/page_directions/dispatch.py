"""Scores of pages by their directions, by the implementation that fits: torch, numba's code or Triton."""

from __future__ import annotations

import math

from torch import Tensor

from sparseattn.kernels import scoring
from sparseattn.kernels.page_directions.reference import Form, Parts, estimates
from sparseattn.kernels.scoring import vote


def scores(
    query: Tensor,
    entries: Parts,
    real: Tensor,
    form: Form,
    group: str,
    temperature: float,
    impl: str | None = None,
) -> Tensor:
    """`estimates` of pages, and the group's vote.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        entries: name -> `[B,H,P,..]`, see `Form.names`; anything where a page is not real.
        real: `[B,P]` bool.
        group: see `scoring.vote`.
        temperature: see `Selector.temperature`.
        impl: see `scoring`.

    Returns:
        `[B,Hs,P]` float32 (float64 of a float64 query), -inf where a page is not real.
    """
    impl = _implementation(impl, query)
    if impl == "triton":
        from sparseattn.kernels.page_directions import gpu as page_directions_gpu

        return page_directions_gpu.scores(query, entries, real, form, group, temperature)
    if impl == "numba":
        from sparseattn.kernels.page_directions import cpu as page_directions_cpu

        return page_directions_cpu.scores(query, entries, real, form, group, temperature)
    found = estimates(query, entries, form, temperature)
    return vote(found.masked_fill(~real[:, None, None], -math.inf), group, impl)


def scores_at(
    query: Tensor,
    store: Parts,
    table: Tensor,
    form: Form,
    group: str,
    temperature: float,
    impl: str | None = None,
) -> Tensor:
    """`scores` where the entries of all sequences lie in one store, as a serving engine's blocks do.

    Args:
        store: name -> `[entries,H,..]`.
        table: `[B,P]` int32, which entry of the store is a sequence's; negative: none.

    The rest as in `scores`.
    """
    impl = _implementation(impl, query)
    if impl == "triton":
        from sparseattn.kernels.page_directions import gpu as page_directions_gpu

        return page_directions_gpu.scores_at(query, store, table, form, group, temperature)
    if impl == "numba":
        from sparseattn.kernels.page_directions import cpu as page_directions_cpu

        return page_directions_cpu.scores_at(query, store, table, form, group, temperature)
    place = table.long().clamp(min=0)
    own = {name: part[place].transpose(1, 2) for name, part in store.items()}
    return scores(query, own, table >= 0, form, group, temperature, impl)


def _implementation(impl: str | None, query: Tensor) -> str:
    """What scores: numba's code knows no gradients, so that by default it leaves a query that needs one to torch."""
    return scoring.chosen("torch" if impl is None and query.requires_grad else impl, query.device, query.dtype)
