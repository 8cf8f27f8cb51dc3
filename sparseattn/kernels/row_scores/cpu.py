"""Products of query heads with every key, compiled by numba for the CPU: each key is read once, at its stored size."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, as_bits, dot, dot4, flat_rows, read
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

PART = 512  # rows that a thread scores at a time


@njit(fastmath=set(FAST))
def scores_of_part(query, share, size, keys, at, step, first, last, out):
    """`out[:, first:last]` of `[G,N]`; query: `[G*D]` float32."""
    for n in range(first, last):
        row = at + n * step
        for g in range(0, share & ~3, 4):
            out[g, n], out[g + 1, n], out[g + 2, n], out[g + 3, n] = dot4(query, g * size, keys, row, size)
        for g in range(share & ~3, share):
            out[g, n] = dot(query, g * size, keys, row, size)


@entry(parallel=True, cache=True, nogil=True)
def _row_scores(query, keys, steps, heads, out):
    """query: `[B*H,G*D]`, stored numbers; out: `[B*H,G,N]` float32."""
    lists, share, rows = out.shape
    parts = (rows + PART - 1) // PART
    for work in prange(lists * parts):
        which, first = work // parts, work % parts * PART
        flat, own = query[which], np.empty(query.shape[1], np.float32)
        for d in range(len(own)):
            own[d] = read(flat, d)
        at = which // heads * steps[0] + which % heads * steps[1]
        scores_of_part(own, share, len(own) // max(share, 1), keys, at, steps[2], first, min(first + PART, rows),
                        out[which])  # fmt: skip


def row_scores(query: Tensor, keys: Tensor) -> Tensor:
    """As `dispatch.row_scores`."""
    (batch, heads, share, size), rows = query.shape, keys.shape[2]
    out = torch.empty(batch, heads, share, rows)
    flat, steps = flat_rows(keys)
    with ONE_AT_A_TIME:
        use_threads(out.numel() * size)
        _row_scores(as_bits(query).reshape(batch * heads, -1), flat, steps, heads, out.flatten(0, 1).numpy())
    return out
