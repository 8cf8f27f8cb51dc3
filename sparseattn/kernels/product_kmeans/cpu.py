"""k-means of the parts of keys, compiled by numba for the CPU: every part of every head is one thread's work."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_centroids import FEW, OUTPUTS, VECTORS, add_scaled, lay_out, nearest_centroids
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.product_kmeans.reference import NEAR, ROUNDS

FAR = np.float32(np.inf)  # half the squared length of a centroid that is none: it is nearest to nothing


@njit
def _taken_from_0(books, size, centroids, less, halves):
    """Write centroids `books` `[K*d]` taken from 0, and half their squared lengths."""
    for k in range(len(halves)):
        half = np.float32(0)
        for c in range(size):
            x = books[k * size + c] if k < centroids else np.float32(0)
            less[k * size + c] = -x
            half += x * x
        halves[k] = half / 2 if k < centroids else FAR


@njit
def _split(books, size, counts):
    """Give each centroid without a vector a place near the mean of a full one: of the fullest first, of each once."""
    taken = np.zeros(len(counts), np.bool_)
    for k in range(len(counts)):
        if counts[k] == 0:
            fullest = 0
            while taken[fullest]:
                fullest += 1
            for other in range(fullest + 1, len(counts)):
                if not taken[other] and counts[other] > counts[fullest]:
                    fullest = other
            taken[fullest] = True
            for c in range(size):
                books[k * size + c] = books[fullest * size + c] * NEAR


@entry(parallel=True, cache=True, nogil=True)
def _kmeans(keys, weights, heads, count, subspaces, size, centroids, books):
    """keys: `[H*n*S*d]`; weights: `[H*n]`; books: `[H*S,K*d]`, first centroids that become the last ones."""
    blocks, fours = (centroids + OUTPUTS - 1) // OUTPUTS, size // FEW
    tiles = (count + VECTORS - 1) // VECTORS
    for work in prange(heads * subspaces):
        head, part = work // subspaces, work % subspaces
        book, mine = books[work], np.empty(count * size, np.float32)
        laid = np.empty((tiles, size * VECTORS), np.float32)
        for n in range(count):
            for c in range(size):
                mine[n * size + c] = keys[((head * count + n) * subspaces + part) * size + c]
        for tile in range(tiles):
            lay_out(mine, tile * VECTORS * size, size, count - tile * VECTORS, size, laid[tile])
        less, halves = np.empty(blocks * OUTPUTS * size, np.float32), np.empty(blocks * OUTPUTS, np.float32)
        names, places, apart = np.full(count, -1, np.int32), np.empty(VECTORS, np.int32), np.empty(VECTORS, np.float32)
        totals, counts = np.empty(centroids * size, np.float32), np.empty(centroids, np.float32)
        for _ in range(ROUNDS):
            _taken_from_0(book, size, centroids, less, halves)
            moved = 0
            for tile in range(tiles):
                nearest_centroids(less, halves, 0, blocks, laid[tile], 0, size, places, apart)
                for n in range(tile * VECTORS, min(tile * VECTORS + VECTORS, count)):
                    name = places[n - tile * VECTORS]
                    moved |= name ^ names[n]
                    names[n] = name
            # In a loop of its own: a sum whose place is known late is taken up too early, and then again.
            totals[:] = 0
            counts[:] = 0
            for n in range(count):
                name, weight = names[n], weights[head * count + n]
                counts[name] += weight
                add_scaled(totals, name * size, mine, n * size, weight, fours)
                for c in range(fours * FEW, size):
                    totals[name * size + c] += weight * mine[n * size + c]
            for k in range(centroids):
                for c in range(size):
                    book[k * size + c] = totals[k * size + c] / counts[k] if counts[k] > 0 else 0
            _split(book, size, counts)
            if moved == 0:
                break


def product_kmeans(keys: Tensor, first: Tensor, weights: Tensor) -> Tensor:
    """As `reference.product_kmeans`."""
    heads, subspaces, centroids, size = first.shape
    books = first.float().clone(memory_format=torch.contiguous_format)
    flat = (part.float().contiguous().numpy().reshape(-1) for part in (keys, weights))
    count = keys.shape[1]
    with ONE_AT_A_TIME:
        use_threads(heads * count * subspaces * size * centroids * ROUNDS)
        _kmeans(*flat, heads, count, subspaces, size, centroids, books.flatten(0, 1).flatten(1).numpy())
    return books
