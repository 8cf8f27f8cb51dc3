"""DELTA: the pages with the largest sums of their rows' best weights under any head, one list for the layer.

https://arxiv.org/abs/2510.09883
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.abilities import ComparesHeads, WeighsUnsealed
from sparseattn.selectors.base import StepContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.key_scorer import KeyScorer
from sparseattn.selectors.newest import newest


class Delta(ComparesHeads, WeighsUnsealed, KeyScorer):
    """Reads one list of pages for all heads of a layer, by the largest weight that a head gives to each of their rows.

    A page's score is the sum, over its rows, of the largest softmax weight among all query heads of the layer. The
    softmax is that of full attention, sink and recent rows included. The newest pages are read in any case.

    Args:
        page: rows of a page, a power of two.
        recent: newest pages that are read whatever they weigh, of half the budget at most; 8 in the authors' runs.

    Other layers read the same list: `kascade:inner=delta,anchors=[2,9,16,23]`, and so the authors' runs do, with a few
    layers that choose and the first ones dense. A layer alone chooses for itself. Facts are from the authors' code
    (hoenza/DELTA). It takes 1e-7 of a page's number from its score, so that of equal ones the older is read; here that
    is left open, since at many pages it is more than a tie. Its choosing layers attend to every row; here they read
    their list, so that all layers read as many rows.

    `scan_bytes`: every key.

    Raises:
        ValueError: a page that is no power of two, or a number of pages below 0.
    """

    operators = 30
    expected = "one row is not sealed"

    def __init__(self, page: int = 16, recent: int = 8) -> None:
        check_least(page=(page, 1), recent=(recent, 0))
        if page & (page - 1):
            raise ValueError(f"a page is a power of two rows, got {page}")
        self.page = self.span = page
        self.recent = recent

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        pages, logits = budget // self.page, self.logits(query, step)
        assert step.unsealed_lse is not None
        total = torch.logaddexp(logits.logsumexp(-1), step.unsealed_lse.to(logits.device))[..., None]
        weights = (logits - total).exp().amax((1, 2))  # [B,N]
        real = step.valid[:, :: self.page]
        scores = weights.unflatten(1, (-1, self.page)).sum(-1).masked_fill(~real, -torch.inf)
        latest = newest(real, min(self.recent, pages // 2))
        scores = scores.masked_fill(latest, torch.inf)[:, None].expand(-1, query.shape[1], -1).contiguous()
        start, length = best_pages(scores, pages, self.page)
        return Selection(start, length, self.page, whole=True)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count the key of the step's own row, as if that were all that is not sealed."""
        scan, own = super().scan(query, sealed, budget), query.shape[3] * self.bytes_of(query)
        return replace(scan, scanned=scan.scanned + 1, read=scan.read + own)
