"""Names of the nearest of 16 centroids, in torch, which is the specification."""

from __future__ import annotations

from torch import Tensor

from sparseattn.kernels import codebooks


def paired_names(keys: Tensor, books: Tensor) -> Tensor:
    """As `dispatch.paired_names`."""
    return codebooks.paired(codebooks.nearest(keys, books))
