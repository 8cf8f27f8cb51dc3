"""UNIQUE: mean and deviation of each page's keys, channel by channel, rank pages. https://arxiv.org/abs/2605.27740"""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores, page_scores_at
from sparseattn.selectors.pages.base import Entries, PageSelector


class Unique(PageSelector):
    """Reads the pages with the highest `sum_i q_i mu_i + c |q_i| sigma_i`, mu and sigma mean and deviation of its keys.

    With `low = mu - c sigma` and `high = mu + c sigma` that is `sum_i max(q_i low_i, q_i high_i)`, so Quest's kernels
    score it, and an entry is as large as Quest's: 2D numbers of the keys' dtype.

    Args:
        page: rows per page, a power of two.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.
        deviations: c; the deviation is the population's.

    Read of the paper was its abstract, which names mean and deviation and neither coefficient nor vote: 1 for c and
    "max" are the defaults of an engine that has the score (kekzl/imp). Ours is "softmax", as of the other page scores.
    """

    entry_names = ("low", "high")
    low: RowBuffer  # [B,H,P,D] mu - c sigma, of the keys' dtype
    high: RowBuffer  # [B,H,P,D] mu + c sigma

    def __init__(self, page: int = 16, group: str = "softmax", deviations: float = 1.0) -> None:
        if not deviations >= 0:
            raise ValueError(f"deviations is 0 or more of a channel's standard deviation, got {deviations}")
        super().__init__(page, group)
        self.deviations = deviations

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        pages = keys.float().unflatten(2, (-1, self.page))  # [B,H,P,page,D]
        mean, away = pages.mean(3), pages.std(3, correction=0) * self.deviations
        return {"low": (mean - away).to(keys.dtype), "high": (mean + away).to(keys.dtype)}

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        temperature = self.temperature(query.shape[-1])
        bounds = PageBounds(entries["low"], entries["high"], real)
        return page_scores(query, bounds, self.group, temperature=temperature)

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        temperature = self.temperature(query.shape[-1])
        bounds = PageBounds(store["low"], store["high"])
        return page_scores_at(query, bounds, table, self.group, temperature=temperature)
