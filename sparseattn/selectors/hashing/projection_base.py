"""What selectors share that hash keys and queries by random directions, which a seed decides.

Letters: R directions of a KV head.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.kernels.random_draws import directions, one_set
from sparseattn.selectors.base import LayerContext, Selector


class Hashed(Selector):
    """Projects keys and queries on random directions.

    The directions are normal numbers rounded to 16 bits and kept in 32, in which products are formed. They are made
    with the first rows, when the shape of a head is known. Clones and later runs have the same ones.

    Attributes:
        shared: all KV heads of all layers have one set, drawn from the seed and held once; else each head of each layer
            has its own, drawn from (seed, layer, head).
    """

    late = ("directions",)
    shared: bool = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.directions: Tensor | None = None  # [H,D,R], or [D,R] where shared, float32

    @property
    @abstractmethod
    def count(self) -> int:
        """R, how many directions a KV head has."""

    def bind(self, context: LayerContext) -> None:
        if (context.layer, context.heads) != (self.layer, self.layer_context.heads):
            self.directions = None  # which are another layer's
        super().bind(context)

    def draw(self, keys: Tensor) -> None:
        """Make the directions for keys `[B,H,n,D]`, unless they are there."""
        _, heads, _, size = keys.shape
        made = self.directions
        if made is not None and made.shape[:-1] == ((size,) if self.shared else (heads, size)):
            self.directions = made.to(keys.device)
        elif self.shared:
            self.directions = one_set(self.seed, size, self.count, keys.device)
        else:
            drawn = directions(self.seed, self.layer, self.head_numbers(heads), size, self.count)
            self.directions = drawn.to(keys.device)

    def resume(self, keys: Tensor) -> None:
        self.draw(keys)

    def projected(self, x: Tensor) -> Tensor:
        """Return the products `[B,H,n,R]` float32 of `x` `[B,H,n,D]`, keys or queries, with the directions of their
        head."""
        assert self.directions is not None, "directions are drawn with the first rows"
        return x.float() @ self.directions

    def directions_read(self, heads: int, size: int) -> int:
        """Return the bytes of directions that each of `heads` KV heads of head_dim `size` answers for: its own, or its
        part of the shared ones."""
        return -(-4 * (1 if self.shared else heads) * size * self.count // heads)


def packed(bits: Tensor) -> Tensor:
    """Return bits `[..,K]` (bool), K at most 31, as one number each, `[..]` int32, the first bit the lowest."""
    word = torch.zeros(bits.shape[:-1], dtype=torch.int32, device=bits.device)
    for k in range(bits.shape[-1]):
        word |= bits[..., k].int() << k
    return word
