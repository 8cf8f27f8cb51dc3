"""What methods share that rank rows by the Hamming distance of learned hash codes."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.parameters.learned_index import NIBBLE, nibbles_of_signs, sign_tables
from sparseattn.selectors.tokens.learned_base import LearnedCodes

GROUPS = ("sum", "max", "each")


class SignCodes(LearnedCodes):
    """Reads the rows whose codes, the signs of what maps make of keys, differ from the query's in the fewest bits.

    Distances are no logits, so nothing is said of what rows weigh.

    Attributes:
        width: bits of a code, a multiple of 8.
    """

    width: int

    def __init__(self, artefact: str, bits: int, seed: int, group: str) -> None:
        if bits < 0 or bits % 8:
            raise ValueError(f"bits is a multiple of 8, or 0, got {bits}")
        if group not in GROUPS:
            raise ValueError(f"group is one of {', '.join(GROUPS)}, got {group!r}")
        self.bits = bits
        super().__init__(artefact, seed, group)

    @abstractmethod
    def of_keys(self, keys: Tensor) -> Tensor:
        """Return what the signs are taken of, `[B,H,n,width]`, for keys `[B,H,n,D]` float32."""

    @abstractmethod
    def of_queries(self, query: Tensor) -> Tensor:
        """Return the same `[B,H,G,width]` for queries `[B,H,G,D]` float32."""

    def has(self, ability: type) -> bool:
        return super().has(ability) and ability is not EstimatesMass

    def why_not_compared(self) -> str | None:
        return None  # without a file its maps are drawn, the same everywhere

    def subspaces(self, size: int) -> int:
        return self.width // NIBBLE

    def named(self, keys: Tensor) -> Tensor:
        return nibbles_of_signs(self.of_keys(keys))

    def tables(self, query: Tensor) -> Tensor:
        return sign_tables(torch.where(self.of_queries(query) > 0, 0.5, -0.5))
