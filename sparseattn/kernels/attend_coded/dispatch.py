"""The best rows by keys of few bits or by product codes, and the attention over them in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from sparseattn.core.selection import Bounds, Chosen
from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.product_codes.codes import RankedCodes
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

ATTEND_CODED = Operation(__package__, "torch", "numba")
CodedStep: TypeAlias = Callable[[Tensor, int], tuple[Tensor, Chosen] | None]  # see `coded_step`


def coded_step(
    query: Tensor,
    coded: QuantizedKeys | RankedCodes,
    count: int,
    keys: Tensor,
    values: Tensor,
    bounds: Bounds,
    *,
    scale: float,
    impl: str | None = None,
) -> CodedStep | None:
    """Return a function that chooses rows, as `quantized_keys.best` by "softmax" or `product_codes.best`, and attends
    to them, sink and recent rows as `attend` does. What is the same until rows are sealed is looked up once.

    Args:
        query: one such as is given at each step, `[B,H,G,D]`.
        coded: what ranks the stored rows, with `valid`.
        count: rows that are chosen.
        keys, values: as of `attend`, storage that stays.
        bounds: of tensors that hold at each step what is to be read.
        scale: factor of the logits of the attention.
        impl: see `implementations`.

    Returns:
        a function of a query `[B,H,G,D]`, after RoPE, and of how many recent rows a sequence has at most, which returns
        `[B,H,G,D]` in the query's dtype and what was chosen, or None where the query, or its sum, is not finite. For
        one thread at a time. None in place of the function where compiled code takes two calls: more than half of the
        rows by keys of few bits, more rows than there are by product codes.
    """
    kernel = ATTEND_CODED.pick(impl, query.device, query.dtype)
    step: CodedStep | None = kernel.coded_step(query, coded, count, keys, values, bounds, scale)
    return step
