"""Places drawn at random, by the implementation that fits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

PLACES = Operation(__package__, "torch", "numba")
TURNS = 6  # of the network: each of its two halves is changed three times
FEWEST = 8  # bits of the numbers that it permutes


def places_drawn(stream: Tensor, positions: Tensor, count: Tensor, places: int, impl: str | None = None) -> Tensor:
    """Return places drawn without replacement, at a cost that follows from those drawn and not from those there are.

    A Feistel network permutes the numbers below a power of two, which is 256 or less than twice `count`. The first of
    its images that are below `count` are drawn. `tries(places)` are computed: all 256, or somewhat more than twice as
    many as are drawn, so that it is less probable than 1e-20 that they are too few.

    Args:
        stream: `[A]` int64, of `streams`.
        positions: `[B]` int64, of the queries.
        count: `[B]` int64, 0 or more: of the places there are.
        places: to draw, 0 or more.
        impl: see `implementations`.

    Returns:
        `[B,A,places]` int64, distinct and below `count`; -1 where a sequence has fewer.
    """
    return PLACES.pick(impl, count.device, torch.float32).places(stream, positions, count, places)


def tries(places: int) -> int:
    """Return how many images of a permutation `places_drawn` computes."""
    return max(256, 2 * places + 16 * math.isqrt(places) + 64)
