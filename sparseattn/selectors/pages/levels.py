"""Quest's bounds, read off the levels of rounded keys: nothing is kept beside the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.attend_quantized.reference import CodedRows
from sparseattn.kernels.page_directions import dispatch as page_directions
from sparseattn.kernels.page_directions import reference as page_directions_reference
from sparseattn.selectors.abilities import ReadsRoundedKeys
from sparseattn.selectors.pages.base import Entries, PageSelector


class Levels(ReadsRoundedKeys, PageSelector):
    """Reads the pages with the highest bound of a logit, as `Quest` does, where a page is a group of rounded keys.

    A cache of rows of few bits (`KVCache(rows="kivi")`) keeps, of each channel in a group of keys, `low` and `step`:
    all keys of the group lie between `low` and `low + step * last`. So `sum_i q_i low_i + max(q_i, 0) step_i last`
    bounds every logit (Quest, https://arxiv.org/abs/2406.10774; the levels are KIVI's,
    https://arxiv.org/abs/2402.02750). With query parts `(q, max(q, 0) last)` that is one product with the levels as
    they lie in memory, for which the compiled code of `kernels.page_directions.reference` serves. The bounds are at
    most a step wider than the keys', as levels are rounded outwards.

    Args:
        page: rows of a page, the cache's `group`; 32 is its default.
        group: how a query group votes, as in `Quest`.

    It has no name in `SELECTORS`, since caches of other rows refuse it: `sparseattn:Levels:page=32`.
    """

    def __init__(self, page: int = 32, group: str = "sum") -> None:
        super().__init__(page, group)
        self.rounded_group = page

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {}

    def why_not_shared(self) -> str | None:
        return "its bounds are the levels of one cache's rounded keys"

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        rounded = self._rounded()
        wide = query if query.dtype == torch.float64 else query.float()
        parts = torch.cat([wide, wide.relu() * ((1 << rounded.bits) - 1)], -1)  # [B,H,G,2D]
        if self.group == "sum":
            parts = parts.sum(2, keepdim=True)  # of products, as they are linear in it
        form = page_directions_reference.Form("quad", self.page, 0)
        vectors = {"vectors": rounded.key_levels.flatten(3)}
        return page_directions.scores(parts, vectors, real, form, self.group, self.temperature(rounded.size))

    def entry_size(self, query: Tensor) -> tuple[int, int]:
        numbers = 2 * query.shape[3]
        return 2 * numbers if self.rounded is None else self.rounded.group_bytes(), numbers  # 16 bits by default

    def _rounded(self) -> CodedRows:
        if self.rounded is None:
            raise RuntimeError(f"{self} reads the levels of a KVCache's rounded keys: use it in one with rows='kivi'")
        return self.rounded
