"""Skip-softmax (BLASST): tiles whose largest logit is far below the running maximum are not read further.

https://arxiv.org/abs/2512.12087
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.base import StepContext
from sparseattn.selectors.key_scorer import KeyScorer

GROUPS = ("group", "each")


class SkipSoftmax(KeyScorer):
    """Reads the tiles whose largest logit is not far below the largest so far; their order is that of the rows.

    A tile is skipped if `exp(its largest logit - the largest up to it)` is below `scale / n`, of a sequence of n
    tokens. So the share that a skipped tile may have falls as the context grows.

    Args:
        page: rows of a tile, a power of two; 128 as in the kernels that serve it.
        scale: the threshold's factor, 0 (nothing is skipped) or more; above n all tiles are skipped that do not raise
            the maximum. It has to be calibrated for a model.
        group: "group" (default): a KV head skips a tile that every query head of it skips, as its values are read
            for all; "each": every query head for itself.

    Where more tiles are left than the budget allows, the heaviest are read by their largest logits: give it `all`, or
    more than you expect. Facts are from documentation of engines that serve it (TensorRT-LLM, vLLM-Omni); the paper's
    body could not be read. There a skipped tile saves its softmax and its values alone, since its keys have been read;
    here the rows that are left are read as any selection, their keys once more. Sink and recent rows are read in any
    case, and do not raise the running maximum. It begins anew in each split of a kernel there; here there is one.

    `scan_bytes`: every key.

    Raises:
        ValueError: a tile that is no power of two, a scale below 0, or a group that is neither.
    """

    operators = 24
    expected = "no tile that the budget allows is skipped"

    def __init__(self, page: int = 128, scale: float = 10.0, group: str = "group") -> None:
        if page < 1 or page & (page - 1):
            raise ValueError(f"a page is a power of two rows, got {page}")
        if not 0 <= scale < math.inf:
            raise ValueError(f"scale is a number of 0 (nothing is skipped) or more, got {scale}")
        if group not in GROUPS:
            raise ValueError(f"group is one of {', '.join(GROUPS)}, got {group!r}")
        self.page = self.span = page
        self.scale, self.group = float(scale), group
        self.lists = "each" if group == "each" else "max"

    def why_not_dealt(self) -> str | None:
        return "it skips pages that are far below the best of all"

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        most = self.logits(query, step).unflatten(3, (-1, self.page)).amax(-1)  # [B,H,G,P]
        below = most - most.cummax(3).values  # 0 and less; nan before the first real tile
        threshold = (self.scale / (step.positions + 1).double()).log().float().to(most.device)
        kept = below >= threshold.clamp(max=0.0)[:, None, None, None]
        kept &= step.valid[:, None, None, :: self.page]
        each = self.group == "each"
        kept = kept.flatten(1, 2) if each else kept.any(2)
        ranks = most.flatten(1, 2) if each else (most - most.amax(3, keepdim=True)).exp().sum(2)
        start, length = best_pages(ranks.masked_fill(~kept, -torch.inf).contiguous(), budget // self.page, self.page)
        return Selection(start, length, self.page, whole=True)
