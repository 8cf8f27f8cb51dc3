"""Logits of rows, and the best rows, by product codes of their keys, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.product_codes.codes import ProductCodes, Tables

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


def best(tables: Tables, keys: ProductCodes, count: int, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the best rows by the group's vote "softmax" among candidates, by tables rounded to 8 bits.

    A query head's probability of a row is about the exponential of the row's logit, less the log-sum-exp of the rows
    that `codes.sampled` names. The 2 * `count` rows with the largest one of any query head, and those with as large a
    one as the last, are candidates. They vote, and no exponential is taken of any other row. Logits are sums of rounded
    numbers (`codes.rounded`) and log-sum-exps are rounded to whole steps of them.

    The rows are those of a vote of all rows by unrounded tables but for rounding, and but for rows that are no
    candidates: 2 * `count` rows matter more to some query head.

    Args:
        tables: of M subspaces, 128 or less, so that sums have 15 bits; what they add to all rows is left out. With
            `beside` 112 or less; what it adds is rounded to whole steps too.
        keys, impl: see `logits`.
        count: rows chosen for each KV head.

    Returns:
        start, length `[B,H,S]` int32 of spans of one row, in no order, S at most N; length 0 where there are fewer
        valid rows. Which of equal rows is chosen is left open.
    """
    query = tables.query
    return CODES.pick(impl, query.device, query.dtype, query.requires_grad).best(tables, keys, count)
