"""Keys of a few bits: codes, and the levels that groups of rows share.

A group of `rows` consecutive rows shares, for each channel, a lowest level and a step (as KIVI stores keys,
https://arxiv.org/abs/2402.02750); a row keeps a code of 1, 2 or 4 bits a channel, and its key is read as
`low + step * code`. Groups by channel and not by row, because keys have channels far larger than others. Levels are
floats of 16 bits, or of 8 bits on a grid (`level_grid`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparseattn.kernels.quantized_keys import level_grid, packing


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedKeys:
    """N keys of a few bits, views of storage.

    Args:
        codes: `[B,H,N/rows,rows*4W]` uint8, see `packing`.
        low, step: `[B,H,N/rows,D]`, a group's zero points (the level of code 0) and scales, of 16 bits or, on a grid,
            int8 and uint8.
        bits: of a code, 1, 2 or 4.
        valid: `[B,N]` bool, which rows are there and no padding; None where nobody scores them, and in a store.
        grid: `[B,H,3,D]` float32, what levels of 8 bits stand for; None: they have 16.

    In a store that sequences share, as a serving engine's blocks do, codes and levels are `[entries,H,..]`, and a table
    says which entry is whose.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    bits: int
    valid: Tensor | None = None
    grid: Tensor | None = None

    @property
    def size(self) -> int:
        """D."""
        return self.low.shape[-1]

    @property
    def groups(self) -> int:
        """How many groups share levels."""
        return self.low.shape[2]

    @property
    def group_rows(self) -> int:
        """The rows of a group."""
        return packing.rows_of(self.codes, self.size, self.bits)

    @property
    def mask(self) -> Tensor:
        """`valid`, of keys that are scored."""
        assert self.valid is not None, "keys that are scored say which rows are valid"
        return self.valid

    def shared_by(self, batch: int, valid: Tensor | None = None) -> QuantizedKeys:
        """Return a store's entries as `[B,H,entries,..]` of so many sequences, a view."""
        codes, low, step = (
            part.transpose(0, 1)[None].expand(batch, -1, -1, -1) for part in (self.codes, self.low, self.step)
        )
        return QuantizedKeys(codes, low, step, self.bits, valid)

    def decoded(self) -> Tensor:
        """Return the keys that codes and levels stand for, `[B,H,N,D]` float32."""
        codes = packing.unpack(self.codes, self.bits, self.size)
        codes = codes.unflatten(2, (self.groups, -1)).float()  # [B,H,N/rows,rows,D]
        low, step = level_grid.read(self.low, self.step, self.grid)
        return (codes * step[:, :, :, None] + low[:, :, :, None]).flatten(2, 3)
