"""Names of the nearest of 16 centroids, compiled by numba for the CPU: the distances of a key's part are a register."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_centroids import nearest_centroid
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

PART = 4096  # rows that a thread names at a time


@entry(parallel=True, cache=True, nogil=True)
def _paired(keys, books, halves, rows, subspaces, size, out):
    """keys: `[L*n*S*d]`; books: `[L*S*d*16]`; halves: `[L*S*16]`, of the centroids' squared lengths; out: `[L,n,R]`."""
    lists, _, count = out.shape
    parts = (rows + PART - 1) // PART
    for work in prange(lists * parts):
        which, begin = work // parts, work % parts * PART
        for n in range(begin, min(begin + PART, rows)):
            at = (which * rows + n) * subspaces * size
            for r in range(count):
                code = 0
                for s in range(2 * r, min(2 * r + 2, subspaces)):
                    book = which * subspaces + s
                    name = nearest_centroid(keys, at + s * size, books, book * size * 16, halves, book * 16, size, 1)
                    code |= (name & 15) << 4 * (s - 2 * r)
                out[which, n, r] = code


def paired_names(keys: Tensor, books: Tensor) -> Tensor:
    """As `dispatch.paired_names`."""
    batch, heads, rows, wide = keys.shape
    subspaces, _, size = books.shape[2:]
    centres = books.float()
    halves = centres.square().sum(-1) / 2
    out = torch.empty(batch, heads, rows, -(-subspaces // 2), dtype=torch.uint8)
    flat = (part.contiguous().numpy().reshape(-1) for part in (keys.float(), centres.mT, halves))
    with ONE_AT_A_TIME:
        use_threads(batch * heads * rows * wide * 4)
        _paired(*flat, rows, subspaces, size, out.flatten(0, 1).numpy())
    return out
