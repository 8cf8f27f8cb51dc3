"""Mean key and variance along a few directions rank pages, as if a page's logits were distributed normally.

AMASS's score "quad", https://pypi.org/project/amass-kv/.
"""

from __future__ import annotations

from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.pages.direction_base import Directions, check_rank


class Quad(Directions):
    """Reads the pages with the highest `q mu + sum_k var_k (q v_k)^2 / 2`, q over the temperature.

    mu is the mean of the page's keys, v_k are the `rank` directions along which they differ most and var_k the
    variances along these: the logarithm of the mean of exponentiated logits, if these were normal.

    Args:
        page: rows per page, a power of two.
        rank: directions, fewer than a page has rows.
        bits: of a number of a direction, 16 (default), 8 or 4; with 8 and 4 the mean has 8.
        rest: count the variance along the other directions too, as if it were the same along each.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.

    Departures, from amass-kv 0.1.1, of which there is no paper: a direction is as long as the deviation along it, so
    that no variance is kept beside it (4 bytes less); no content tag (16 bytes less), as entries follow their rows;
    16 bits are the default. Its group votes with its sink's page among the pages, ours without.
    """

    def __init__(
        self, page: int = 16, rank: int = 2, bits: int = 16, rest: bool = False, group: str = "softmax"
    ) -> None:
        super().__init__(Form("quad", page, check_rank(rank, page), bits, rest), group)
        self.rank, self.bits, self.rest = rank, bits, rest
