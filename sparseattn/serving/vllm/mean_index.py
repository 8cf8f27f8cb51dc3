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
    """Entries of the inner method, and means. Places and tables are of `selector`, whose entry may hold several of the
    inner's.

    Args:
        selector: which has both.
        places, heads, size, dtype, device: see `Store`.
    """

    def __init__(
        self, selector: BlockTails, places: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.inner_entries = selector.unit // selector.inner.unit  # of an entry
        self.groups = selector.unit // selector.rows
        super().__init__(selector.inner, places * self.inner_entries, heads, size, dtype, device)
        kept = half(torch.empty(0, dtype=dtype))
        keys, values = torch.zeros(2, heads, places * self.groups, size, dtype=kept, device=device)
        self.means: MeanRows = MeanRows(keys, values, selector.rows)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.means.keys.nbytes + self.means.values.nbytes

    def update_from(self, cache: BlockCache, places: Tensor, first: Tensor) -> None:
        rows = self.selector.unit * torch.arange(self.inner_entries, device=first.device)
        super().update_from(cache, _parts(places, self.inner_entries), (first[:, None] + rows).flatten())
        for some in _parts(places, self.groups).split(max(1, AT_ONCE * 16 // self.means.rows)):
            for kept, read in ((self.means.keys, cache.keys), (self.means.values, cache.values)):
                kept[:, some] = read(some, self.means.rows).float().mean(2).transpose(0, 1).to(kept.dtype)

    def scores(self, query: Tensor, table: Tensor) -> Tensor:
        return super().scores(query, _entries(table, self.inner_entries))

    def attend(self, query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, count: Any, scale: float) -> None:
        scores = self.scores(self.grouped(query, cache, pages), pages.table)
        attend_blocks(query, out, cache, pages, scores, count, scale, means=self.means)

    def best(self, query: Tensor, table: Tensor, count: int) -> Tensor:
        return super().best(query, _entries(table, self.inner_entries), count)


def _parts(places: Tensor, each: int) -> Tensor:
    """Return the places of the `each` parts of every entry."""
    return places if each == 1 else (places[:, None] * each + torch.arange(each, device=places.device)).flatten()


def _entries(table: Tensor, each: int) -> Tensor:
    """Return the table of the `each` parts of every entry; -1 for none."""
    if each == 1:
        return table
    parts = table[..., None] * each + torch.arange(each, dtype=table.dtype, device=table.device)
    return torch.where(table[..., None] < 0, -1, parts).flatten(1)
