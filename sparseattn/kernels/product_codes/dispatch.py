"""Logits of rows, and the best rows, by product codes of their keys, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.product_codes.codes import ProductCodes

CODES = Operation(__package__, "torch", "numba", "triton")


def logits(tables: Tensor, keys: ProductCodes, impl: str | None = None) -> Tensor:
    """Return the logits of rows by their codes, sums of M table entries.

    Args:
        tables: `[B,H,G,M,2^bits]` float32, what a code of a subspace adds to the logit.
        keys: N of them.
        impl: see `implementations`.

    Returns:
        `[B,H,G,N]` float32, -inf where a row is not valid.
    """
    return CODES.pick(impl, tables.device, tables.dtype, tables.requires_grad).logits(tables, keys)


def relative(tables: Tensor, keys: ProductCodes, impl: str | None = None) -> Tensor:
    """Return how far each row is below a query head's best row, at the head where it is nearest, in whole steps.

    Tables are rounded to 8 bits (`codes.rounded`), so that a row's sum is a whole number of 16 bits.

    Args:
        tables, keys, impl: see `logits`; M is 128 or less.

    Returns:
        `[B,H,N]` float32 of whole numbers, 0 the best, -inf where a row is not valid.
    """
    return CODES.pick(impl, tables.device, tables.dtype, tables.requires_grad).relative(tables, keys)


def best(tables: Tensor, keys: ProductCodes, count: int, impl: str | None = None) -> Tensor:
    """Return the best rows by the group's vote "softmax" among candidates.

    The rows with the largest `relative`, four for every row that is chosen, are candidates. They vote by their
    `logits`, so no exponential is taken of any other row. What is chosen is what a vote of all rows would choose unless
    a row that it would choose is no candidate, or the others' weights, which no probability here has in its sum, would
    turn the order of two rows that different query heads want.

    Args:
        tables, keys, impl: see `relative`.
        count: rows chosen for each KV head.

    Returns:
        `[B,H,S]` int32 in no order, S at most N, -1 where there are fewer valid rows. Which of equal rows is chosen is
        left open.
    """
    return CODES.pick(impl, tables.device, tables.dtype, tables.requires_grad).best(tables, keys, count)
