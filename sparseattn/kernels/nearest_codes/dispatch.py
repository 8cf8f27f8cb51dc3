"""Names of the nearest of 16 centroids in each subspace, two a byte, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation

NEAREST = Operation(__package__, "torch", "numba")


def paired_names(keys: Tensor, books: Tensor, impl: str | None = None) -> Tensor:
    """Return which centroid of each subspace is nearest.

    Args:
        keys: `[B,H,n,S*d]` float32.
        books: `[B,H,S,16,d]` of a stored dtype.
        impl: see `implementations`.

    Returns:
        `[B,H,n,R]` uint8, R half of S: two names a byte, the first in its low bits; a last one without a second stands
        alone. Of centroids equally near, but for an error of float32, the first.
    """
    return NEAREST.pick(impl, keys.device, keys.dtype, keys.requires_grad).paired_names(keys, books)
