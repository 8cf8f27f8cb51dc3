"""Products of query heads with listed keys, compiled by numba for the CPU: keys are read where they lie."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, dot, fetch, flat_rows
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

AHEAD = 32  # keys asked for before their turn: they lie anywhere in memory


@njit(fastmath=set(FAST))
def _listed(query, keys, base, step, ids, out):
    size, listed = query.shape[0], ids.shape[0]
    for i in range(listed):
        if i + AHEAD < listed and ids[i + AHEAD] >= 0:
            fetch(keys, base + ids[i + AHEAD] * step, size)
        again = ids[i] < 0 or (i > 0 and ids[i] == ids[i - 1])
        out[i] = -np.inf if again else dot(query, 0, keys, base + ids[i] * step, size)


@entry(parallel=True, cache=True, nogil=True)
def _listed_scores(query, keys, steps, ids, out):
    batch, heads, group = query.shape[:3]
    for unit in prange(batch * heads * group):
        b, s = unit // (heads * group), unit % (heads * group)
        h = s // group
        _listed(query[b, h, s % group], keys, b * steps[0] + h * steps[1], steps[2], ids[b, s], out[b, s])


def scores(query: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """As `dispatch.listed_scores`."""
    out = torch.empty(ids.shape)
    flat, steps = flat_rows(keys)
    with ONE_AT_A_TIME:
        use_threads(ids.numel() * query.shape[3])
        _listed_scores(query.float().contiguous().numpy(), flat, steps, ids.contiguous().numpy(), out.numpy())
    return out
