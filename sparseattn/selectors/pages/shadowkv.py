"""ShadowKV's landmarks: chunks ranked by their mean keys, and chunks whose keys differ from the mean in any case.

https://arxiv.org/abs/2410.21465
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sparseattn.core.selection import Selection
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import StepContext
from sparseattn.selectors.pages.base import Entries, PageSelector


class ShadowKV(PageSelector):
    """Reads the outlier chunks, and the chunks whose landmarks have the largest share of a softmax of any query head.

    A chunk's landmark is the mean of its keys, after RoPE. Chunks with the smallest cosine between a key and their
    landmark are outliers: landmarks say little of them, so they are read in any case and have no share.

    Args:
        page: rows of a chunk, a power of two; 8 as in the paper.
        outliers: share of the budget for outlier chunks, 0 to 1; 3/19 is the authors' 24 chunks of 8 for every 1,024
            rows, which they read besides.

    One choice per KV head, by the largest share among its query heads. Facts are from the authors' code
    (ByteDance-Seed/ShadowKV, `models/kv_cache.py`). Departures: outliers are counted in the budget, and chunks that
    decoding seals are chosen among and may be outliers, where the paper holds every row of the answer. Its keys of low
    rank, from which it makes the rows that it reads, and its values in host memory are not here: keys are read as they
    are.

    `scan_bytes`: the landmarks, and the cosines.

    Raises:
        ValueError: a share outside 0 to 1.
    """

    entry_names = ("landmarks", "cosines")
    operators = 24

    def __init__(self, page: int = 8, outliers: float = 3 / 19) -> None:
        super().__init__(page, "max")
        if not 0 <= outliers <= 1:
            raise ValueError(f"outliers is a share of the budget, 0 to 1, got {outliers}")
        self.outliers = outliers

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        rows = keys.unflatten(2, (-1, self.page)).float()  # [B,H,P,page,D]
        landmarks = rows.mean(3)
        cosines = functional.cosine_similarity(landmarks[:, :, :, None], rows, dim=-1).amin(-1)  # [B,H,P]
        return {"landmarks": landmarks.to(keys.dtype), "cosines": cosines}

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        """Return the logits of the landmarks, voted; without outliers."""
        logits = self._logits(query, entries, real)
        return logits.flatten(1, 2) if self.group == "each" else logits.softmax(-1).amax(2).log()

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        entries, real = self._entries(), self.valid_entries(step.valid)
        pages = budget // self.page
        logits = self._logits(query, entries, real)  # [B,H,G,P]
        apart = -entries["cosines"].masked_fill(~real[:, None], torch.inf)  # [B,H,P]
        count = min(int(pages * self.outliers), apart.shape[2])
        chosen = torch.zeros_like(apart, dtype=torch.bool).scatter_(2, apart.topk(count, -1).indices, True)
        chosen &= real[:, None]
        shares = logits.masked_fill(chosen[:, :, None], -torch.inf).softmax(-1).nan_to_num(nan=0.0).amax(2)
        ranks = shares.masked_fill(chosen, torch.inf).masked_fill(~real[:, None], -torch.inf)
        start, length = best_pages(ranks, pages, self.page)
        return Selection(start, length, self.page, whole=True)

    def has(self, ability: type) -> bool:
        return super().has(ability) and ability is not EstimatesMass  # a landmark says nothing of an outlier's weight

    def why_not_shared(self) -> str | None:
        return "which chunks are outliers, all chunks of a sequence decide"

    def _logits(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        logits = query.float() @ entries["landmarks"].float().mT / self.temperature(query.shape[3])
        return logits.masked_fill(~real[:, None, None], -torch.inf)
