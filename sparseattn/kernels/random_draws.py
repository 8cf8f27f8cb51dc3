"""Random numbers that a seed decides, the same on every device and in every batch; the global generator is not used."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def streams(seed: int, layer: int, heads: Sequence[int], device: torch.device) -> Tensor:
    """Return `[A]` int64: where the draws of each of these heads of a layer begin.

    Args:
        seed: any integer.
        heads: A numbers of heads of the layer, see `Selector.numbers`.
    """
    head = _numbers(tuple(heads), device)
    return _mix(_mix(_mix(torch.full_like(head, _signed(seed % (1 << 64)))) + layer) + head)


def draws(stream: Tensor, positions: Tensor, at: Tensor) -> Tensor:
    """Return a draw for every query and row: a hash of stream, position of the query and position of the row.

    It does not depend on the batch, on padding or on how the rows were appended.

    Args:
        stream: `[A]` int64, of `streams`.
        positions: `[B]` int64, of the queries.
        at: `[B,N]` int64, of the rows.

    Returns:
        `[B,A,N]` int64, of all 64 bits.
    """
    return _mix(_mix(stream + positions[:, None])[..., None] + at[:, None])


def places_drawn(stream: Tensor, positions: Tensor, count: Tensor, places: int) -> Tensor:
    """Return places drawn without replacement, at a cost that follows from those drawn and not from those there are.

    A Feistel network permutes the numbers below a power of two, which is 256 or less than twice `count`. The first of
    its images that are below `count` are drawn. `tries(places)` are computed: all 256, or somewhat more than twice as
    many as are drawn, so that it is less probable than 1e-20 that they are too few.

    Args:
        stream: `[A]` int64, of `streams`.
        positions: `[B]` int64, of the queries.
        count: `[B]` int64, 0 or more: of the places there are.
        places: to draw, 1 or more.

    Returns:
        `[B,A,places]` int64, distinct and below `count`; -1 where a sequence has fewer.
    """
    bits = torch.frexp((count - 1).clamp(min=255).double()).exponent.long()[:, None, None]  # of the greatest number
    low = bits // 2
    number = torch.arange(tries(places), device=count.device)
    key = _mix(stream + positions[:, None])[..., None]  # [B,A,1]
    right, left = number & ((1 << low) - 1), number >> low
    ones = (1 << bits) - 1 >> low, (1 << low) - 1
    for mask in ones * 3:  # each of the two is changed by the other in turn
        key = key * _signed(0xBF58476D1CE4E5B9) + _GOLDEN
        left, right = right, left ^ _scattered(right, key).bitwise_and_(mask)
    image = (left << low) | right  # after six turns each is in its place again
    there = (image < count[:, None, None]) & (number >> bits == 0)
    place = there.cumsum(2).sub_(1)
    place = torch.where(there & (place < places), place, places)
    return image.new_full((*image.shape[:2], places + 1), -1).scatter_(2, place, image)[..., :places]


def tries(places: int) -> int:
    """Return how many images of a permutation `places_drawn` computes."""
    return max(256, 2 * places + 16 * math.isqrt(places) + 64)


def directions(seed: int, layer: int, heads: Sequence[int], size: int, count: int) -> Tensor:
    """`[A,size,count]` float32 on the CPU: `count` directions of each of A heads, of independent normal numbers.

    The numbers are rounded to bfloat16, as models that hash keep them.
    """
    drawn = torch.empty(len(heads), size, count)
    for head, stream in enumerate(streams(seed, layer, heads, torch.device("cpu")).tolist()):
        generator = torch.Generator().manual_seed(stream)
        drawn[head] = torch.randn(size, count, generator=generator).bfloat16()
    return drawn


@functools.lru_cache(maxsize=4)
def one_set(seed: int, size: int, count: int, device: torch.device) -> Tensor:
    """`[size,count]` float32 on `device`: directions that all heads and layers have in common, held once.

    They are those that `directions` gives head 0 of layer 0. Nobody writes into them.
    """
    with torch.inference_mode(False):  # a training step may use what inference has made
        return directions(seed, 0, [0], size, count)[0].to(device)


@functools.lru_cache(maxsize=256)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `[A]` int64 on `device`, held once: a CUDA graph may not copy what only the host has."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=torch.int64, device=device)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _scattered(x: Tensor, key: Tensor) -> Tensor:
    """Return the upper 32 bits of a hash of `x` with `key`, the sign before them."""
    x = (x + key).mul_(_signed(0xBF58476D1CE4E5B9))
    x ^= x >> 32
    return x.mul_(_signed(0x94D049BB133111EB)) >> 32


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
