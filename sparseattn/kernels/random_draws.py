"""Random numbers that a seed decides, the same on every device and in every batch; the global generator is not used."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def streams(seed: int, layer: int, heads: Sequence[int], device: torch.device) -> Tensor:
    """Return `[A]` int64: where the draws of each of these heads of a layer begin. Nobody writes into it.

    Args:
        seed: any integer.
        heads: A numbers of heads of the layer, see `Selector.numbers`.
    """
    return _streams(seed, layer, tuple(heads), device)


@functools.lru_cache(maxsize=8192)
def _streams(seed: int, layer: int, heads: tuple[int, ...], device: torch.device) -> Tensor:
    """As `streams`, held once: every step asks, and a CUDA graph may not copy what only the host has."""
    with torch.inference_mode(False):
        head = torch.tensor(heads, dtype=torch.int64, device=device)
        return mix(mix(mix(torch.full_like(head, _signed(seed % (1 << 64)))) + layer) + head)


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
    return mix(mix(stream + positions[:, None])[..., None] + at[:, None])


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


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, whose products wrap around."""
    x = x + GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FACTOR
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * LAST_FACTOR
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# SplitMix64's numbers.
GOLDEN = _signed(0x9E3779B97F4A7C15)
FACTOR = _signed(0xBF58476D1CE4E5B9)
LAST_FACTOR = _signed(0x94D049BB133111EB)
