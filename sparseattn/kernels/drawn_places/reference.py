"""Places drawn by a Feistel network in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.drawn_places.dispatch import FEWEST, TURNS, tries
from sparseattn.kernels.random_draws import FACTOR, GOLDEN, LAST_FACTOR, mix


def places(stream: Tensor, positions: Tensor, count: Tensor, places: int) -> Tensor:
    """As `dispatch.places_drawn`."""
    greatest = (count - 1).clamp(min=(1 << FEWEST) - 1)
    bits = torch.frexp(greatest.double()).exponent.long()[:, None, None]
    low = bits // 2
    number = torch.arange(tries(places), device=count.device)
    key = mix(stream + positions[:, None])[..., None]  # [B,A,1]
    right, left = number & ((1 << low) - 1), number >> low
    ones = (1 << bits) - 1 >> low, (1 << low) - 1
    for mask in ones * (TURNS // 2):  # each of the two is changed by the other in turn
        key = key * FACTOR + GOLDEN
        left, right = right, left ^ _scattered(right, key).bitwise_and_(mask)
    image = (left << low) | right  # each is in its place again
    there = (image < count[:, None, None]) & (number >> bits == 0)
    place = there.cumsum(2).sub_(1)
    place = torch.where(there & (place < places), place, places)
    return image.new_full((*image.shape[:2], places + 1), -1).scatter_(2, place, image)[..., :places]


def _scattered(x: Tensor, key: Tensor) -> Tensor:
    """Return the upper 32 bits of a hash of `x` with `key`, the sign before them."""
    x = (x + key).mul_(FACTOR)
    x ^= x >> 32
    return x.mul_(LAST_FACTOR) >> 32
