"""Attention of one query per head over a run of rows, by a function that is made once for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from sparseattn.kernels.implementations import Operation

ATTEND_RUN = Operation(__package__, "torch", "numba")
RunStep: TypeAlias = Callable[[Tensor, int, int], Tensor]  # see `run_step`


def run_step(
    query: Tensor, keys: Tensor, values: Tensor, rows: int, *, scale: float, impl: str | None = None
) -> RunStep:
    """Return a function that attends to rows that lie together, what is the same at every token being looked up once.

    Args:
        query: one such as is given at each step, `[B,H,G,D]`.
        keys, values: `[B,H,N,D]` of the query's dtype, storage that stays, whose rows of one head are adjacent numbers.
        rows: that a token reads at most.
        scale: factor of the logits.
        impl: see `implementations`.

    Returns:
        A function of a query `[B,H,G,D]`, of the first row that it reads and of the one past the last, 1 to `rows`
        behind it, which returns `[B,H,G,D]` in the query's dtype. For one thread at a time.
    """
    step: RunStep = ATTEND_RUN.pick(impl, query.device, query.dtype).run_step(query, keys, values, rows, scale)
    return step
