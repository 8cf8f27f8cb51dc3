"""The cache of vLLM's CPU backend, and the pages of it that a step reads.

PagedAttention, https://arxiv.org/abs/2309.06180; `cpu_products` says what the packings are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.page_bounds.bounds import VotedBounds

PACKINGS = ("columns", "pairs")


@dataclass(frozen=True, slots=True, eq=False)
class BlockCache:
    """Keys and values of a layer in blocks, packed for the instructions of vLLM's own kernel.

    Args:
        packed: `[blocks,H,block,2*D]`, floats of any size, those of 8 bits (e4m3, e5m2) among them.
        packing: one of `PACKINGS`.
        dtype: of the rows that are read; None: that of `packed`.
        key_scale, value_scale: what the packed numbers are to be multiplied by.
    """

    packed: Tensor
    packing: str
    dtype: torch.dtype | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def block(self) -> int:
        """Rows of a block."""
        return self.packed.shape[2]

    @property
    def size(self) -> int:
        """D."""
        return self.packed.shape[3] // 2

    def keys(self, places: Tensor, rows: int) -> Tensor:
        """Return the keys `[n,H,rows,D]` of stretches of so many rows.

        Args:
            places: `[n]`, counted over all blocks.
            rows: of a stretch; a multiple of 16 that divides a block.
        """
        block, part = places // (self.block // rows), places % (self.block // rows)
        if self.packing == "columns":
            rows_read = self._half(0).unflatten(2, (self.size, -1, rows))[block, :, :, part].transpose(2, 3)
        else:
            tiles = self._half(0).unflatten(2, (-1, rows // 16, self.size // 2, 16, 2))[block, :, part]
            rows_read = tiles.transpose(3, 4).flatten(4).flatten(2, 3)  # of [n,H,rows/16,D/2,16,2]
        return self._numbers(rows_read, self.key_scale)

    def values(self, places: Tensor, rows: int) -> Tensor:
        """Return the values `[n,H,rows,D]` of stretches of rows, see `keys`."""
        block, part = places // (self.block // rows), places % (self.block // rows)
        if self.packing == "columns":
            rows_read = self._half(1).unflatten(2, (-1, rows, self.size))[block, :, part]
        else:
            tiles = self._half(1).unflatten(2, (self.size // 16, -1, rows // 2, 16, 2))[block, :, :, part]
            rows_read = tiles.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(2, 3)  # of [n,H,D/16,rows/2,16,2]
        return self._numbers(rows_read, self.value_scale)

    def _half(self, values: int) -> Tensor:
        """Return the flat packed keys (0) or values (1), `[blocks,H,block*D]`; floats of 8 bits as their bits."""
        blocks, heads, block, double = self.packed.shape
        packed = self.packed.view(torch.uint8) if self.packed.itemsize == 1 else self.packed
        return packed.view(blocks, heads, 2, block * double // 2)[:, :, values]

    def _numbers(self, rows: Tensor, scale: float) -> Tensor:
        """Return rows of `_half` as numbers of `dtype`."""
        if self.packed.itemsize == 1:
            rows = rows.contiguous().view(self.packed.dtype).float().mul_(scale)
        return rows if self.dtype is None else rows.to(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class StepPages:
    """The pages that R tokens may choose from and those that they read in any case.

    Args:
        page: rows of a page, a multiple of 16.
        unit: rows of an entry of `table`, a multiple of a page's that divides a block.
        table: `[R,E]` int32, entries to choose from, counted over all blocks; -1: none.
        always: `[R,F]` int32, pages that are read, counted likewise; -1: none. The last one that is given is the
            sequence's last.
        tails: `[R]` int32, how many rows of that there are.
        tokens: `[R]` int64, rows of the query.
        forms: what compiled code was told of the step, for its other layers.
    """

    page: int
    unit: int
    table: Tensor
    always: Tensor
    tails: Tensor
    tokens: Tensor
    forms: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class MeanRows:
    """Means of groups of a layer's rows, each of which stands for those of its rows that a query does not read: it
    weighs as many rows as these are. The estimation zone of RetroInfer, https://arxiv.org/abs/2505.02922.

    Args:
        keys, values: `[H,groups,D]`, groups counted over all blocks.
        rows: of a group, a multiple of what is chosen at once that divides an entry of `StepPages.table`.
    """

    keys: Tensor
    values: Tensor
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class BoundedPages:
    """A layer's rows, and Quest's bounds of their pages, https://arxiv.org/abs/2406.10774.

    Args:
        cache: the rows.
        voted: bounds `[places,H,D]` of the cache's dtype, by place in the cache.
        prepared: what compiled code was told of the layer, for later steps, by the factor of logits and query heads.
    """

    cache: BlockCache
    voted: VotedBounds
    prepared: dict[tuple[float, int], Any] = field(default_factory=dict)
