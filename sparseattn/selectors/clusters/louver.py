"""Louver: every row whose logit is above a threshold, none missed, by balls of keys in subspaces.

https://arxiv.org/abs/2605.06763. Letters: P parts of the channels, C clusters of a part, M rows of the sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, products, sorted_best
from sparseattn.kernels.listed_scores.dispatch import listed_scores
from sparseattn.kernels.random_draws import draws, streams
from sparseattn.selectors.abilities import ReadsKeys, WeighsUnsealed
from sparseattn.selectors.base import Rows, Selector, StepContext, best
from sparseattn.selectors.checks import check_least, half
from sparseattn.selectors.clusters.halved import halved

THRESHOLDS = ("share", "max", "meanmax", "gap", "mass")
SLACK = 1e-5  # of a norm, for each bound: float32 rounds a product of 128 channels by less
SCORED = {True: 1.0, False: 0.6}  # share of the rows in clusters taken, by `ball`: measured, docs/lab/log/2026-11.md
GAPS = 3  # the largest gaps of a sample, of which that at the highest score is the threshold


class Louver(WeighsUnsealed, ReadsKeys, Selector):
    """Reads, for each query head, every row whose product with the query reaches a threshold, and no other.

    The channels are split into parts, and in each part the keys into clusters of `rows` keys. A ball about a cluster's
    mean bounds the products of its keys. Each part's clusters are taken in the order of their bounds, those of one
    place in all parts together, until the bounds of a place sum to less than the threshold: no row outside the
    clusters taken can reach it. Rows of clusters taken are scored exactly.

    Args:
        threshold: what a sample of keys says. "share" (default): as large a share of the sample reaches it as the
            budget has of the rows; "max": its largest product; "meanmax": half way to its mean; "gap": the lower side
            of one of its three largest gaps, that at the highest products; "mass" (ours): so low that what is not read
            has less than a share `1 - p` of the softmax over everything, proved by the sample and by the sink and
            unsealed rows, whose weights are a part of the softmax.
        p: for "mass", the share that is held, above 0 and below 1.
        sample: M, keys of a KV head that are drawn for the threshold.
        subspaces: P, parts of the channels, 1 or more.
        rows: of a cluster, a power of two; the cache seals whole clusters.
        ball: False takes means for bounds, as the authors' kernels do: rows may be missed then.
        seed: of the sample.

    Where more rows reach the threshold than the budget allows, those with the largest products are read. "mass" keeps
    what it proves where the budget is `all`; with another budget it is broken as far as rows are cut off.

    Facts are from the authors' code (UIC-InDeXLab/Louver, `benchmark_area/kernel_impl`). There the stopping rule takes
    means for bounds in the runs of accuracy, so that "none is missed" holds for the paper's index and not for these;
    rows of clusters taken are attended to without a look at their products; and a sample of 256 or 512 keys is replaced
    at random as keys come. Here it is drawn by a hash of (seed, layer, head, position), which makes it the same in
    every batch.

    `scanned`: the clusters, the sample and the rows scored. `scan_bytes`: means of 16 bits, radii, numbers of the rows
    of clusters taken, and the keys scored, for each query head.

    Raises:
        ValueError: an argument out of its range.
    """

    operators = 40

    def __init__(
        self,
        threshold: str = "share",
        p: float = 0.95,
        sample: int = 256,
        subspaces: int = 4,
        rows: int = 4,
        ball: bool = True,
        seed: int = 0,
    ) -> None:
        check_least(sample=(sample, 2), subspaces=(subspaces, 1), rows=(rows, 1))
        if threshold not in THRESHOLDS:
            raise ValueError(f"threshold is one of {', '.join(THRESHOLDS)}, got {threshold!r}")
        if not 0 < p < 1:
            raise ValueError(f"p is the share of the softmax that is held, above 0 and below 1, got {p}")
        if rows & (rows - 1):
            raise ValueError(f"rows of a cluster are a power of two, got {rows}")
        self.threshold, self.p, self.sample, self.subspaces = threshold, p, sample, subspaces
        self.rows, self.ball, self.seed = rows, ball, seed
        self.centre = RowBuffer(3, spare=0.0)  # [B,H,P,C,W] means, of 16 bits; W channels of a part, 0 beyond them
        self.radius = RowBuffer(3, spare=-1.0)  # [B,H,P,C] float32, -1 where no real row is
        self.member = RowBuffer(3, spare=-1)  # [B,H,P,C,rows] int32, stored rows, -1 for padding
        self.drawn = RowBuffer(2, capacity=sample)  # [B,H,M] int32, rows of the sample by place; -1 for none
        self.draw = RowBuffer(2, capacity=sample)  # [B,H,M] int64, by which they were drawn

    def has(self, ability: type) -> bool:
        return super().has(ability) and (self.threshold == "mass" or ability is not WeighsUnsealed)

    @property
    def unit(self) -> int:
        return self.rows

    def why_not_dealt(self) -> str | None:
        return "its threshold comes from a sample of all of its rows"

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        if size < self.subspaces:
            raise ValueError(f"{self} splits the channels into {self.subspaces} parts, and a key has {size} channels")

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.centre, self.radius, self.member):
            buffer.fix(rows // self.rows)
        for buffer in (self.drawn, self.draw):
            buffer.fix(self.sample)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def append(self, rows: Rows) -> None:
        real = rows.positions >= 0
        first = self.radius.rows * self.rows  # rows shown before these
        keys = self._split(rows.keys.float())  # [B,H,P,n,W]
        there = real[:, None, None].expand(keys.shape[:4])
        place = halved(keys, there, self.rows).unflatten(3, (-1, self.rows))  # [B,H,P,C,rows]
        there = there.gather(3, place.flatten(3)).view_as(place)
        members = keys.gather(3, place.flatten(3)[..., None].expand(*keys.shape)).unflatten(3, (-1, self.rows))
        members = members.masked_fill(~there[..., None], 0.0)
        centre = members.sum(4) / there.sum(4).clamp(min=1)[..., None]
        centre = centre.to(half(rows.keys))
        far = (members - centre[..., None, :].float()).norm(dim=-1) + SLACK * members.norm(dim=-1)
        self.centre.append(centre)
        self.radius.append(far.masked_fill(~there, -1.0).amax(-1))
        self.member.append(torch.where(there, place + first, -1).int())
        self._sample(rows, real, first)

    def _split(self, x: Tensor) -> Tensor:
        """`[B,H,n,D]` as `[B,H,P,n,W]`: contiguous channels, the first parts one longer where P does not divide D."""
        size = x.shape[-1]
        width, longer = divmod(size, self.subspaces)
        pieces = x.split([width + 1] * longer + [width] * (self.subspaces - longer), -1)
        return torch.stack([functional.pad(piece, (0, width + (longer > 0) - piece.shape[-1])) for piece in pieces], -3)

    def _sample(self, rows: Rows, real: Tensor, first: int) -> None:
        """Return the M rows with the smallest draws of all so far: a sample without replacement at any time."""
        batch, heads, new, _ = rows.keys.shape
        stream = streams(self.seed, self.layer, self.head_numbers(heads), real.device)
        draw = draws(stream, torch.zeros_like(rows.positions[:, 0]), rows.positions)  # [B,H,n]
        last = torch.iinfo(torch.int64).max
        draw = draw.masked_fill(~real[:, None], last)
        at = torch.arange(first, first + new, dtype=torch.int32, device=real.device).expand(batch, heads, -1)
        if not self.drawn.rows:
            self.drawn.append(at.new_full((batch, heads, self.sample), -1))
            self.draw.append(draw.new_full((batch, heads, self.sample), last))
        draw, at = torch.cat([self.draw.data, draw], 2), torch.cat([self.drawn.data, at], 2)
        least = draw.topk(self.sample, -1, largest=False).indices
        at = at.gather(2, least).masked_fill(draw.gather(2, least) == last, -1)
        order = at.argsort(-1)  # rising, as `listed_scores` wants them
        self.drawn.data.copy_(at.gather(2, order))
        self.draw.data.copy_(draw.gather(2, least).gather(2, order))

    # -- the query -----------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        batch, heads, group, size = query.shape
        keys = self.stored_keys()
        threshold = self.products(query, step, budget)  # [B,H,G]
        taken = self._taken(query, threshold)  # [B,H,G,P,C]
        ids = self._listed(taken, keys.shape[2])  # [B,HG,N]
        scores = listed_scores(query, keys, ids)
        kept = scores >= threshold.flatten(1, 2)[..., None]
        rows = best(scores.masked_fill(~kept, -torch.inf), budget)
        if not step.counted:
            return Selection.tokens(rows)
        clusters = (self.radius.visible[:, :, 0] >= 0).sum(-1).repeat_interleave(group, 1)  # [B,HG]
        drawn = (self.drawn.visible >= 0).sum(-1).repeat_interleave(group, 1)
        scored = (ids >= 0).sum(-1) + drawn
        listed = self.rows * taken.flatten(3).sum(-1).flatten(1, 2)
        read = clusters * (2 * size + 4 * self.subspaces) + 4 * listed + scored * size * self.bytes_of(query)
        return Selection.tokens(rows, clusters + scored, read.view(batch, heads, group).sum(-1))

    def products(self, query: Tensor, step: StepContext, budget: int) -> Tensor:
        """Return the threshold of each query head `[B,H,G]` float32, on products of queries and keys; -inf: all."""
        group, drawn = query.shape[2], self.drawn.visible
        scores = listed_scores(query, self.stored_keys(), drawn.repeat_interleave(group, 1))
        scores = scores.sort(-1, descending=True).values.unflatten(1, (-1, group))  # [B,H,G,M], then -inf
        many = (drawn >= 0).sum(-1, keepdim=True)[:, :, None].expand(*scores.shape[:3], 1)  # [B,H,G,1]
        real = step.valid.sum(-1)  # [B]
        if self.threshold == "share":
            wanted = (budget * many.double() / real.clamp(min=1)[:, None, None, None]).long().clamp(min=1)
            bounds = scores.gather(-1, wanted.clamp(max=scores.shape[3]) - 1)
            return torch.where(wanted >= many, -torch.inf, bounds)[..., 0]
        if self.threshold == "max":
            return scores[..., 0]
        if self.threshold == "meanmax":
            mean = scores.masked_fill(scores.isneginf(), 0.0).sum(-1) / many[..., 0].clamp(min=1)
            return (scores[..., 0] + mean) / 2
        if self.threshold == "gap":
            return self._below_gap(scores)
        assert step.unsealed_lse is not None
        heat = self.temperature(query.shape[3])
        known = torch.logaddexp((scores / heat).logsumexp(-1), step.unsealed_lse.to(scores.device))
        return heat * (known + math.log(1 - self.p) - real.clamp(min=1).log()[:, None, None])

    @staticmethod
    def _below_gap(scores: Tensor) -> Tensor:
        """Of the three largest gaps of `[B,H,G,M]`, falling, the lower side of the first."""
        gaps = (scores[..., :-1] - scores[..., 1:]).nan_to_num(nan=-1.0, posinf=-1.0)
        place = gaps.topk(min(GAPS, gaps.shape[3]), -1).indices.amin(-1, keepdim=True)
        return scores.gather(-1, place + 1)[..., 0]

    def _taken(self, query: Tensor, threshold: Tensor) -> Tensor:
        """`[B,H,G,P,C]` bool: the clusters that are taken before the bounds of a place sum to less."""
        parts = self._split(query.float()).transpose(2, 3)  # [B,H,G,P,W]
        bounds = torch.einsum("bhgpw,bhpcw->bhgpc", parts, self.centre.visible.float())
        radius = self.radius.visible[:, :, None]
        if self.ball:
            norms = parts.norm(dim=-1, keepdim=True)
            bounds = bounds + norms * radius + SLACK * norms * self.centre.visible.float().norm(dim=-1)[:, :, None]
        bounds = bounds.masked_fill(radius < 0, -torch.inf)
        ranked, order = bounds.sort(-1, descending=True)
        below = ranked.sum(3) < threshold[..., None]  # [B,H,G,C]
        before = below.cumsum(-1) - below.long() == 0  # the first place that is below is taken too
        taken = torch.zeros_like(bounds, dtype=torch.bool)
        return taken.scatter_(-1, order, before[:, :, :, None].expand_as(bounds)) & (radius >= 0)

    def _listed(self, taken: Tensor, stored: int) -> Tensor:
        """`[B,H*G,N]` int32: the rows of clusters that are taken, each at its own place, -1 for others."""
        member = self.member.visible[:, :, None].expand(*taken.shape, -1)  # [B,H,G,P,C,rows]
        place = torch.where(taken[..., None] & (member >= 0), member, stored).flatten(3).long()
        listed = torch.zeros(*taken.shape[:3], stored + 1, dtype=torch.bool, device=taken.device)
        listed = listed.scatter_(3, place, True)[..., :stored].flatten(1, 2)
        return torch.where(listed, torch.arange(stored, device=taken.device), -1).int()

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        (batch, heads, group, size), rows = query.shape, min(budget, sealed)
        clusters, drawn = math.ceil(sealed / self.rows), min(self.sample, sealed)
        listed = SCORED[self.ball] * sealed
        scored = listed + drawn
        read = group * (
            clusters * (2 * size + 4 * self.subspaces)
            + 4 * self.subspaces * listed
            + scored * size * self.bytes_of(query)
        )
        every = batch * heads * group
        scoring = (
            products(query, clusters, size, 2.0 * group * clusters * size),
            Launch("sort", entries=self.subspaces * sorted_best(every, clusters, clusters)),
            Launch("walk", bytes=every * scored * size * self.bytes_of(query), entries=every * scored),
        )
        counts = sealed, rows
        expected = "balls reach nearly all rows of 64 channels, and means half of them, as measured"
        return self.ranked(query, Scan(clusters + scored, read), scoring, counts, expected=expected)
