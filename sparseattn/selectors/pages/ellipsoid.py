"""The largest logit on an ellipsoid about each page's mean key ranks pages. Ours."""

from __future__ import annotations

from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.pages.direction_base import Directions, check_rank


class Ellipsoid(Directions):
    """Reads the pages with the highest `q mu + c sqrt(q' C q)`, mu and C mean and covariance of the page's keys.

    No key on the ellipsoid `(k - mu)' C^-1 (k - mu) <= c^2` has a larger product with q. C is kept by its `rank`
    principal directions alone, so that what keys differ by along others counts nothing; with `rest` its variance counts
    as if it were the same along each of them, and C has full rank.

    Args:
        page: rows per page, a power of two.
        rank: directions, fewer than a page has rows; `page - 1` keeps all of C.
        deviations: c.
        bits: of a number of a direction, 16 (default), 8 or 4; with 8 and 4 the mean has 8.
        rest: see above.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.
    """

    def __init__(
        self,
        page: int = 16,
        rank: int = 4,
        deviations: float = 2.0,
        bits: int = 16,
        rest: bool = False,
        group: str = "softmax",
    ) -> None:
        if not deviations >= 0:
            raise ValueError(f"deviations is 0 or more of the standard deviation of logits, got {deviations}")
        super().__init__(Form("ellipsoid", page, check_rank(rank, page), bits, rest, deviations), group)
        self.rank, self.deviations, self.bits, self.rest = rank, deviations, bits, rest
