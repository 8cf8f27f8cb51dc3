"""Two stages: a page score proposes several times the rows that may be read, keys of few bits choose rows inside. Ours.

Quest's selector and others propose, https://arxiv.org/abs/2406.10774; the codes are those of `LowBit`, or the product
codes of `QueryPQ`: over buckets these are an inverted file, https://doi.org/10.1109/TPAMI.2010.57.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, both
from sparseattn.selectors.abilities import Biases, Evicts, RanksListed, ReadsKeys
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import check_least
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.tokens.base import Ranked
from sparseattn.selectors.tokens.lowbit import LowBit


class TwoStage(ReadsKeys, Selector):
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
        second: the second stage: "lowbit" (default), a `LowBit` of these bits, rows, group and scales, or a selector
            that can rank listed rows alone (`QueryPQ`). Then bits, rows and scales stay at their defaults, and
            `group` is the selector's own.

    A row is chosen alone, so a budget may be less than a page. The first stage may store rows in its own order
    (`SAAP`): the codes are made of rows as they are stored, and made anew for those that it moves. Its index is not
    kept in files (`index_files`), not even the first stage's. What the first stage observes, and what its tail stands
    for, is the choice of both.

    `scanned`: what the first stage scored, and the rows it proposed; of a union, the most that one query head's first
    stage scored. `scan_bytes`: the first stage's, the codes of the rows proposed, and once a list the levels of every
    group in which a row is proposed, or what another second stage reads beside its rows (a KV head has one list, or
    with "each" in both stages one a query head). A CPU stores codes of 16 rows together and reads them together, so
    single rows and pages of 8 cost it more than this.

    Raises:
        ValueError: an argument out of its range, or a first stage that evicts or biases.
    """

    operators = 16
    knob = "times"
    part_names = ("pages", "inside")

    def __init__(
        self,
        pages: Selector | str = "quest",
        times: int = 8,
        bits: int = 2,
        rows: int = 64,
        group: str = "softmax",
        scales: int = 16,
        second: Selector | str = "lowbit",
    ) -> None:
        from sparseattn.selectors.registry import as_selector  # which knows this class too

        check_least(times=(times, 1))
        self.pages, self.times = as_selector(pages), times
        if self.pages.find(Evicts):
            raise ValueError(
                f"a first stage proposes rows at every step, and {self.pages} drops what it does not: take one that "
                f"does not evict"
            )
        if self.pages.find(Biases):
            raise ValueError(
                f"{self.pages} corrects a sample of rows by a bias, which is wrong for some of the sample: take a "
                f"first stage without"
            )
        self.inside: Selector = LowBit(bits, rows, group=group, scales=scales)
        if str(second) != "lowbit":
            self.inside = _checked(as_selector(second), (bits, rows, group, scales))

    def has(self, ability: type) -> bool:
        # A first stage that joins rows of several seals has codes of stored ones made anew.
        joins = any(isinstance(part, Partitioned) for part in self.pages.tree())
        return super().has(ability) and (joins or ability is not ReadsKeys)

    @property
    def second(self) -> Selector | str:
        """What was given for the second stage."""
        return "lowbit" if isinstance(self.inside, LowBit) else self.inside

    @property
    def _codes(self) -> LowBit:
        """The second stage's settings where it is a `LowBit`, else their defaults."""
        return self.inside if isinstance(self.inside, LowBit) else LowBit()

    @property
    def bits(self) -> int:
        """Of a channel, in the second stage."""
        return self._codes.bits

    @property
    def rows(self) -> int:
        """That share levels."""
        return self._codes.rows

    @property
    def scales(self) -> int:
        """Bits of a level."""
        return self._codes.scales

    @property
    def group(self) -> str:
        """The vote of a query group on proposed rows."""
        return self.ranks.group

    @property
    def ranks(self) -> RanksListed:
        """The second stage."""
        assert isinstance(self.inside, RanksListed)
        return self.inside

    def fix(self, rows: int, seal: int) -> None:
        for _, part in self.parts():
            part.fix(rows, seal)

    def append(self, rows: Rows) -> Tensor | None:
        order = self.pages.append(rows)
        keys, unit = rows.keys, self.inside.unit
        if isinstance(self.inside, Ranked):
            self.inside.learn(rows)
        if order is not None:
            known = self.ranks.stored_rows()
            first = known + keys.shape[2] - order.shape[2]  # of the rows that move
            first -= first % unit
            if first < known:
                keys = torch.cat([self.stored_keys()[:, :, first:known], keys], 2)
                self.ranks.forget(first)
            keys = _moved(keys, order)
        self.ranks.extend(keys)
        return order

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        proposed, listed, page = self._propose(query, step, budget)
        if not listed.shape[2]:
            return proposed
        ids, beside = self.ranks.best_listed(query, step.valid, listed, page, budget)  # [B,Hs,S], [B,L]
        return Selection.tokens(ids, *self._costs(proposed, listed, page, beside, query, ids.shape[1]))

    def _propose(self, query: Tensor, step: StepContext, budget: int) -> tuple[Selection, Tensor, int]:
        """Return what the first stage proposes, the pages `[B,L,P]` of it, L = H or H*G, and their rows each."""
        rows = self._proposed_rows(step.valid.shape[1], budget)
        proposed = self.pages.counted(self.pages.select(query, step, rows), query, step, rows)
        return proposed, *self._listed(proposed, query.shape[1])

    def _proposed_rows(self, stored: int, budget: int) -> int:
        """Rows that the first stage is to propose of so many, in whole spans."""
        return math.ceil(min(budget * self.times, stored) / self.pages.span) * self.pages.span

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Predict a step as if what is proposed were spread evenly, and query heads were proposed other rows each."""
        batch, heads, members, _ = query.shape
        first = self.pages.full_scan(query, sealed, self._proposed_rows(sealed, budget))
        if first is None:
            return None
        rows, lists = self._spread(query, sealed, first)
        read = self._second_bytes(query, sealed, rows, first)
        few, own = min(budget, rows), heads * members if self.group == "each" else heads
        ranking, *others = self.ranks.listed_launches(query, rows, few, own)
        ranking = replace(ranking, bytes=batch * lists * read)
        launches = (*first.launches, ranking, *others, Launch("operator", count=self.operators))
        expected = both(first.expected, "the proposed tokens are spread evenly over the groups of levels")
        scanned, every = first.scanned + rows, first.read + read * lists / heads
        return Scan(scanned, every, launches, own, few, few, first.tail, expected)

    def _spread(self, query: Tensor, sealed: int, first: Scan) -> tuple[float, int]:
        """Rows that the second stage scores for a list, and its lists."""
        heads, members = query.shape[1:3]
        if first.lists > heads and self.group != "each":
            return min(first.rows * members, sealed), heads
        return first.rows, first.lists

    def _second_bytes(self, query: Tensor, sealed: int, rows: float, first: Scan) -> float:
        """Bytes that the second stage reads of so many proposed rows, for a list."""
        size = query.shape[3]
        spans = rows * first.runs / first.rows if first.rows else 0.0
        return rows * self.ranks.row_bytes(size) + self.ranks.bytes_beside(size, sealed, rows, spans)

    def _listed(self, proposed: Selection, heads: int) -> tuple[Tensor, int]:
        """Return the pages that are proposed, `[B,L,P]` int64, and their rows each; -1 for none, and for one again.

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
        self, proposed: Selection, listed: Tensor, page: int, beside: Tensor, query: Tensor, chosen: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `scanned` `[B,Hs]`, of Hs = `chosen`, and `scan_bytes` `[B,H]`; None what the first stage does not
        say.

        beside: bytes that are read beside the rows' own for each list, `[B,L]`.
        """
        own, lists = query.shape[1], listed.shape[1]
        count = (listed >= 0).sum(-1) * page  # [B,L]
        scanned = proposed.scanned
        if scanned is not None:
            if scanned.shape[1] > chosen:
                scanned = scanned.unflatten(1, (chosen, -1)).amax(2)
            scanned = scanned.repeat_interleave(chosen // scanned.shape[1], 1)
            scanned = scanned + count.repeat_interleave(chosen // lists, 1)
        read = proposed.scan_bytes
        if read is not None:
            parts = count * self.ranks.row_bytes(query.shape[3]) + beside
            read = read + parts.unflatten(1, (own, -1)).sum(2)
        return scanned, read


def _checked(second: Selector, others: tuple[int, int, str, int]) -> Selector:
    """Return `second` if it can rank listed rows; ValueError where it cannot, or where others are not at defaults."""
    if not isinstance(second, RanksListed) or isinstance(second, LowBit):
        raise ValueError(
            f"a second stage ranks listed rows by codes: querypq, or by bits, rows, group and scales a lowbit; got "
            f"{second}"
        )
    if second.span > 1:
        raise ValueError(f"a second stage chooses single rows: give {second} page=1")
    if others not in ((2, 64, "softmax", 16), (2, 64, second.group, 16)):
        raise ValueError(f"bits, rows, group and scales are of a lowbit: leave them out, or second={second}")
    return second.as_second()


def _moved(keys: Tensor, order: Tensor) -> Tensor:
    """Keys `[B,H,n,D]`, of which the last `order.shape[2]` move, as they will be stored."""
    still = keys.shape[2] - order.shape[2]
    stay = torch.arange(still, device=order.device).expand(*order.shape[:2], -1)
    order = torch.cat([stay, order + still], 2)
    return keys.gather(2, order[..., None].expand_as(keys))
