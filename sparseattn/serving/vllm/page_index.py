"""The index of one layer of an engine: the entries of a page selector by place in the cache, shared by all requests."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, BoundedPages, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks, attend_bounded, write_bounds
from sparseattn.selectors.base import Selector
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm.block_tails import BlockTails

AT_ONCE = 1024  # entries whose keys are unpacked together


class Store:
    """Entries of every place of a cache.

    Args:
        selector: says what an entry is.
        places: entries in all, blocks times entries of a block.
        heads, size, dtype, device: of keys.

    Attributes:
        means: what stands for rows that are not read; None: nothing does.
    """

    means: MeanRows | None = None

    def __init__(
        self, selector: PageSelector, places: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.selector = selector
        entry = selector.entries(torch.zeros(1, heads, selector.unit, size, dtype=dtype, device=device))
        self.entries = {
            name: torch.zeros(heads, places, *part.shape[3:], dtype=part.dtype, device=device).transpose(0, 1)
            for name, part in entry.items()  # a head's lie one after the other: who scores them reads head by head
        }
        voted = selector.bounds_at(self.entries, size)
        fits = voted is not None and selector.unit == selector.page and voted.bounds.minimum.dtype == dtype
        self.voted = voted if fits else None
        self._bounded: BoundedPages | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(part.nbytes for part in self.entries.values())

    def update(self, places: Tensor, keys: Tensor, first: Tensor | None = None) -> None:
        """Compute entries from the keys of their rows.

        Args:
            places: `[n]` int64.
            keys: `[n,H,unit,D]`.
            first: `[n]` int64, the position of each entry's first row; None: not known, as methods of pages allow.
        """
        count, heads, rows, size = keys.shape
        keys = keys.transpose(0, 1).contiguous().view(1, heads, count * rows, size)
        if first is None and type(self.selector).entries_at is not PageSelector.entries_at:
            raise ValueError(f"{self.selector.label()} needs the positions of rows, which are not known here")
        made = self.selector.entries(keys) if first is None else self.selector.entries_at(keys, first)
        for name, part in made.items():
            self.entries[name][places] = part[0].transpose(0, 1)

    def update_from(self, cache: BlockCache, places: Tensor, first: Tensor) -> None:
        """Compute the entries at `places` from the cache's keys; see `update`."""
        unit = self.selector.unit
        if self.voted is not None and self.voted.of_keys and unit % 16 == 0:
            write_bounds(cache, self.voted.bounds, places, unit)
            return
        for some, at in zip(places.split(AT_ONCE), first.split(AT_ONCE), strict=True):
            self.update(some, cache.keys(some, unit), at)

    def scores(self, query: Tensor, table: Tensor) -> Tensor:
        """`PageSelector.scores_at` of these entries."""
        return self.selector.scores_at(query, self.entries, table)

    def attend(self, query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, count: Any, scale: float) -> None:
        """Choose pages and attend to them, in one call where the method's scores are bounds, see `attend_blocks`."""
        if self.voted is not None:
            if self._bounded is None or self._bounded.cache is not cache:
                self._bounded = BoundedPages(cache, self.voted)
            attend_bounded(query, out, self._bounded, pages, count, scale)
            return
        scores = self.scores(self.grouped(query, cache, pages), pages.table)
        attend_blocks(query, out, cache, pages, scores, count, scale)

    @staticmethod
    def grouped(query: Tensor, cache: BlockCache, pages: StepPages) -> Tensor:
        """Return the queries `[R,H,G,D]` of a step's tokens, of `[T,H*G,D]`."""
        tokens = query if len(pages.tokens) == len(query) else query[pages.tokens]
        return tokens.unflatten(1, (cache.packed.shape[1], -1))

    def best(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        """`PageSelector.best_at` of these entries."""
        return self.selector.best_at(query, self.entries, table, count)


def entry_bytes(selector: Selector, heads: int, size: int, dtype: torch.dtype) -> int:
    """Bytes of one entry of all heads; 0 for a method without any."""
    if not isinstance(selector, PageSelector):
        return 0
    entry = selector.entries(torch.zeros(1, heads, selector.unit, size, dtype=dtype))
    means = selector.mean_bytes(size) if isinstance(selector, BlockTails) else 0
    return heads * (means + sum(math.prod(part.shape[3:]) * part.element_size() for part in entry.values()))
