"""The mean key of each page ranks pages: the simplest score, a lower bound of the page's weight."""

from __future__ import annotations

from sparseattn.kernels.page_directions.reference import Form
from sparseattn.selectors.pages.direction_base import Directions


class Mean(Directions):
    """Reads the pages whose mean key has the largest product with the query.

    That is the mean of the page's logits, so by Jensen's inequality no page weighs less than its rows would at it.
    InfLLM's and MoBA's blocks are ranked so (https://arxiv.org/abs/2502.13189).

    Args:
        page: rows per page, a power of two.
        group: how a query group votes, see `vote`: "softmax" (default), "sum", "max"; "each": every query head chooses
            for itself.
        bits: of a number of the mean, 16 (default) or 8 with a step for each page. Fewer break the score.
    """

    def __init__(self, page: int = 16, group: str = "softmax", bits: int = 16) -> None:
        if bits not in (16, 8):
            raise ValueError(f"bits of a mean is 16 or 8, got {bits}")
        super().__init__(Form("quad", page, 0, bits), group)
        self.bits = bits
