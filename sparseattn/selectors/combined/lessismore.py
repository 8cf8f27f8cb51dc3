"""LessIsMore: the best rows of all heads, united into one list for the layer, and the newest rows.

https://arxiv.org/abs/2508.07101
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.selectors.abilities import ComparesHeads
from sparseattn.selectors.base import StepContext
from sparseattn.selectors.key_scorer import KeyScorer
from sparseattn.selectors.newest import newest


class LessIsMore(ComparesHeads, KeyScorer):
    """Reads one list for all heads of a layer: what its query heads rank first in turn, and the newest rows.

    Every query head ranks the older rows by its logits. The list takes the first row of each head, then the second of
    each, and so on, without repetition, until it is full; of one rank, the heads in their order.

    Args:
        recent: share of the budget for the newest rows, 0 to 1; 0.25 as in the authors' README.

    Other layers read the same list: `kascade:inner=lessismore,anchors=[2,13]`, and so the authors' runs do, with a few
    layers that choose and the first ones dense. A layer alone chooses for itself. Facts are from the authors' code
    (DerrickYLJ/LessIsMore), whose newest rows are those of the whole cache: `--sink 0 --window 1` is its setting. Its
    choosing layers attend to every row; here they read their list, so that all layers read as many rows.

    `scan_bytes`: every key.

    Raises:
        ValueError: a share outside 0 to 1.
    """

    operators = 40

    def __init__(self, recent: float = 0.25) -> None:
        if not 0 <= recent <= 1:
            raise ValueError(f"recent is the share of the budget for the newest rows, 0 to 1, got {recent}")
        self.recent = recent

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        rows = step.valid.shape[1]
        older = int(budget * (1 - self.recent))
        latest = newest(step.valid, budget - older)  # [B,N]
        logits = self.logits(query, step).masked_fill(latest[:, None, None], -torch.inf).flatten(1, 2)  # [B,HG,N]
        top = logits.topk(min(budget, rows), -1)
        heads = logits.shape[1]
        turn = torch.arange(top.values.shape[2], device=query.device) * heads
        turn = turn + torch.arange(heads, device=query.device)[:, None]  # [HG,k]
        turn = turn.float().masked_fill(top.values.isneginf(), torch.inf)  # [B,HG,k]
        first = torch.full_like(logits[:, 0], torch.inf)
        first.scatter_reduce_(1, top.indices.flatten(1), turn.flatten(1), "amin")
        first.masked_fill_(latest, -1.0)
        ids = first.topk(min(budget, rows), largest=False, sorted=True).indices  # [B,k]
        ids = ids.masked_fill(first.gather(1, ids).isinf(), -1)
        return Selection.tokens(ids[:, None].expand(-1, query.shape[1], -1))
