"""The index of one layer of an engine: the entries of a page selector by place in the cache, shared by all requests."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.selectors.base import Selector
from sparseattn.selectors.pages.base import PageSelector


class Store:
    """Entries of every place of a cache.

    Args:
        selector: says what an entry is.
        places: entries in all, blocks times entries of a block.
        heads, size, dtype, device: of keys.
    """

    def __init__(
        self, selector: PageSelector, places: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.selector = selector
        entry = selector.entries(torch.zeros(1, heads, selector.unit, size, dtype=dtype, device=device))
        self.entries = {
            name: torch.zeros(heads, places, *part.shape[3:], dtype=part.dtype, device=device).transpose(0, 1)
            for name, part in entry.items()  # a head's lie one after the other: who scores them reads head by head
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(part.nbytes for part in self.entries.values())

    def update(self, places: Tensor, keys: Tensor) -> None:
        """Compute the entries at `places` `[n]` from the keys `[n,H,unit,D]` of their rows."""
        count, heads, rows, size = keys.shape
        made = self.selector.entries(keys.transpose(0, 1).contiguous().view(1, heads, count * rows, size))
        for name, part in made.items():
            self.entries[name][places] = part[0].transpose(0, 1)

    def scores(self, query: Tensor, table: Tensor) -> Tensor:
        """`PageSelector.scores_at` of these entries."""
        return self.selector.scores_at(query, self.entries, table)

    def best(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        """`PageSelector.best_at` of these entries."""
        return self.selector.best_at(query, self.entries, table, count)


def entry_bytes(selector: Selector, heads: int, size: int, dtype: torch.dtype) -> int:
    """Bytes of one entry of all heads; 0 for a method without any."""
    if not isinstance(selector, PageSelector):
        return 0
    entry = selector.entries(torch.zeros(1, heads, selector.unit, size, dtype=dtype))
    return sum(math.prod(part.shape[3:]) * heads * part.element_size() for part in entry.values())
