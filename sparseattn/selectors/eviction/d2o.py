"""D2O: what H2O would drop is merged into the most similar row held, if it is similar enough.

https://arxiv.org/abs/2406.13035
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.selectors.abilities import ComparesHeads
from sparseattn.selectors.base import Rows
from sparseattn.selectors.eviction.merging_base import Merging, listed
from sparseattn.selectors.eviction.summed_base import Summed


class D2O(ComparesHeads, Merging, Summed):
    """Holds rows as H2O does, and merges one that it drops into the one held whose key has the largest cosine with it.

    It does so where that cosine is at least a threshold: the mean of these cosines at the first drop, and at later ones
    a mean that forgets. Each key and value becomes the mean of itself and of what is merged into it, times its cosine.

    Args:
        recent: share of the budget for the newest rows, 0 to 1.
        forget: share of the threshold that is the newest mean; 0.5 in the authors' code.
        weigh: see `Merging`.

    As the authors' code (AIoT-MLSys-Lab/D2O, `modeling_llama3_7b_13b_d2o.py`), which has another weight than the
    paper's formula. There a row is merged in all heads or in none, by the mean of their cosines at its place in the
    order of rows dropped. Here each head goes by its own, and the threshold is the layer's in both. Its first four rows
    are the cache's sink, which takes in no row. It gives layers budgets by how attention is spread, and leaves the
    first two and the last dense: roles of layers say that here.
    """

    compares = True

    def __init__(self, recent: float = 0.5, forget: float = 0.5, weigh: bool = False) -> None:
        super().__init__(recent)
        if not 0 <= forget <= 1:
            raise ValueError(f"forget is the newest mean's share of the threshold, 0 to 1, got {forget}")
        self.forget, self.weigh = forget, weigh
        self.threshold = RowBuffer(1)  # [B,1] float32, NaN before the first drop

    @classmethod
    def paper(cls) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: four rows of sink, the token of the step on top."""
        return {"selector": cls(), "sink": 4, "window": 1, "seal": 1}

    def append(self, rows: Rows) -> None:
        super().append(rows)
        if not self.threshold.rows:
            self.threshold.append(torch.full_like(rows.keys[:, :1, 0, 0], torch.nan, dtype=torch.float32))

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        super().observe(*self.with_tail(selection, weights, total), total)

    def merge(self, b: int, gone: Tensor, stay: Tensor) -> None:
        pairs = []
        for h, (out, kept) in enumerate(zip(listed(gone), listed(stay), strict=True)):
            if len(out) and len(kept):
                units = torch.nn.functional.normalize(self.keys.data[b, h].float(), dim=1)
                cosine, place = (units[out] @ units[kept].T).max(1)
                pairs.append((h, out, kept[place], cosine))
        if not pairs:
            return
        mean, threshold = torch.cat([cosine for *_, cosine in pairs]).mean(), self.threshold.data[b]
        threshold.copy_(torch.where(threshold.isnan(), mean, (1 - self.forget) * threshold + self.forget * mean))
        for h, out, into, cosine in pairs:
            alike = cosine >= threshold
            self.average(b, h, out[alike], into[alike], cosine[alike])
