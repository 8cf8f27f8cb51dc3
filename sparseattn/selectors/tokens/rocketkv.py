"""RocketKV: bounds of small pages, of which few channels are read, choose rows. https://arxiv.org/abs/2502.14051"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan, products
from sparseattn.selectors.abilities import Evicts, FollowsMoves, LearnsFromQueries
from sparseattn.selectors.base import Rows, Selector, StepContext, best, vote
from sparseattn.selectors.checks import check_group, check_least
from sparseattn.selectors.eviction.snapkv import check_pooling, pooled_votes
from sparseattn.selectors.tokens.sparq import largest_channels, whole_channels


class RocketKV(Evicts, FollowsMoves, LearnsFromQueries, Selector):
    """Reads the rows of the pages with the largest bounds over few channels, of a prompt that may have dropped rows.

    Hybrid sparse attention, the paper's second stage: a page keeps the least and the largest of its keys in every
    channel. A step reads one of the two, by the sign of the group's summed query, in the r channels with the largest
    sum of `|q|` over the group. The products are divided by SparQ's temperature, `sqrt(D * sum|q_r| / sum|q|)`, and the
    rows of the best pages are read, of the last page as many as the budget has left.

    The first stage, off by default, drops rows of the prompt for good: it holds those that SnapKV's votes rank first.
    Rows that are held are stored together, in their order, and pages are of these, as in the paper.

    Args:
        ratio: c, by how much keys are compressed that a step reads to choose: 1 or more. The paper has the rows held
            over the token budget, of which half are rows that are read.
        page: rows per page, 1 or more; 0 (default): `sqrt(ratio)` rounded up, the paper's size.
        channels: r, all of them if there are fewer; 0 (default): `D * page / ratio` rounded down, 1 or more.
        prompt: rows of the prompt that each KV head holds, rounded down to whole pages; 0 (default): all of them.
        window: how many of the prompt's last queries vote, if rows are dropped; their own rows are held.
        kernel: rows that max-pooling of votes joins, an odd number.
        group: how a query group votes, see `vote`: "softmax" (default, the paper's), "sum", "max"; "each": every query
            head chooses for itself, by the group's channels and signs.

    An index page takes 2 D numbers of the keys' dtype, channel by channel, so that r channels are read and no others;
    with pages of one row it is a copy of the keys, D numbers.

    Departures. The paper's rows are all ranked alike; here sink and window come on top of the budget, and rows that are
    not sealed are read densely; with `RocketKV.paper()` that is the current, partial page alone. With a sink its rows
    are not among those that votes pool or `prompt` counts.

    `scanned`: pages. `scan_bytes`: r numbers of every page.

    Raises:
        ValueError: an argument out of its range.
    """

    operators = 30

    def __init__(
        self,
        ratio: float = 16.0,
        page: int = 0,
        channels: int = 0,
        prompt: int = 0,
        window: int = 32,
        kernel: int = 63,
        group: str = "softmax",
    ) -> None:
        if not 1 <= ratio < math.inf:
            raise ValueError(f"ratio is 1 (every channel of every key) or more, got {ratio}")
        check_least(page=(page, 0), channels=(channels, 0), prompt=(prompt, 0))
        check_pooling(window, kernel)
        self.ratio, self.page, self.channels, self.prompt = ratio, page, channels, prompt
        self.window, self.kernel, self.group = window, kernel, check_group(group)
        self.page_rows = page or paper_page(ratio)
        self.span = 1 << (self.page_rows - 1).bit_length()  # what a selection's spans are, a power of two
        if 0 < prompt < self.page_rows:
            raise ValueError(
                f"prompt is 0 (nothing is dropped) or at least a page, {self.page_rows} rows, got {prompt}"
            )
        self.last_queries = window if prompt else 0
        self.bounds = RowBuffer(3)  # [B,H,2D,P] the least, then the largest by channel; [B,H,D,P] with pages of one row
        self.kept_pages = RowBuffer(1, spare=False)  # [B,P] bool, neither padding nor dropped

    @property
    def unit(self) -> int:
        return self.page_rows

    def has(self, ability: type) -> bool:
        return super().has(ability) and (self.prompt > 0 or ability is not Evicts)

    @classmethod
    def paper(cls, tokens: int, budget: int, answer: int = 256) -> dict[str, Any]:
        """Return the paper's setting as arguments of `KVCache`: no sink, the current page always read.

        Its code splits the compression of `tokens` to a token budget between both stages: `tokens / c^a` rows are held,
        `a = min(0.2 + 0.06 log2(c), 0.8)` of `c = tokens / budget`, and at least twice the answer's. The answer has its
        part of them. Half of the token budget is rows: `decode(query, cache, budget=budget // 2)`.

        Args:
            tokens: of prompt and answer, at most.
            budget: tokens whose bytes a step may read, those read to choose included.
            answer: of `tokens`, those that are decoded.
        """
        check_least(tokens=(tokens, 1), budget=(budget, 1), answer=(answer, 0))
        whole = max(tokens / budget, 1.0)
        capacity = max(int(tokens / whole ** min(0.2 + 0.06 * math.log2(whole), 0.8)), min(2 * answer, tokens))
        ratio = max(capacity / budget, 1.0)
        made = cls(ratio, prompt=max(capacity - answer, paper_page(ratio)))
        return {"selector": made, "sink": 0, "window": 1, "seal": made.page_rows}

    def fix(self, rows: int, seal: int) -> None:
        self.bounds.fix(rows // self.page_rows)
        self.kept_pages.fix(rows // self.page_rows)

    def append(self, rows: Rows) -> Tensor | None:
        keys, real, order = rows.keys, rows.positions[:, :: self.page_rows] >= 0, None
        if rows.last_queries is not None and self.prompt and self._most() < keys.shape[2]:
            order, real = self._dropped(rows)
            keys = keys.gather(2, order[..., None].expand_as(keys))
        pages = keys.unflatten(2, (-1, self.page_rows))  # [B,H,P,page,D]
        low = pages.amin(3).mT
        self.bounds.append(low if self.page_rows == 1 else torch.cat([low, pages.amax(3).mT], 2))
        self.kept_pages.append(real)
        return order

    def _most(self) -> int:
        """Rows of the prompt that are held at most."""
        return self.prompt // self.page_rows * self.page_rows

    def _dropped(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the order `[B,H,n]` with the rows that are held in front, by position, and which pages `[B,P]` these
        fill."""
        real, most = rows.positions >= 0, self._most()
        worth = pooled_votes(rows, self.window, self.kernel, scale=self.layer_context.scale)
        worth = worth.masked_fill(~real[:, None], -torch.inf)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(2, worth.topk(most, sorted=False).indices, True)
        order = (~(kept & real[:, None])).int().argsort(dim=-1, stable=True)
        place = torch.arange(0, real.shape[1], self.page_rows, device=real.device)
        return order, place < real.sum(1, keepdim=True).clamp(max=most)

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if budget < self.page_rows:
            raise ValueError(f"RocketKV reads by pages: its budget is at least {self.page_rows} rows, got {budget}")
        ids = best(vote(self.logits(query), self.group), -(-budget // self.page_rows))  # [B,Hs,S], the best first
        left = budget - torch.arange(ids.shape[2], device=ids.device) * self.page_rows
        length = (ids >= 0) * left.clamp(max=self.page_rows)
        scanned = read = None
        if step.counted and self.prompt:  # how many pages are left, the prompt's length decides
            pages = self.kept_pages.visible.sum(-1, keepdim=True)  # [B,1]
            scanned = pages.expand(-1, ids.shape[1])
            read = (pages * (self._channels(query.shape[3]) * self.bytes_of(query))).expand(-1, query.shape[1])
        start = (ids.clamp(min=0) * self.page_rows).int()
        whole = self.page_rows == self.span and budget % self.span == 0
        return Selection(start, length.int(), self.span, scanned, read, whole)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Predict a step as if all rows were the prompt's, where it drops any."""
        kept = min(sealed, self._most()) if self.prompt else sealed
        pages, channels, rows = kept // self.page_rows, self._channels(query.shape[3]), min(budget, kept)
        scan = Scan(pages, pages * channels * self.bytes_of(query))
        launch = products(query, pages, channels, scan.read)
        expected = "all tokens belong to the prompt" if self.prompt else ""
        counts = pages, -(-rows // self.page_rows)
        return replace(self.ranked(query, scan, [launch], counts, group=self.group, expected=expected), rows=rows)

    def logits(self, query: Tensor) -> Tensor:
        """Return `[B,H,G,P]` float32: the approximate logit of the rows of each page for queries `[B,H,G,D]`; -inf
        where a page is not held."""
        size = query.shape[3]
        largest, parts = largest_channels(query, self._channels(size), self.temperature(size))
        if self.page_rows > 1:
            largest = largest + size * (query.float().sum(2).gather(2, largest) > 0)
        logits = parts @ whole_channels(self.bounds.visible, largest).float()
        return logits.masked_fill_(~self.kept_pages.visible[:, None, None], -torch.inf)

    def _channels(self, size: int) -> int:
        """r, of heads of this size."""
        return min(self.channels or max(int(size * self.page_rows / self.ratio), 1), size)

    def held(self) -> Tensor | None:
        if not self.prompt:
            return None
        rows = self.kept_pages.data.repeat_interleave(self.page_rows, 1)
        return rows[:, None].expand(-1, self.bounds.full.shape[1], -1)

    def keep(self, ids: Tensor) -> None:
        # Rows are held, or not, by page, and the same places in all heads.
        pages = ids[..., :: self.page_rows] // self.page_rows
        self.bounds.keep(pages[:, :, None].expand(-1, -1, self.bounds.full.shape[2], -1))
        self.kept_pages.keep(pages[:, 0])


def paper_page(ratio: float) -> int:
    """Return the rows of a page in the paper's code: the square root of `ratio` rounded up, or 1 if that is more than
    the ratio."""
    root = math.ceil(math.sqrt(ratio))
    return root if root <= ratio else 1
