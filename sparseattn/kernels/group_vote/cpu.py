"""The vote of a query group by "softmax", compiled by numba for the CPU."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, LN2, LOG2E, exp2
from sparseattn.kernels.numba_threads import EXPONENTIAL, ONE_AT_A_TIME, use_threads


@njit(fastmath={*FAST, "nnan"})
def _highest(numbers):
    highest = np.float32(-np.inf)
    for n in range(numbers.shape[0]):
        highest = max(highest, numbers[n])
    return highest


@njit(fastmath=set(FAST))
def vote_of_group(scores, out, peak):
    """Of one KV head, scores: `[G,N]`, replaced by the logarithms of probabilities; out, peak: `[N]`."""
    group, count = scores.shape
    peak[:], out[:] = -np.inf, 0
    for g in range(group):
        row, total = scores[g], np.float32(0)
        highest = _highest(row)
        if highest == -np.inf:
            continue
        for n in range(count):
            total += exp2((row[n] - highest) * LOG2E)
        norm = np.log2(total)
        for n in range(count):
            row[n] = (row[n] - highest) * LOG2E - norm  # nothing is lost where probabilities are near 1
            peak[n] = row[n] if row[n] > peak[n] else peak[n]
    for g in range(group):
        row = scores[g]
        for n in range(count):
            out[n] += exp2(row[n] - peak[n])  # of -inf next to nothing; where all are, anything
    for n in range(count):
        out[n] = (peak[n] + np.log2(out[n])) * LN2 if peak[n] > -np.inf else -np.inf


@entry(parallel=True, cache=True, nogil=True)
def _vote_softmax(scores, out, peak):
    for which in prange(len(out)):
        vote_of_group(scores[which], out[which], peak[which])


def vote_softmax(scores: Tensor) -> Tensor:
    """As `reference.vote_softmax`, of float32."""
    batch, heads, _, count = scores.shape
    given = scores.clone(memory_format=torch.contiguous_format)
    out, peak = torch.empty(2, batch, heads, count)
    with ONE_AT_A_TIME:
        use_threads(EXPONENTIAL * scores.numel())
        _vote_softmax(*(x.flatten(0, 1).numpy() for x in (given, out, peak)))
    return out
