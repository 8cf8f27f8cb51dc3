"""Estimated tails over an engine's blocks: means of consecutive rows stand for those that a query does not read.

The estimation zone of RetroInfer, https://arxiv.org/abs/2505.02922, as `selectors.combined.tailed` has it. A mean
follows from the rows of its group alone, so that sequences may share it as they share blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.selectors.combined.tailed import Tailed
from sparseattn.selectors.pages.base import Entries, PageSelector


class BlockTails(PageSelector):
    """Reads what another method reads, and the means of the groups of which that leaves rows out.

    Args:
        method: which has the means.
        inner: what its inner method is in an engine.
    """

    part_names = ("inner",)

    def __init__(self, method: Tailed, inner: PageSelector) -> None:
        super().__init__(inner.page, inner.group)
        self.method, self.inner, self.rows = method, inner, method.width_of_group

    @property
    def unit(self) -> int:
        return math.lcm(self.inner.unit, self.rows)

    def label(self, *, knob: bool = True) -> str:
        return self.method.label(knob=knob)

    def why_not_shared(self) -> str | None:
        if self.method.zone < 1:
            return "in vLLM all groups that are not read stand in: leave zone out"
        if self.page > 1 and self.page % 16:
            return f"in vLLM pages are a multiple of 16 rows, got {self.page}"
        if self.rows % 16:
            return f"in vLLM groups are a multiple of 16 rows, got {self.rows}: give rows=64"
        return self.inner.why_not_shared()

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        """As of the inner, those of a group together; means have values too, see `mean_index`."""
        made, each = self.inner.entries(keys), self.unit // self.inner.unit
        return {name: part.unflatten(2, (-1, each)) for name, part in made.items()}

    def entries_at(self, keys: Tensor, first: Tensor) -> dict[str, Tensor]:
        each = self.unit // self.inner.unit
        rows = self.inner.unit * torch.arange(each, device=first.device)
        made = self.inner.entries_at(keys, (first[:, None] + rows).flatten())
        return {name: part.unflatten(2, (-1, each)) for name, part in made.items()}

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        each = self.unit // self.inner.unit
        own = {name: part.flatten(2, 3) for name, part in entries.items()}
        return self.inner.scores(query, own, real.repeat_interleave(each, 1))

    def bytes_once(self, query: Tensor) -> int:
        return self.inner.bytes_once(query)

    def mean_bytes(self, size: int) -> int:
        """Bytes of the means of an entry of a KV head: keys and values, of 16 bits."""
        return self.unit // self.rows * 2 * size * 2
