"""Quest: bounds of each page's keys, channel by channel, bound every logit in it. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.kernels.page_bounds.bounds import PageBounds, VotedBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores, page_scores_at
from sparseattn.selectors.abilities import ChoosesAtOnce
from sparseattn.selectors.base import Rows
from sparseattn.selectors.pages.base import Entries, PageSelector
from sparseattn.selectors.saved_state import Loaded, Wanted, check_finite, check_no_order, check_tensors

SLACK = 1.25  # a step leaves room for longer keys, so that few of them make the stored bounds be rounded anew
TINY = 1e-30  # least step, of a channel that is zero
FULL = 1 / 126.5  # of a channel's largest number, its step: rounded up that is 127 on every device


class Quest(ChoosesAtOnce, PageSelector):
    """Reads the pages with the highest upper bound `sum_i max(q_i M_i, q_i m_i)`, m and M the page's key bounds.

    Args:
        page: rows per page, a power of two; 16 in the paper.
        group: how a query group votes: "sum" (default), "softmax" or "max" of its bounds give one choice per KV head;
            "each" lets every query head choose its own pages. On the reference model "sum" finds 5 to 25 % more
            attention than "max" at equal rows (the log, 2026-11-20).
        int8: keep the bounds as 8-bit integers, rounded outwards in steps of one size per channel; a Triton kernel of a
            16-bit model rounds query times step as well. `page=8, int8=True` reads as many bytes of metadata as
            `page=16` of a 16-bit model and finds more at equal rows (the log, 2026-11-22). Ours, not the paper's.

    The paper's models have one query head per KV head and leave the vote open; its accuracy code expands the keys,
    which is "each". The paper's kernels always read the current, partial page: with `Quest.paper()` the cache's
    unsealed rows are exactly that page. Pages are counted from the end of the sink, which is row 0 in that setting.
    Layers 0 and 1 stay dense in the paper; which layers are dense is the caller's choice here.
    """

    entry_names = ("low", "high")
    low: RowBuffer  # [B,H,P,D] minima m, of the keys' dtype or int8
    high: RowBuffer  # [B,H,P,D] maxima M
    _voted: VotedBounds | None = None  # of the entries last shown

    def __init__(self, page: int = 16, group: str = "sum", int8: bool = False) -> None:
        super().__init__(page, group)
        self.int8 = int8
        self.step = RowBuffer(2)  # [B,H,D] float32, what 1 of an 8-bit bound stands for

    @classmethod
    def paper(cls, page: int = 16) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink, the current page always read, pages of 16.

        Its budget counts the current page: `decode(query, cache, budget=2048 - 16)` is the paper's budget of 2048.
        """
        return {"selector": cls(page, group="each"), "sink": 0, "window": 1, "seal": page}

    def fix(self, rows: int, seal: int) -> None:
        super().fix(rows, seal)
        self.step.fix()

    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        pages = keys.unflatten(2, (-1, self.page))  # [B,H,P,page,D]
        low, high = pages.amin(3), pages.amax(3)
        if self.int8:
            low, high = self._rounded(low.float(), high.float())
        return {"low": low, "high": high}

    def why_not_shared(self) -> str | None:
        return "its 8-bit bounds have one step for a channel of a whole sequence" if self.int8 else None

    def why_not_compared(self) -> str | None:
        return self.why_not_shared()

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        check_no_order(order)
        batch, heads, new, size = rows.keys.shape
        bounds = (torch.int8 if self.int8 else rows.keys.dtype, (batch, heads, new // self.page, size))
        wanted: Wanted = {"low": bounds, "high": bounds}
        if self.int8:
            wanted = {**wanted, "step": (torch.float32, (batch, heads, size))}
        check_tensors(state, wanted)
        check_finite(state, "low", "high", "step")
        if bool((state["low"] > state["high"]).any()) or bool((state.get("step", torch.ones(1)) <= 0).any()):
            raise ValueError("a page's least key is above its largest, or a step is not above 0")

    def _rounded(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """As int8 in the channels' steps, which grow, those stored before with them, where a bound needs it."""
        needed = torch.maximum(low.abs(), high.abs()).amax(2) * FULL  # [B,H,D]
        if not self.step.rows:
            self.step.capacity = needed.shape[2]
            self.step.append(torch.full_like(needed, TINY))
        current = self.step.data
        grows = needed > current
        if bool(grows.any()):
            step = torch.where(grows, needed * SLACK, current)
            if self.low.rows:
                for b, h in grows.any(-1).nonzero().tolist():
                    low_of, high_of, shrink = self.low.data[b, h], self.high.data[b, h], current[b, h] / step[b, h]
                    low_of.copy_((low_of * shrink).floor())
                    high_of.copy_((high_of * shrink).ceil())
            current.copy_(step)
        step = current[:, :, None]
        return (low / step).floor().to(torch.int8), (high / step).ceil().to(torch.int8)

    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        step = self.step.data if self.int8 else None
        bounds = PageBounds(entries["low"], entries["high"], real, step)
        return page_scores(query, bounds, self.group, temperature=self.temperature(query.shape[-1]))

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        bounds = PageBounds(store["low"], store["high"])
        return page_scores_at(query, bounds, table, self.group, temperature=self.temperature(query.shape[-1]))

    def bounds_at(self, store: Entries, size: int) -> VotedBounds | None:
        if self.int8 or self.group == "softmax" or type(self).scores_at is not Quest.scores_at:
            return None
        bounds, of_keys = PageBounds(store["low"], store["high"]), type(self).entries is Quest.entries
        return VotedBounds(bounds, self.group, self.temperature(size), of_keys)

    def _forget_views(self) -> None:
        super()._forget_views()
        self._voted = None

    def chosen_by(self, valid: Tensor, size: int) -> VotedBounds | None:
        if self.int8 or self.group == "softmax" or self.fixed_for_cache or not _chooses_by_bounds(type(self)):
            return None
        entries, real = self._entries_of(valid)
        voted = self._voted
        if voted is None or voted.bounds.valid is not real:
            bounds = PageBounds(entries["low"], entries["high"], real)
            voted = self._voted = VotedBounds(bounds, self.group, self.temperature(size))
        return voted

    def bytes_once(self, query: Tensor) -> int:
        return 4 * query.shape[3] if self.int8 else 0


@functools.cache
def _chooses_by_bounds(method: type[Quest]) -> bool:
    """Whether a subclass leaves scores and choice as they are."""
    return all(getattr(method, name) is getattr(Quest, name) for name in ("scores", "select", "_scored", "_best"))
