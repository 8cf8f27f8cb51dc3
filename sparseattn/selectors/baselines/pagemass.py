"""The oracle of page scores: the true weight of each page, from every key. No page score finds more at equal rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.step_cost import Scan, products
from sparseattn.selectors.abilities import ReadsKeys
from sparseattn.selectors.base import vote
from sparseattn.selectors.pages.base import Entries, PageSelector


class PageMass(ReadsKeys, PageSelector):
    """Reads the pages with the most attention: log-sum-exp of their rows' logits for each query head, then the vote.

    It reads every key, so its choice costs as many bytes as dense attention's logits, and `scan_bytes` says so: a
    reference for what the scores of `Quest`, `Mean`, `Unique`, `Quad`, `Clse` and `Ellipsoid` could find at most.

    Args:
        page: rows per page, a power of two.
        group: how a query group votes, see `vote`: "softmax" (default) sums the heads' attention, "sum", "max"; "each":
            every query head chooses for itself.
    """

    mass = True

    def __init__(self, page: int = 16, group: str = "softmax") -> None:
        super().__init__(page, group)

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        return {}

    def why_not_shared(self) -> str | None:
        return "it reads every key, and has no entries"

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        keys = self.stored_keys()[:, :, : real.shape[1] * self.page]
        wide = torch.promote_types(query.dtype, torch.float32)
        logits = query.to(wide) @ keys.to(wide).mT / self.temperature(query.shape[-1])  # [B,H,G,N]
        masses = logits.unflatten(-1, (-1, self.page)).logsumexp(-1)
        return vote(masses.masked_fill(~real[:, None, None], -torch.inf), self.group)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        scan = Scan(sealed, sealed * query.shape[3] * self.bytes_of(query))  # keys, not pages
        scoring = products(query, sealed, query.shape[3], scan.read)
        pages = sealed // self.page, min(budget, sealed) // self.page
        return self.ranked(query, scan, [scoring], pages, group=self.group, page=self.page)
