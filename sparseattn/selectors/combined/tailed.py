"""Estimated tails: rows that a method does not read stand in by the mean key and value of their group.

The estimation zone of RetroInfer, https://arxiv.org/abs/2505.02922, and of Double-P, https://arxiv.org/abs/2602.05191,
for any method that chooses rows, pages or buckets. Letters: P groups, C buckets.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Launch, Scan, both, products, sorted_best
from sparseattn.selectors.abilities import Biases, FollowsMoves, HasTail
from sparseattn.selectors.base import Rows, Selector, StepContext
from sparseattn.selectors.checks import half
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.tail_estimate import check_zone, estimated, outside, summed

ROWS = 64  # of a group, where the method chooses single rows


class Tailed(HasTail, FollowsMoves, Wrapper):
    """Reads what another selector reads; of every group, one row stands for the rows that are not read.

    It has the group's mean key and mean value, and as bias the logarithm of how many of its rows are not read: so
    `left * exp(q.mean / sqrt(D))` is what they are taken to weigh, and attention to both is merged by log-sum-exp.

    Args:
        inner: the selector, or its name. Any but those whose selections have a bias, which stand for what is not read
            already, and those with a tail.
        rows: of a group, a power of two, the inner's span or more; 0 (default): its pages, or 64 where it chooses
            single rows. A method with buckets (`SAAP`, `KMeans`, `Moments`) has these as its groups, and takes 0.
        zone: share of the groups that stand in, those that weigh most by the estimate; 1.0 (default): all. RetroInfer:
            23.2 % of its clusters, behind the 1.8 % that are read.

    Of a group that is read in part the mean is that of *all* its rows, and the bias counts those not read, so that no
    row counts twice. Departure: the mean of the unread rows alone, which needs what was read once more, has the larger
    error where rows are chosen one by one. The mean of exponentials is above the exponential of the mean, so that a
    mean key weighs its rows too low; rows that are read, whose logits are the highest, raise the mean and make up for
    some of it. Buckets are cut by age, not by score, and pages are read whole.

    Groups are of consecutive rows as they came, and rows that the inner moves (an order of its own, `compact`) take
    the number of their group along. Rows that an inner drops for good go on standing in.

    What it keeps: 16 bits of each mean's channel, 4 bytes a group; of buckets, which grow, float32 sums besides; 4
    bytes a row where rows move. What it reads: each group that stands in counts as a row attended, its bias with it.
    `scan_bytes` is the inner's, the other groups' mean keys where a `zone` ranks them, and 4 bytes a row read where
    rows move. `scanned`: the inner's, and with a `zone` the groups.

    Raises:
        ValueError: an argument out of its range, or an inner that biases or has a tail.
    """

    operators = 24

    def __init__(self, inner: Selector | str = "quest", rows: int = 0, zone: float = 1.0) -> None:
        super().__init__(inner)
        inner = self.inner
        biased = bool(inner.find(Biases))
        if biased or inner.find(HasTail):
            has = "a bias" if biased else "a tail"
            raise ValueError(
                f"the selections of {inner} have {has} that stands for rows not read, which would count twice: take "
                f"an inner without (of sparq: mean=False)"
            )
        if isinstance(inner, Partitioned):
            if rows:
                raise ValueError(f"the groups of {inner} are its buckets, so rows is 0, got {rows}")
        elif rows and (rows & (rows - 1) or rows < inner.span):
            raise ValueError(
                f"rows of a group are a power of two and at least the span of {inner}, {inner.span}, or 0, got {rows}"
            )
        self.rows, self.zone = rows, check_zone(zone)
        self.keys, self.values = RowBuffer(2), RowBuffer(2)  # [B,H,P,D] means, of 16 bits
        self.count = RowBuffer(2, spare=0)  # [B,H,P] int32, rows of a group
        self.sums = RowBuffer(2)  # [B,H,C,2D] float32, of keys and values of a bucket
        self.member = RowBuffer(2, spare=0)  # [B,H,N] int32, the group of a stored row, from when rows move

    @property
    def width_of_group(self) -> int:
        """Rows of a group that are not buckets."""
        return self.rows or (self.inner.span if self.inner.span > 1 else ROWS)

    @property
    def unit(self) -> int:
        return self.inner.unit if self.buckets else math.lcm(self.inner.unit, self.width_of_group)

    @property
    def buckets(self) -> bool:
        """Whether its groups are buckets."""
        return isinstance(self.inner, Partitioned)

    def fix(self, rows: int, seal: int) -> None:
        self.inner.fix(rows, seal)
        groups = 0 if self.buckets else rows // self.width_of_group  # buckets: as many as the first seal brings
        for buffer in (self.keys, self.values, self.count, self.sums):
            buffer.fix(groups)
        self.member.fix(rows)

    # -- rows --------------------------------------------------------------------------------------------------------

    def append(self, rows: Rows) -> Tensor | None:
        order = self.inner.append(rows)
        if self.buckets:
            assert order is not None
            self._join(rows, order)
        else:
            rows_before = self.count.rows
            self._group(rows)
            self._move(order, rows_before, rows.keys)
        return order

    def _group(self, rows: Rows) -> None:
        """Make new groups of consecutive rows; padding comes in whole groups."""
        width = self.width_of_group
        for buffer, given in ((self.keys, rows.keys), (self.values, rows.values)):
            buffer.append(given.unflatten(2, (-1, width)).float().mean(3).to(half(given)))
        count = (rows.positions[:, ::width] >= 0).int() * width
        self.count.append(count[:, None].expand(-1, rows.keys.shape[1], -1))

    def _move(self, order: Tensor | None, rows_before: int, keys: Tensor) -> None:
        """Follows rows `keys` `[B,H,n,D]`, behind `rows_before` groups, that are stored in an `order`."""
        if order is None and not self.member.rows:
            return
        batch, heads, new, _ = keys.shape
        if not self.member.rows and rows_before:
            self._note(0, rows_before * self.width_of_group, (batch, heads), keys.device)
        self._note(rows_before * self.width_of_group, new, (batch, heads), keys.device)
        if order is not None:
            last = self.member.data[:, :, -order.shape[2] :]
            last.copy_(last.gather(2, order))

    def _note(self, first: int, new: int, shape: tuple[int, int], device: torch.device) -> None:
        """Note the groups of the `new` rows that came behind `first` others."""
        at = torch.arange(first, first + new, dtype=torch.int32, device=device)
        self.member.append(at.div(self.width_of_group, rounding_mode="floor").expand(*shape, -1))

    def _join(self, rows: Rows, order: Tensor) -> None:
        """Let new rows join the sums of their buckets."""
        assert isinstance(self.inner, Partitioned)
        new, moved = rows.keys.shape[2], order.shape[2]
        place = order.argsort(2)[..., moved - new :] + (self.inner.places - moved)
        bucket, buckets = self.inner.bucket_at(place), self.inner.edges.full.shape[3] - 2
        both = torch.cat([summed(part, bucket, buckets) for part in (rows.keys, rows.values)], -1)  # [B,H,C,2D]
        ones = torch.ones_like(bucket, dtype=torch.int32)
        count = torch.zeros_like(ones[..., :1]).repeat(1, 1, buckets + 1).scatter_add_(2, bucket, ones)[..., :buckets]
        if not self.count.rows:
            self.sums.append(torch.zeros_like(both))
            self.count.append(torch.zeros_like(count))
            for buffer, part in ((self.keys, rows.keys), (self.values, rows.values)):
                buffer.append(both[..., : part.shape[3]].to(half(part)))
        self.sums.data.add_(both)
        self.count.data.add_(count)
        mean = self.sums.data / self.count.data.clamp(min=1)[..., None]
        for buffer, part in zip((self.keys, self.values), mean.chunk(2, -1), strict=True):
            buffer.data.copy_(part)

    def keep(self, ids: Tensor) -> None:
        if not self.member.rows:
            self._note(0, self.count.rows * self.width_of_group, (ids.shape[0], ids.shape[1]), ids.device)
        self.member.keep(ids)

    # -- the query ---------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        chosen = self.inner.counted(self.inner.select(query, step, budget), query, step, budget)
        (heads, size), count = (query.shape[1], query.shape[3]), self.count.visible
        read, scanned = chosen.scan_bytes, chosen.scanned
        if read is not None and self.member.rows:
            read = read + 4 * chosen.attended.unflatten(1, (heads, -1)).sum(-1)
        if read is not None and self.zone < 1:
            read = read + outside(count, self._left(chosen), self.zone) * (size * self.bytes_of(self.keys.full) + 4)
        if scanned is not None and self.zone < 1:
            scanned = scanned + (count > 0).sum(-1).repeat_interleave(scanned.shape[1] // heads, 1)
        return replace(chosen, scanned=scanned, scan_bytes=read)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        """Predict a step as if no group that stands in were read whole."""
        scan, size = self.inner.full_scan(query, sealed, budget), query.shape[3]
        if scan is None:
            return None
        groups = tail = self._groups(query, sealed)
        if self.zone < 1:
            tail = math.ceil(self.zone * groups)
            mean_bytes = size * self.bytes_of(torch.empty(0, dtype=half(query))) + 4
            ranking = products(query, groups, size, 2.0 * groups * size)
            sort = Launch("sort", entries=sorted_best(query.shape[0] * scan.lists, groups, tail))
            read = scan.read + (groups - tail) * mean_bytes
            scan = replace(scan, scanned=scan.scanned + groups, read=read, launches=(*scan.launches, ranking, sort))
        launches = (*scan.launches, Launch("operator", count=self.operators))
        expected = both(scan.expected, "no group that the tail stands for is read in full")
        return replace(scan, launches=launches, tail=tail, expected=expected)

    def _groups(self, query: Tensor, sealed: int) -> int:
        """How many groups so many rows make."""
        return self.inner.buckets_of(query) if isinstance(self.inner, Partitioned) else sealed // self.width_of_group

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        count, keys, values = self.count.visible, self.keys.visible, self.values.visible
        left, temperature = self._left(selection), self.temperature(query.shape[3])
        return estimated(query, keys, values, count, left, self.zone, temperature)

    def _left(self, selection: Selection) -> Tensor:
        """`[B,Hs,P]` int32: how many rows of each group a selection does not name."""
        if isinstance(self.inner, Partitioned):  # a slot lies in one bucket
            used, rows = selection.length, selection.start
            group = self.inner.bucket_at(rows.clamp(min=0))
        else:
            rows = selection.rows
            used, rows = (rows >= 0).int(), rows.clamp(min=0)
            group = self._group_of(rows)
        count = self.count.visible
        left = count.repeat_interleave(group.shape[1] // count.shape[1], 1)
        left = torch.nn.functional.pad(left, (0, 1))  # where a slot that is not used lies in no bucket
        return left.scatter_add(2, group, -used)[..., :-1]

    def _group_of(self, rows: Tensor) -> Tensor:
        """Return the groups of stored rows `[B,Hs,R]`, int64."""
        if not self.member.rows:
            return rows.div(self.width_of_group, rounding_mode="floor")
        member = self.member.visible
        placed = rows.unflatten(1, (member.shape[1], -1)).flatten(2)  # [B,H,each*R]
        return member.gather(2, placed).long().view(rows.shape)
