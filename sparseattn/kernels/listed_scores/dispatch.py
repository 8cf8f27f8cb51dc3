"""Products of query heads with listed keys, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation

SCORES = Operation(__package__, "torch", "numba", "triton")


def listed_scores(query: Tensor, keys: Tensor, ids: Tensor, impl: str | None = None) -> Tensor:
    """Return the inner product of each query head with its listed keys, each key once.

    Args:
        query: `[B,H,G,D]`.
        keys: `[B,H,N,D]`, elements of a row adjacent; rows that nobody lists may hold anything.
        ids: `[B,H*G,n]` int32, rising: rows of `keys`, -1 for none.
        impl: see `implementations`.

    Returns:
        `[B,H*G,n]` float32, -inf for -1 and for all but the first of equal ids.
    """
    learns = query.requires_grad or keys.requires_grad
    return SCORES.pick(impl, query.device, query.dtype, learns).scores(query, keys, ids)
