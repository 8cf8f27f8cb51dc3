"""Logits of listed rows by product codes of their keys, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.product_codes.codes import ProductCodes

LISTED = Operation(__package__, "torch", "numba", "triton")


def logits(tables: Tensor, keys: ProductCodes, rows: Tensor, impl: str | None = None) -> Tensor:
    """Return the logits of rows that a list names, sums of M table entries each.

    Args:
        tables: `[B,H,G,M,2^bits]` float32, what a code of a subspace adds to the logit.
        keys: N of them.
        rows: `[B,H,C]` int32, listed for all of a KV head's query heads, or `[B,H*G,C]` for each; negative, or N and
            above: none.
        impl: see `implementations`.

    Returns:
        `[B,H,G,C]` float32, -inf where a place of the list names none, or a row that is not valid.
    """
    return LISTED.pick(impl, tables.device, tables.dtype, tables.requires_grad).logits(tables, keys, rows)
