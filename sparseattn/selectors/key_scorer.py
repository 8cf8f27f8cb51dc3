"""What selectors share that score every key where the cache keeps it, and have no index."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.step_cost import Scan, products
from sparseattn.kernels.row_scores.dispatch import row_scores
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext


class KeyScorer(ReadsKeys, Selector):
    """Reads what the logits of all sealed rows say; nothing is built.

    Attributes:
        page: rows of what it ranks.
        lists: whose lists it makes, "max" a KV head's or "each" a query head's.
        expected: see `core.step_cost.Scan`.
    """

    page: int = 1
    lists: str = "max"
    expected: str = ""

    def fix(self, rows: int, seal: int) -> None:
        return None

    def append(self, rows: Rows) -> None:
        return None

    def logits(self, query: Tensor, step: StepContext) -> Tensor:
        """Return `[B,H,G,N]` float32: the logits of the sealed rows for queries `[B,H,G,D]`, -inf for padding."""
        keys = self.stored_keys()[:, :, : step.valid.shape[1]]
        logits = row_scores(query, keys).float()
        logits /= self.temperature(query.shape[3])
        return logits.masked_fill_(~step.valid[:, None, None], -torch.inf)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = Scan(sealed, sealed * query.shape[3] * self.bytes_of(query))
        scoring = products(query, sealed, query.shape[3], scan.read)
        pages = sealed // self.page, min(budget, sealed) // self.page
        return self.ranked(query, scan, [scoring], pages, group=self.lists, page=self.page, expected=self.expected)
