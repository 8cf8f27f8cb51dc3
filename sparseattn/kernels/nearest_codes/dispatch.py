"""Names of the nearest centroids of keys' parts, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation

NEAREST = Operation(__package__, "torch", "numba")


def names(
    keys: Tensor,
    books: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
    errors: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return which centroid of each subspace is nearest.

    Args:
        keys: `[B,H,n,S*d]` of a stored dtype.
        books: `[B,H,S,K,d]` of a stored dtype.
        turn: `[B,H,D,D]` float32, by which keys are multiplied first, and `[B,H,D]` float32, what is added behind that;
            None: keys are taken as they are.
        errors: `[B,H,n]` float32, where each key's squared distance to what its names stand for is written, within
            rounding of the key's squared length; None: it is not.
        impl: see `implementations`.

    Returns:
        `[B,H,S,n]` uint8, int16 with more than 256 centroids. Of centroids equally near, but for an error of float32,
        the first.
    """
    return NEAREST.pick(impl, keys.device, keys.dtype, keys.requires_grad).names(keys, books, turn, errors)


def paired_names(
    keys: Tensor,
    books: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
    errors: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """Return the names of the nearest of 16 centroids, two a byte.

    Args:
        keys, turn, errors, impl: as `names` takes them.
        books: `[B,H,S,16,d]` of a stored dtype.

    Returns:
        `[B,H,R,n]` uint8, R half of S: two names a byte, the first in its low bits; a last one without a second stands
        alone.
    """
    return NEAREST.pick(impl, keys.device, keys.dtype, keys.requires_grad).paired_names(keys, books, turn, errors)
