"""The Walsh-Hadamard transform along the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def walsh_hadamard(x: Tensor) -> Tensor:
    """Return `[..,n]`: `x` `[..,n]`, n a power of two, by the Hadamard matrix of Sylvester's order, not normalised.

    Sums and differences of single numbers, so that no number depends on what else is turned.
    """
    size, step = x.shape[-1], 1
    while step < size:
        low, high = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x, step = torch.stack([low + high, low - high], -2).flatten(-3), 2 * step
    return x
