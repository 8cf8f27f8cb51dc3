"""Linear layers of a few vectors, compiled by numba for the CPU: each weight is read once and widened in registers."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import FAST, dot, dot4, storage_of
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

OUTPUTS = 128  # computed by one part


@njit(fastmath=set(FAST))
def _outputs(x, weights, at, size, bias, relu, out, first, last):
    """Compute outputs from `first` to `last` of one head, x: `[n,D]`, weights: flat from `at` on; out: `[n,C]`."""
    count = x.shape[0]
    flat = x.reshape(-1)
    for c in range(first, last):
        row = at + c * size
        for i in range(0, count & ~3, 4):
            out[i, c], out[i + 1, c], out[i + 2, c], out[i + 3, c] = dot4(flat, i * size, weights, row, size)
        for i in range(count & ~3, count):
            out[i, c] = dot(flat, i * size, weights, row, size)
        for i in range(count):
            out[i, c] += bias[c]
            if relu and out[i, c] < 0:
                out[i, c] = 0


@entry(parallel=True, cache=True, nogil=True)
def _linear(x, weights, bias, relu, out):
    heads, outputs = bias.shape
    size = x.shape[2]
    chunks = (outputs + OUTPUTS - 1) // OUTPUTS
    for unit in prange(heads * chunks):
        a, chunk = unit // chunks, unit % chunks
        first = chunk * OUTPUTS
        _outputs(x[a], weights, a * outputs * size, size, bias[a], relu, out[a], first, min(outputs, first + OUTPUTS))


def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
    """As `dispatch.linear`."""
    out = torch.empty(*x.shape[:2], weight.shape[1])
    with ONE_AT_A_TIME:
        use_threads(x.numel() * weight.shape[1])
        _linear(x.contiguous().numpy(), storage_of(weight.contiguous()), bias.contiguous().numpy(), relu, out.numpy())
    return out
