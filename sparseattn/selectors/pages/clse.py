"""The log-sum-exp of a page's rows where they lie along a few directions ranks pages.

AMASS's score "clse", https://pypi.org/project/amass-kv/.
"""

from __future__ import annotations

from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.pages.direction_base import Directions, check_rank


class Clse(Directions):
    """Reads the pages with the highest `q mu + log sum_t exp(sum_k c_tk (q v_k))`, q over the temperature.

    mu is the mean of the page's keys, v_k are the `rank` directions along which they differ most and c_tk is how far
    row t lies from the mean along direction k: the page's weight, if its keys differed along these directions alone.

    Args:
        page: rows per page, a power of two.
        rank: directions, fewer than a page has rows.
        bits: of a number of a direction and of a coordinate, 16 (default), 8 or 4; with 8 and 4 the mean has 8.
        rest: add half the variance along the other directions, as if it were the same along each.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    AMASS's default is `bits=4,rest=True`. Departures, from amass-kv 0.1.1, of which there is no paper: variances are
    not kept (4 bytes less), no content tag (16 bytes less); 16 bits without the rest are the default. Its group votes
    with its sink's page among the pages, ours without.
    """

    mass = True

    def __init__(
        self, page: int = 16, rank: int = 2, bits: int = 16, rest: bool = False, group: str = "softmax"
    ) -> None:
        super().__init__(Form("clse", page, check_rank(rank, page), bits, rest), group)
        self.rank, self.bits, self.rest = rank, bits, rest
