"""A layer's index by physical block, computed from an engine's cache of plain rows, as vLLM's on CUDA is."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.selectors.paged import PageSelector


class PlainIndex:
    """Entries of a layer's keys, entry `p` of the rows that lie in places `p * unit` to `(p + 1) * unit` of the cache.

    An entry is computed from the rows as they are stored, so that computing it again changes nothing: recycled blocks,
    preempted requests and blocks that requests share need no care. It says something from its last row on; before, it
    holds what the rows of the block's last owner say, and nobody may name it.

    Args:
        selector: what an entry is. It keeps nothing itself, so that layers may share it.
        block: rows of a block.

    Raises:
        ValueError: a block that does not hold whole entries.
    """

    def __init__(self, selector: PageSelector, block: int) -> None:
        if block % selector.unit:
            raise ValueError(
                f"a block of the engine holds whole entries of {selector.unit} rows ({selector!r}), got blocks of "
                f"{block}: start vLLM with --block-size {selector.unit}"
            )
        self.selector, self.block = selector, block
        self.store: dict[str, Tensor] = {}  # name -> [entries,H,..]

    def fit(self, keys: Tensor) -> None:
        """Allocates the index of a cache of keys `[blocks,H,block,D]`, anew if there was one.

        Raises:
            ValueError: blocks of another size.
        """
        blocks, heads, block, size = keys.shape
        if block != self.block:
            raise ValueError(f"the index is of blocks of {self.block} rows, got a cache with blocks of {block}")
        unit = self.selector.unit
        one = self.selector.entries(keys.new_zeros(1, heads, unit, size))
        number = blocks * (block // unit)
        self.store = {name: part.new_zeros(number, *part.shape[1:2], *part.shape[3:]) for name, part in one.items()}

    @property
    def bytes(self) -> int:
        """Of the whole index."""
        return sum(part.numel() * part.element_size() for part in self.store.values())

    def update(self, keys: Tensor, places: Tensor) -> None:
        """Computes entries anew from their rows. Shapes are those of the arguments, so that a CUDA graph may hold it.

        Args:
            keys: `[blocks,H,block,D]`, any strides but the last.
            places: `[n]` int64, entries; one may be named more than once.
        """
        unit = self.selector.unit
        each = keys.shape[2] // unit
        rows = keys.unflatten(2, (each, unit))[places // each, :, places % each]  # [n,H,unit,D]
        for name, part in self.selector.entries(rows).items():
            self.store[name][places] = part[:, :, 0]


def finished(slots: Tensor, unit: int, most: int) -> Tensor:
    """`[most]` int64: the entries whose last rows are among the places `slots` `[T]` of a step's new rows, then zeros.

    Which are finished is found on the device, how many at most the host knows: nothing waits. Place 0 is in vLLM's null
    block, which no request is given.
    """
    last = (slots >= 0) & (slots % unit == unit - 1)
    at = last.to(torch.uint8).topk(min(most, len(slots)), sorted=False).indices
    return torch.where(last[at], slots[at] // unit, 0).long()
