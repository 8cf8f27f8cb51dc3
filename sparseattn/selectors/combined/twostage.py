"""Two stages: a page score proposes several times the rows that may be read, keys of few bits choose rows inside. Ours.

Quest's selector and others propose, https://arxiv.org/abs/2406.10774; the codes are those of `LowBit`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Launch, Scan, picked
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys import packing
from sparseattn.selectors.base import Rows, Selector, check_least
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.tokens.lowbit import LowBit


class TwoStage(Selector):
    """Reads, of the rows that another selector proposes, those whose keys of few bits have the largest product.

    Args:
        pages: the first stage, a selector or its name: what it would read at `times` the budget, rounded up to its
            span, is proposed. `Quest` (default) or `LowBit(1, page=16)` propose pages, `SAAP` runs of rows, another
            `TwoStage` single rows. Any selector but those that evict, as they would drop rows for good by what they
            propose, and those whose selections have a bias, which is right for all of a sample alone.
        times: rows proposed for every row of the budget, 1 or more.
        bits: of a channel of a row in the second stage, see `LowBit`.
        rows: a group that shares levels. Rows are sealed by the least common multiple of this and of the first stage's
            unit; those that wait are read densely.
        group: how a query group votes on proposed rows, see `vote`. Query heads vote within what is proposed to them.
            Where `pages` proposes for each query head and `group` makes one choice per KV head, that is the union of
            its query heads' proposals, up to G times as many rows; where only `group` is "each", every query head
            chooses from its KV head's.
        scales: bits of a level in the second stage, see `LowBit`.

    A row is chosen alone, so a budget may be less than a page. The first stage may store rows in its own order
    (`SAAP`): the codes are made of rows as they are stored, and made anew for those that it moves. Its index is not
    kept in files (`index_files`), not even the first stage's. What the first stage observes, and what its tail stands
    for, is the choice of both.

    `scanned`: what the first stage scored, and the rows it proposed; of a union, the most that one query head's first
    stage scored. `scan_bytes`: the first stage's, the codes of the rows proposed, and the levels of every group in
    which a row is proposed, once a list (a KV head has one, or with "each" in both stages one a query head). A CPU
    stores codes of 16 rows together and reads them together, so single rows and pages of 8 cost it more than this.

    Raises:
        ValueError: an argument out of its range, or a first stage that evicts or biases.
    """

    operators = 16
    knob = "times"
    usual = ("pages=Quest",)

    def __init__(
        self,
        pages: Selector | str = "quest",
        times: int = 8,
        bits: int = 2,
        rows: int = 64,
        group: str = "softmax",
        scales: int = 16,
    ) -> None:
        from sparseattn.selectors.registry import as_selector  # which knows this class too

        check_least(times=(times, 1))
        self.pages, self.times = as_selector(pages), times
        if self.pages.evicts:
            raise ValueError(
                f"a first stage proposes rows at every step, and {self.pages!r} drops what it does not: take one that "
                f"does not evict"
            )
        if self.pages.biases:
            raise ValueError(
                f"{self.pages!r} corrects a sample of rows by a bias, which is wrong for some of the sample: take a "
                f"first stage without"
            )
        self.inside = LowBit(bits, rows, group=group, scales=scales)
        # One that joins rows of several seals has codes of stored ones made anew.
        self.reads_stored = self.pages.reads_stored or any(isinstance(one, Partitioned) for one in self.pages.within())

    @property
    def bits(self) -> int:
        """Of a channel, in the second stage."""
        return self.inside.bits

    @property
    def rows(self) -> int:
        """That share levels."""
        return self.inside.rows

    @property
    def group(self) -> str:
        """The vote of a query group on proposed rows."""
        return self.inside.group

    @property
    def scales(self) -> int:
        """Bits of a level."""
        return self.inside.scales

    def fix(self, rows: int, seal: int) -> None:
        for _, part in self.parts():
            part.fix(rows, seal)

    def append(self, rows: Rows) -> Tensor | None:
        order = self.pages.append(rows)
        if order is None:
            self.inside.append(dataclasses.replace(rows, queries=None, query_positions=None))
        else:
            held = self.inside.real.rows
            first = held + rows.keys.shape[2] - order.shape[2]  # of the rows that move
            first -= first % self.rows
            keys, real = rows.keys, rows.positions >= 0
            if first < held:
                keys = torch.cat([self.stored_keys()[:, :, first:held], keys], 2)
                real = torch.cat([self.inside.real.data[:, first:], real], 1)
                self.inside.forget(first)
            self.inside.append(_moved(keys, real, order))
        return order

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        batch, heads, _, size = query.shape
        if not self.inside.real.rows:
            return Selection.none(batch, heads, query.device)
        real = self.inside.real.visible
        asked = self._asked(real.shape[1], budget)
        proposed = self.pages.select(query, positions, asked)
        listed, page = self._listed(proposed, heads)  # [B,L,P], L = H or H*G
        if not listed.shape[2]:
            return proposed
        index = self.inside.index
        ids, groups = quantized_keys.best_listed(query, index, self.group, listed, page, budget)  # [B,Hs,S], [B,L]
        levels = self.inside.levels_bytes(groups, size)
        return Selection.tokens(ids, *self._costs(proposed, listed, page, levels, (heads, ids.shape[1])))

    def _asked(self, stored: int, budget: int) -> int:
        """Rows that the first stage is to propose of so many, in whole spans."""
        return math.ceil(min(budget * self.times, stored) / self.pages.span) * self.pages.span

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """As if what is proposed were spread evenly, and query heads were proposed other rows each."""
        batch, heads, members, size = query.shape
        first = self.pages.cost(query, sealed, self._asked(sealed, budget))
        rows, lists = first.rows, first.lists
        if lists > heads and self.group != "each":
            rows, lists = min(rows * members, sealed), heads
        spans = self.rows * first.runs / first.rows if first.rows else 0.0
        groups = sealed // self.rows * (1 - (1 - rows / sealed) ** max(spans, 1.0))
        codes = rows * 4 * packing.words(size, self.bits) + float(self.inside.levels_bytes(torch.tensor(groups), size))
        few, own = min(budget, rows), heads * members if self.group == "each" else heads
        second = Launch(
            "listed",
            bytes=batch * lists * codes,
            flops=2.0 * batch * heads * members * rows * size,
            entries=picked(batch * own, rows, few),
        )
        launches = (*first.launches, second, Launch("operator", count=self.operators))
        expected = "; ".join(
            filter(None, (first.expected, "proposed rows are spread evenly over the groups of levels"))
        )
        return Scan(first.read + codes * lists / heads, launches, own, few, few, first.tail, expected)

    def observe(self, selection: Selection, weights: Tensor) -> None:
        self.pages.observe(selection, weights)

    def tail(self, query: Tensor, positions: Tensor, selection: Selection) -> Tail | None:
        return self.pages.tail(query, positions, selection)

    def _listed(self, proposed: Selection, heads: int) -> tuple[Tensor, int]:
        """The pages that are proposed, `[B,L,P]` int64, and their rows each; -1 for none, and for the same one again.

        L is `heads`, or where both stages choose for every query head as many as these.
        """
        page = proposed.span if proposed.whole else 1
        listed = proposed.rows if page == 1 else torch.where(proposed.length > 0, proposed.start // page, -1).long()
        if listed.shape[1] == heads or self.group == "each":
            return listed, page
        listed = listed.unflatten(1, (heads, -1)).flatten(2).sort(-1).values
        again = torch.nn.functional.pad(listed[..., 1:] == listed[..., :-1], (1, 0))
        return listed.masked_fill(again, -1), page

    def _costs(
        self, proposed: Selection, listed: Tensor, page: int, levels: Tensor, heads: tuple[int, int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """`scanned` `[B,Hs]` and `scan_bytes` `[B,H]` for (H, Hs) `heads`; None what the first stage does not say.

        levels: bytes of them that are read for each list, `[B,L]`.
        """
        (own, chosen), lists = heads, listed.shape[1]
        count = (listed >= 0).sum(-1) * page  # [B,L]
        scanned = proposed.scanned
        if scanned is not None:
            if scanned.shape[1] > chosen:
                scanned = scanned.unflatten(1, (chosen, -1)).amax(2)
            scanned = scanned.repeat_interleave(chosen // scanned.shape[1], 1)
            scanned = scanned + count.repeat_interleave(chosen // lists, 1)
        read = proposed.scan_bytes
        if read is not None:
            parts = count * (4 * packing.words(self.inside.low.visible.shape[-1], self.bits)) + levels
            read = read + parts.unflatten(1, (own, -1)).sum(2)
        return scanned, read


def _moved(keys: Tensor, real: Tensor, order: Tensor) -> Rows:
    """Rows `[B,H,n,D]`, of which the last `order.shape[2]` move, as they will be stored; without values.

    Args:
        real: `[B,n]` bool, which are no padding. Heads may store padding apart: a place is real if it is in any head.
    """
    still = keys.shape[2] - order.shape[2]
    stay = torch.arange(still, device=order.device).expand(*order.shape[:2], -1)
    order = torch.cat([stay, order + still], 2)
    keys = keys.gather(2, order[..., None].expand_as(keys))
    real = real[:, None].expand_as(order).gather(2, order).any(1)
    return Rows(keys, keys[:, :, :0], torch.where(real, 0, -1))
