"""Names of the nearest centroids, compiled by numba for the CPU: keys are turned and named while they are in cache."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.codebooks import BYTE
from sparseattn.kernels.numba_centroids import OUTPUTS, VECTORS, lay_out, multiply, nearest_centroids
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_rows import array_at, rows_at
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads

PART = 64 * VECTORS  # keys that a thread names at a time


@entry(parallel=True, cache=True, nogil=True)
def _name(keys, extent, shape, turns, moved, less, halves, double, errors, out):
    """keys: where `[B,H,n,D]` lies, and its steps of b, h and n; extent: of its storage; shape: L, H, n, S, d and
    blocks of centroids a subspace; turns, moved: `[L,D',D]` and `[L,D']`, whose outputs fill whole blocks, or empty;
    less, halves: `[L,S*K',d]` and `[L,S*K']` of centroids, as `nearest_centroids` takes them; double: whether two names
    are a byte; errors: `[L,n]` squared distances, or empty; out: `[L,R,n]`."""
    (kind, keys_at, (step_b, step_h, step_n)), (lists, heads, rows, subspaces, size, blocks) = keys, shape
    stored = array_at(kind, keys_at, extent)
    wide, outputs = subspaces * size, moved.shape[1]
    parts = (rows + PART - 1) // PART
    for work in prange(lists * parts):
        which, begin = work // parts, work % parts * PART
        at = which // heads * step_b + which % heads * step_h
        laid, turned = np.empty(wide * VECTORS, np.float32), np.empty(outputs * VECTORS, np.float32)
        places, apart, off = np.empty(VECTORS, np.int32), np.empty(VECTORS, np.float32), np.empty(VECTORS, np.float32)
        for n in range(begin, min(begin + PART, rows), VECTORS):
            left = min(VECTORS, rows - n)
            lay_out(stored, at + n * step_n, step_n, left, wide, laid)
            if outputs:
                multiply(turns[which], moved[which], outputs // OUTPUTS, laid, wide, turned)
            vectors = turned if outputs else laid
            if errors.shape[1]:
                off[:] = 0.0
                for c in range(wide):
                    for i in range(VECTORS):
                        off[i] += vectors[c * VECTORS + i] * vectors[c * VECTORS + i]
            for s in range(subspaces):
                first, begins = s * size * VECTORS, s * blocks * OUTPUTS
                nearest_centroids(less[which], halves[which], begins, blocks, vectors, first, size, places, apart)
                if errors.shape[1]:
                    for i in range(VECTORS):
                        off[i] += 2 * apart[i]
                for i in range(left):
                    if not double:
                        out[which, s, n + i] = places[i]
                    elif s % 2 == 0:
                        out[which, s // 2, n + i] = places[i]
                    else:
                        out[which, s // 2, n + i] |= places[i] << 4
            if errors.shape[1]:
                for i in range(left):
                    errors[which, n + i] = max(off[i], np.float32(0.0))


def _padded(part: Tensor, count: int, fill: float = 0.0) -> Tensor:
    """Return `part` `[..,n,d]` with as many rows more as fill whole blocks of `count`."""
    return torch.nn.functional.pad(part, (0, 0, 0, -part.shape[-2] % count), value=fill)


def _names(
    keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None, errors: Tensor | None, double: bool
) -> Tensor:
    batch, heads, rows, wide = keys.shape
    subspaces, centroids, size = books.shape[2:]
    lists, centres = batch * heads, books.float()
    halves = _padded(centres.square().sum(-1, keepdim=True) / 2, OUTPUTS, torch.inf)  # those added are never nearest
    less = _padded(-centres, OUTPUTS)
    turns, biases = torch.empty(lists, 0), torch.empty(lists, 0)
    if turn is not None:
        parts = (turn[0], turn[1][..., None])
        turns, biases = (_padded(part.float(), OUTPUTS).flatten(0, 1).flatten(1) for part in parts)
    kind = torch.uint8 if centroids <= BYTE else torch.int16
    out = torch.empty(batch, heads, -(-subspaces // 2) if double else subspaces, rows, dtype=kind)
    if not out.numel():
        return out
    keys = keys if keys.stride(3) == 1 else keys.contiguous()
    extent = sum((n - 1) * step for n, step in zip(keys.shape, keys.stride(), strict=True)) + 1
    shape = (lists, heads, rows, subspaces, size, less.shape[3] // OUTPUTS)
    with ONE_AT_A_TIME:
        use_threads(lists * rows * wide * (centroids + (wide if turn is not None else 0)) / 16)
        _name(
            rows_at(keys), extent, shape, turns.numpy(), biases.numpy(),
            less.flatten(0, 1).flatten(1).numpy(), halves.flatten(0, 1).flatten(1).numpy(), double,
            (halves.new_empty(lists, 0) if errors is None else errors.view(lists, rows)).numpy(),
            out.flatten(0, 1).numpy(),
        )  # fmt: skip
    return out


def names(
    keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None, errors: Tensor | None = None
) -> Tensor:
    """As `dispatch.names`."""
    return _names(keys, books, turn, errors, False)


def paired_names(
    keys: Tensor, books: Tensor, turn: tuple[Tensor, Tensor] | None = None, errors: Tensor | None = None
) -> Tensor:
    """As `dispatch.paired_names`."""
    return _names(keys, books, turn, errors, True)
