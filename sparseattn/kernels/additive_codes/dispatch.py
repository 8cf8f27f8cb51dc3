"""Names of the centroids whose sum is nearest to a key, by the implementation that fits."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels.implementations import Operation

ADDITIVE = Operation(__package__, "torch", "numba")
BEAMS = 4  # partial sums that are kept of a key: with 8 about as much is found (the log, 2026-11-30)


def names(
    keys: Tensor,
    books: Tensor,
    turn: tuple[Tensor, Tensor] | None = None,
    beams: int = BEAMS,
    impl: str | None = None,
) -> Tensor:
    """Return, of each codebook, the centroid of a key's sum.

    A beam search takes one codebook after the other and keeps the partial sums that are nearest to the key. Additive
    quantisation, https://doi.org/10.1109/CVPR.2014.124; the distances come from products of centroids with centroids,
    so that no residual is made.

    Args:
        keys: `[B,H,n,D]` of a stored dtype.
        books: `[B,H,M,K,D]` of a stored dtype, K 256 or less.
        turn: `[B,H,D,D]` float32, by which keys are multiplied first, and `[B,H,D]` float32, what is added behind that;
            None: keys are taken as they are.
        beams: partial sums that are kept.
        impl: see `implementations`.

    Returns:
        `[B,H,M,n]` uint8.
    """
    codes, flat = books.shape[2], books.float().flatten(2, 3)  # [B,H,M*K,D]
    grams = flat @ flat.mT
    halves, asked = grams.diagonal(dim1=2, dim2=3) / 2, flat
    if turn is not None:
        matrix, moved = turn
        asked, halves = flat @ matrix.float(), halves - (flat @ moved.float()[..., None])[..., 0]
    # Half the squared distance of a sum, less that of nothing: each centroid's own number, and a number for each pair.
    of = keys.device, keys.dtype, keys.requires_grad
    found: Tensor = ADDITIVE.pick(impl, *of).sums(keys, -asked, halves, grams, codes, beams)
    return found
