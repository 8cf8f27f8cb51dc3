"""Places drawn by a Feistel network, compiled by numba for the CPU: a head stops once it has as many as it wants."""

# Kernels are compiled by numba, which takes types from the arguments.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from sparseattn.kernels.drawn_places.dispatch import FEWEST, TURNS, tries
from sparseattn.kernels.numba_cache import njit
from sparseattn.kernels.numba_entry import entry
from sparseattn.kernels.numba_threads import ONE_AT_A_TIME, use_threads
from sparseattn.kernels.random_draws import FACTOR, GOLDEN, LAST_FACTOR

WORK = 32  # multiplications that an image costs, about


@njit
def _draw(first_key, count, most, out):
    """Write the first images below `count` of the numbers below `most` and -1 behind them."""
    bits = FEWEST
    while np.int64(1) << bits < count:
        bits += 1
    low = bits // 2
    high = bits - low
    low_ones, high_ones = (np.int64(1) << low) - 1, (np.int64(1) << high) - 1
    keys = np.empty(TURNS, np.int64)
    for turn in range(TURNS):
        first_key = first_key * FACTOR + GOLDEN
        keys[turn] = first_key
    found, places = 0, out.shape[0]
    for number in range(min(most, np.int64(1) << bits)):
        right, left = number & low_ones, number >> low
        for turn in range(TURNS):
            word = (right + keys[turn]) * FACTOR
            word ^= word >> 32
            word = (word * LAST_FACTOR) >> 32
            left, right = right, left ^ (word & (low_ones if turn % 2 else high_ones))
        image = (left << low) | right
        out[found] = image  # overwritten by the next one where this is none
        found += image < count
        if found == places:
            break
    out[found:] = -1


@njit
def _mixed(x):
    """As `random_draws.mix`."""
    x += GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * LAST_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@entry(parallel=True, cache=True, nogil=True)
def _draws(stream, positions, counts, most, out):
    heads = stream.shape[0]
    for unit in prange(positions.shape[0] * heads):
        b, a = unit // heads, unit % heads
        _draw(_mixed(stream[a] + positions[b]), counts[b], most, out[b, a])


def places(stream: Tensor, positions: Tensor, count: Tensor, places: int) -> Tensor:
    """As `dispatch.places_drawn`."""
    out = torch.empty(len(positions), len(stream), places, dtype=torch.int64)
    if not places:
        return out
    with ONE_AT_A_TIME:
        use_threads(out.shape[:2].numel() * tries(places) * WORK)
        _draws(stream.numpy(), positions.contiguous().numpy(), count.contiguous().numpy(), tries(places), out.numpy())
    return out
