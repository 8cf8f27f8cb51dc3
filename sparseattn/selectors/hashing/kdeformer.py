"""KDEformer's hash: rows in the order of their keys' sign bits as a Gray code, cut into equal bins.

https://arxiv.org/abs/2302.02451, as in Figure 5 of SAAP, https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

from torch import Tensor

from sparseattn.selectors.checks import check_least
from sparseattn.selectors.hashing.bins import Binned
from sparseattn.selectors.hashing.projection_base import packed


class KDEformer(Binned):
    """Reads the rows of the bin into which the query's sign bits fall, and of its neighbours on both sides.

    A key's products with `bits` random directions give as many signs. They are read as a Gray code: the hash is the
    code's rank, and codes of consecutive ranks differ in one sign. The query visits its own bin, and its neighbours
    evenly on both sides as far as the budget goes: the budget's rows around its own bin. A budget below a bin reads the
    middle of it. Where several rows have the query's signs, the middle one is its place.

    Args:
        bits: signs of a hash, 1 to 30; with many of them few rows have the same.
        rows: of a bin; 0: as many as the budget, so that a query reads its own bin alone, as in SAAP's Figure 5.
        seed: of the directions, any integer.

    Departures. The paper estimates the matrix product of a whole prefill: it also samples columns by their norm, and
    queries are sorted and binned as keys are. As SAAP does, this takes its hash alone, for single queries. Neighbours
    are ours (SAAP visits one bin). In the authors' code, KDEformer's and HyperAttention's, signs are mapped by the Gray
    code itself, not by its inverse, so that consecutive buckets differ in up to several signs; here the order is the
    one that the papers describe. See `Binned` for how rows of later seals come in and what it costs.
    """

    def __init__(self, bits: int = 16, rows: int = 64, seed: int = 0) -> None:
        check_least(bits=(bits, 1))
        if bits > 30:
            raise ValueError(f"bits is 30 or less, which keeps a hash in 4 bytes, got {bits}")
        super().__init__(rows, seed)
        self.bits = bits

    @property
    def count(self) -> int:
        return self.bits

    def hashed(self, x: Tensor) -> Tensor:
        return gray_rank(packed(self.projected(x) > 0))

    def begin(self, low: Tensor, high: Tensor, valid: Tensor, rows: int, take: Tensor) -> Tensor:
        own = ((low + high) // 2).minimum(valid - 1).clamp(min=0) // rows * rows  # where its bin begins
        length = (valid - own).clamp(max=rows)
        return (own + (length - take) // 2).minimum(valid - take).clamp(min=0)


def gray_rank(code: Tensor) -> Tensor:
    """Return which number, counted from 0, each `code` (int32, not negative) is in the reflected Gray code: `[..]`
    int32."""
    for shift in (1, 2, 4, 8, 16):
        code = code ^ (code >> shift)
    return code
