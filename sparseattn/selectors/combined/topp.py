"""Top-p pruning: another selector proposes rows, keys of four bits weigh them, the heaviest are read. Twilight.

https://arxiv.org/abs/2502.02770
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sparseattn.core.mass import heaviest
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan, both
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys.reference import groups_of
from sparseattn.selectors.base import Selector, StepContext
from sparseattn.selectors.combined.twostage import TwoStage


class TopP(TwoStage):
    """Reads, of the rows that another selector proposes, the fewest that hold a share p of the weight of all of them.

    Args:
        inner: who proposes, a selector or its name; see `TwoStage` for which can.
        p: share of the proposed rows' softmax weight, in (0, 1]; .85 (default) is the paper's for Quest.
        propose: rows proposed: a share of the sealed rows (float; of a batch's longest sequence; a quarter by default,
            as in the paper) or their number (int), rounded up to the inner selector's span.
        rows: a group of keys that shares levels, see `LowBit`.
        group: "each" (default, the paper's): every query head prunes for itself; "softmax": one choice per KV head, by
            the mean of its query heads' weights.
        scales: bits of a level, see `LowBit`.

    The budget is the most rows that are read; what is read follows p. Rows of equal weight are read in any order.

    Departures. The paper's four-bit copy has a scale for every row; here one for every channel of `rows` rows, which
    finds more (`LowBit`). Its softmax is over what is proposed, sink and window among it; here these are read besides
    and weigh nothing, so that p is of the other rows: for a share of all attention, give `lowbit:bits=4` a budget of
    `mass:0.85`. The CPU kernel rounds the query, times the steps, to 8 bits. Layers 0 and 1 are dense there; which are
    is the caller's choice here.

    `scanned` and `scan_bytes`: as of `TwoStage`.

    Raises:
        ValueError: an argument out of its range, or an inner selector that evicts or biases.
    """

    operators = 50
    knob = "p"

    def __init__(
        self,
        inner: Selector | str = "quest",
        p: float = 0.85,
        propose: int | float = 0.25,
        rows: int = 64,
        group: str = "each",
        scales: int = 16,
    ) -> None:
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 < p <= 1:
            raise ValueError(f"p is a share of the proposed rows' weight in (0, 1], got {p!r}")
        if group not in ("each", "softmax"):
            raise ValueError(f'group is "each" or "softmax", which compare weights, got {group!r}')
        whole = type(propose) is int and propose >= 1
        if not whole and not (isinstance(propose, float) and 0 < propose <= 1):
            raise ValueError(f"propose is 1 or more rows (int) or a share of them in (0, 1] (float), got {propose!r}")
        super().__init__(inner, 1, 4, rows, group, scales)
        self.p, self.propose = p, propose

    @property
    def inner(self) -> Selector:
        """Who proposes."""
        return self.pages

    def why_not_dealt(self) -> str | None:
        return "it reads a share of the attention to all of its rows"

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        proposed, listed, page = self._propose(query, step, budget)
        if not listed.shape[2]:
            return proposed
        codes = self._codes
        index = codes.index(step.valid)
        logits = quantized_keys.listed_logits(codes.scaled(query), index, listed, page)
        ids = self._pruned(logits, listed, page, budget)
        levels = codes.levels_bytes(groups_of(listed, page, index.groups, step.valid.shape[1]), query.shape[3])
        return Selection.tokens(ids, *self._costs(proposed, listed, page, levels, query, ids.shape[1]))

    def _proposed_rows(self, stored: int, budget: int) -> int:
        rows = self.propose if isinstance(self.propose, int) else math.ceil(self.propose * stored)
        return math.ceil(min(rows, stored) / self.pages.span) * self.pages.span

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Predict a step as if the budget were read: what is read follows p."""
        scan = super().scan(query, sealed, budget)
        return scan and dataclasses.replace(scan, expected=both(scan.expected, "the whole budget is read"))

    def _pruned(self, logits: Tensor, listed: Tensor, page: int, budget: int) -> Tensor:
        """`[B,Hs,S]` int32: of proposed rows with `logits` `[B,H,G,P*page]` those that hold p, -1 in other places."""
        weights = torch.where(logits.isneginf(), 0.0, logits.softmax(-1))  # of no row at all NaN, where it is not 0
        weights = weights.flatten(1, 2) if self.group == "each" else weights.mean(2)  # [B,Hs,n]
        top = weights.topk(min(budget, weights.shape[-1]), dim=-1)
        kept = heaviest(top.values, top.values.new_zeros(top.values.shape[:2]), self.p)
        own = listed.repeat_interleave(weights.shape[1] // listed.shape[1], 1)
        rows = own.gather(2, top.indices // page) * page + top.indices % page
        there = logits.isneginf().logical_not()
        there = there.flatten(1, 2) if self.group == "each" else there.any(2)
        return torch.where(kept & there.gather(2, top.indices), rows, -1).int()
