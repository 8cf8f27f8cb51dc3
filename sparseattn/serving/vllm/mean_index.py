"""The index of a layer whose method has means for the rows that it does not read, see `block_tails`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, MeanRows, StepPages
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks
from sparseattn.selectors.checks import half
from sparseattn.serving.vllm.block_tails import BlockTails
from sparseattn.serving.vllm.page_index import AT_ONCE, Store


class TailedStore(Store):
    """Entries of the inner method, and means.

    Args:
        selector: which has both.
        places, heads, size, dtype, device: see `Store`.
    """

    def __init__(
        self, selector: BlockTails, places: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.voted = None
        self.each = selector.unit // selector.inner.unit
        self.inner = Store(selector.inner, places * self.each, heads, size, dtype, device)
        self.entries = self.inner.entries
        kept = half(torch.empty(0, dtype=dtype))
        groups = places * (selector.unit // selector.rows)
        keys, values = torch.zeros(2, heads, groups, size, dtype=kept, device=device)
        self.means: MeanRows = MeanRows(keys, values, selector.rows)
        self.groups = selector.unit // selector.rows  # of an entry

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.means.keys.nbytes + self.means.values.nbytes

    def update_from(self, cache: BlockCache, places: Tensor) -> None:
        self.inner.update_from(cache, _parts(places, self.each))
        for some in _parts(places, self.groups).split(AT_ONCE):
            for kept, read in ((self.means.keys, cache.keys), (self.means.values, cache.values)):
                kept[:, some] = read(some, self.means.rows).float().mean(2).transpose(0, 1).to(kept.dtype)

    def scores(self, query: Tensor, table: Tensor) -> Tensor:
        return self.inner.scores(query, _entries(table, self.each))

    def attend(self, query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, count: Any, scale: float) -> None:
        scores = self.scores(self.grouped(query, cache, pages), pages.table)
        attend_blocks(query, out, cache, pages, scores, count, scale, means=self.means)

    def best(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        return self.inner.best(query, _entries(table, self.each), count)


def _parts(places: Tensor, each: int) -> Tensor:
    """Return the places of the `each` parts of every entry."""
    return places if each == 1 else (places[:, None] * each + torch.arange(each, device=places.device)).flatten()


def _entries(table: Tensor, each: int) -> Tensor:
    """Return the table of the `each` parts of every entry; -1 for none."""
    if each == 1:
        return table
    parts = table[..., None] * each + torch.arange(each, dtype=table.dtype, device=table.device)
    return torch.where(table[..., None] < 0, -1, parts).flatten(1)
