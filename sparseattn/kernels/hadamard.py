"""The Hadamard transform, in torch: sums and differences, which spread a large channel over all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """`[..,D]` float32: the transform of `x` `[..,D]` float32, D a power of two, in the order of Sylvester's matrix.

    It is not scaled: products of what is transformed are D times as large.
    """
    size, step = x.shape[-1], 1
    while step < size:  # sums and differences of single numbers, so that no sign depends on what else is turned
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x, step = torch.stack([low + high, low - high], -2).flatten(-3), 2 * step
    return x
