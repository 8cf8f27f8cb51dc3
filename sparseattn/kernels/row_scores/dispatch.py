"""Products of query heads with every key of their KV head, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation

SCORES = Operation(__package__, "torch", "numba")


def row_scores(query: Tensor, keys: Tensor, impl: str | None = None) -> Tensor:
    """Return the inner product of each query head with every key, summed in float32, of float64 in float64.

    Args:
        query: `[B,H,G,D]`.
        keys: `[B,H,N,D]`, elements of a row adjacent.
        impl: see `implementations`.

    Returns:
        `[B,H,G,N]` float32, float64 where either is float64.
    """
    torch_only = query.requires_grad or keys.requires_grad or query.dtype != keys.dtype
    return SCORES.pick(impl, keys.device, keys.dtype, torch_only).row_scores(query, keys)
