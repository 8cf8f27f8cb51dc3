"""Rotary position embedding as a value: rotates vectors by their positions and takes the rotation back.

RoFormer, https://arxiv.org/abs/2104.09864. Scaled variants (linear, Llama-3, YaRN) differ in their frequencies and in a
factor on the rotated part, so the model's own frequencies describe them all; variants whose frequencies change with
the length of the sequence (dynamic NTK, Phi-3's LongRoPE) have no single `Rope`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 256  # positions of `products_below` at once


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation that one layer applies to its queries and keys.

    Args:
        inv_freq: `[R/2]` float32, radians per position of each pair. R <= D: dimensions R and up pass unchanged
            (partial rotary).
        scaling: factor on the rotated dimensions, `attention_scaling` of the YaRN kind; 1 elsewhere.
        interleaved: pairs are (0, 1), (2, 3), ... as in GPT-J, GLM and Cohere; otherwise (0, R/2), (1, R/2+1), ... as
            in Llama.

    Raises:
        ValueError: frequencies that are not one finite float32 vector, or a scaling that cannot be undone.
    """

    inv_freq: Tensor
    scaling: float = 1.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.inv_freq.ndim != 1 or self.inv_freq.dtype != torch.float32 or not len(self.inv_freq):
            raise ValueError(
                f"a rope's inv_freq is a float32 vector [R/2], got {self.inv_freq.dtype} {list(self.inv_freq.shape)}"
            )
        if not self.inv_freq.isfinite().all():
            raise ValueError(f"a rope's inv_freq is finite, got {self.inv_freq.tolist()}")
        if not isinstance(self.scaling, (int, float)) or not 0 < self.scaling < math.inf:
            raise ValueError(f"a rope's scaling is positive and finite, got {self.scaling!r}")
        if not isinstance(self.interleaved, bool):
            raise ValueError(f"a rope's interleaved is True or False, got {self.interleaved!r}")

    @classmethod
    def of(cls, size: int, theta: float = 10000.0) -> Rope:
        """Return the unscaled rope of base `theta` over `size` dimensions (even)."""
        if size < 2 or size % 2:
            raise ValueError(f"rope rotates pairs of dimensions, so their number is even, got {size}")
        if not 0 < theta < math.inf:
            raise ValueError(f"a rope's theta is positive and finite, got {theta}")
        return cls(1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size))

    def equals(self, other: Rope) -> bool:
        """Whether it is the same rotation, to the bit."""
        alike = (self.scaling, self.interleaved) == (other.scaling, other.interleaved)
        return alike and torch.equal(self.inv_freq, other.inv_freq)

    @property
    def rotated(self) -> int:
        """R, the dimensions that turn."""
        return 2 * len(self.inv_freq)

    def check_size(self, size: int) -> None:
        """Refuse keys of `size` dimensions where it turns more: ValueError."""
        if size < self.rotated:
            raise ValueError(f"the layer's RoPE turns {self.rotated} dimensions, and its keys have {size}")

    def to(self, device: torch.device) -> Rope:
        """Return it with its frequencies on a device."""
        return replace(self, inv_freq=self.inv_freq.to(device))

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` `[...,T,D]` turned by `positions` (`[T]`, or any shape that broadcasts to `[...,T]`); x's dtype."""
        return self._turn(x, positions, self.scaling, 1)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the inverse of `rotate`, to the rounding of x's dtype."""
        return self._turn(x, positions, 1 / self.scaling, -1)

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """`x` with RoPE as it is so many positions later (`by`, as `rotate` takes positions): without `scaling`."""
        return self._turn(x, by, 1.0, 1)

    def take_off(self, x: Tensor, vector: Tensor, positions: Tensor) -> None:
        """Take from `x` `[...,T,D]` float32, in place, a vector `[...,D]` float32 that is turned to each position as
        `turn` does (`positions` as `rotate` takes them). No turned copies are made."""
        cos, sin = self.cos_sin(positions, x.device)
        a, b = (part[..., None, :] for part in self._pairs(vector).unbind(-1))
        first, second = self._pairs(x).unbind(-1)
        first.addcmul_(a, cos, value=-1).addcmul_(b, sin)
        second.addcmul_(a, sin, value=-1).addcmul_(b, cos, value=-1)
        x[..., self.rotated :] -= vector[..., None, self.rotated :]

    def cos_sin(
        self, positions: Tensor, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """`[...,T,R/2]` of `dtype` each, without `scaling`.

        An angle is one float32 product, as in the models: at position 131,072 it is up to 0.004 radians off the exact
        one, but off in the same way, so that unrotating takes back the very rotation that the model applied. Angles in
        float64 would be nearer to the formula and further from the model.
        """
        device = positions.device if device is None else device
        angle = (positions.to(device, torch.float32)[..., None] * self.inv_freq.to(device)).to(dtype)
        return angle.cos(), angle.sin()

    def products_at(self, query: Tensor, x: Tensor, positions: Tensor) -> Tensor:
        """Return the products of queries with `x` as it is turned to positions, without `scaling`.

        Args:
            query: `[B,H,G,D]`.
            x: `[B,H,D]`.
            positions: `[B,n]` int64.

        Returns:
            `[B,H,G,n]` float32.
        """
        across, along, rest = self._met(query, x)
        cos, sin = self.cos_sin(positions[:, None], query.device)  # [B,1,n,R/2]
        return across @ cos.mT + along @ sin.mT + rest

    def products_below(self, query: Tensor, x: Tensor, count: int) -> Tensor:
        """Return what `products_at` does, for the positions from 0 to `count`: as one matrix product, since a rotation
        by a position is one by a multiple of 256 and one by what is left. `[B,H,G,count]` float32."""
        across, along, rest = self._met(query, x)
        blocks = torch.arange(0, max(count, 1), BLOCK, device=query.device)
        cos, sin = self.cos_sin(blocks, query.device)  # [n/256,R/2]
        across, along = across[..., None, :], along[..., None, :]
        turned = torch.cat([across * cos + along * sin, along * cos - across * sin], -1)  # [B,H,G,n/256,R]
        within = torch.cat(self.cos_sin(torch.arange(min(BLOCK, max(count, 1)), device=query.device)), -1)  # [256,R]
        return (turned @ within.mT).flatten(-2)[..., :count] + rest

    def bounds(self, query: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the least and the largest that `products_at` can be at any position, `[B,H,G]` float32 each."""
        across, along, rest = self._met(query, x)
        reach = torch.hypot(across, along).sum(-1)
        return rest[..., 0] - reach, rest[..., 0] + reach

    def _met(self, query: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the cosine and the sine of each pair's angle count for in `products_at`, `[B,H,G,R/2]` each, and
        what does not turn `[B,H,G,1]`."""
        (a, b), (c, d) = (self._pairs(part.float()).unbind(-1) for part in (query, x[:, :, None]))
        rest = (query[..., self.rotated :].float() * x[:, :, None, self.rotated :].float()).sum(-1, keepdim=True)
        return a * c + b * d, b * c - a * d, rest

    def _pairs(self, x: Tensor) -> Tensor:
        """Return the pairs of `x` `[...,D]`, `[...,R/2,2]`, a view."""
        part = x[..., : self.rotated]
        return part.unflatten(-1, (-1, 2)) if self.interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)

    def _turn(self, x: Tensor, positions: Tensor, factor: float, sign: int) -> Tensor:
        size = self.rotated
        if x.shape[-1] < size:
            raise ValueError(f"this rope rotates {size} dimensions, the vectors have {x.shape[-1]}")
        pairs = self._pairs(x.to(torch.promote_types(x.dtype, torch.float32)))
        cos, sin = self.cos_sin(positions, x.device, pairs.dtype)
        cos, sin = cos * factor, sin * (sign * factor)
        a, b = pairs.unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
        if not self.interleaved:
            turned = turned.transpose(-1, -2)
        return torch.cat((turned.flatten(-2).to(x.dtype), x[..., size:]), -1)
