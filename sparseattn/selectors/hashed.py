"""What selectors share that hash keys and queries by random directions, which a seed decides."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

import torch
from torch import Tensor

from sparseattn.rope import Rope
from sparseattn.selectors.base import Selector
from sparseattn.selectors.draws import directions

Self = TypeVar("Self", bound="Hashed")


class Hashed(Selector):
    """Projects keys and queries on random directions, which each KV head of each layer has of its own.

    The directions are normal numbers of 16 bits, drawn from (seed, layer, head): clones and later runs have the same
    ones. They are made with the first rows, when the shape of a head is known.
    """

    late = ("directions",)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.directions: Tensor | None = None  # [H,D,R] bfloat16

    @property
    @abstractmethod
    def count(self) -> int:
        """R, directions of a KV head."""

    def for_layer(self: Self, layer: int, rope: Rope | None = None) -> Self:
        fresh = super().for_layer(layer, rope)
        fresh.directions = None
        return fresh

    def draw(self, keys: Tensor) -> None:
        """Makes the directions for keys `[B,H,n,D]`, unless they are there."""
        _, heads, _, size = keys.shape
        held = self.directions
        if held is None or held.shape[:2] != (heads, size):
            held = directions(self.seed, self.layer, self.numbers(heads), size, self.count)
        self.directions = held.to(keys.device)

    def projected(self, x: Tensor) -> Tensor:
        """`[B,H,n,R]` float32: the products of `x` `[B,H,n,D]`, keys or queries, with the directions of their head."""
        assert self.directions is not None, "directions are drawn with the first rows"
        return x.float() @ self.directions.float()

    def directions_read(self) -> int:
        """Bytes of the directions of a KV head."""
        assert self.directions is not None
        return self.directions[0].numel() * self.directions.element_size()


def packed(bits: Tensor) -> Tensor:
    """`[..]` int32: bits `[..,K]` (bool), K at most 31, as one number, the first bit the lowest."""
    word = torch.zeros(bits.shape[:-1], dtype=torch.int32, device=bits.device)
    for k in range(bits.shape[-1]):
        word |= bits[..., k].int() << k
    return word
