"""ParisKV: turned keys whose sign patterns collide with the query's best ones, ranked again by codes of four bits.

https://arxiv.org/abs/2602.07721
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from sparseattn.core.hadamard import walsh_hadamard
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.kernels import codebooks
from sparseattn.kernels.topk.dispatch import best_rows
from sparseattn.selectors.base import Rows, Selector, StepContext, vote
from sparseattn.selectors.checks import check_group, half

CHANNELS = 8  # of a subspace
PATTERNS = 1 << CHANNELS
MAGNITUDES = 8  # levels of a channel's size within its subspace; with the sign four bits
TIERS = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0)  # a pattern has a point for each that it falls in
# Sequences of fewer rows -> share of the rows that patterns collide with, share that are candidates, as its code has it
SHARES = ((5_000, 0.5, 0.5), (10_000, 0.3, 0.25), (30_000, 0.25, 0.2), (math.inf, 0.2, 0.1))
TINY = 1e-30


class ParisKV(Selector):
    """Reads the candidates with the largest products of four bits, which are the rows with the most collisions.

    Keys are turned by a randomised Hadamard transform and cut into subspaces of eight channels. In each a row is named
    by its eight signs, and the centroid of a name is that sign pattern itself: nothing is learned, so nothing drifts. A
    query ranks the 256 patterns of every subspace by their product with it and takes the best until these hold a share
    of all rows, in six tiers: the first five hundredths of that share give a row six points, the last quarter one. The
    rows with the most points over all subspaces are candidates. They are ranked again by the product with their codes:
    a sign and one of eight magnitudes for each channel, times a weight of each subspace, with which a code has the
    key's own product with itself.

    Args:
        collide: share of the rows that the patterns taken hold in a subspace, above 0 to 1; None (default): as its code
            has it, 0.2, and below 30,000, 10,000 and 5,000 rows 0.25, 0.3 and 0.5.
        candidates: share of the rows that are ranked again, at least the budget, above 0 to 1; None (default): 0.1,
            and below these numbers of rows 0.2, 0.25 and 0.5.
        seed: of the transform, the same in all heads and layers.
        group: how a query group votes: "sum" (default, its code's): the mean query of the group searches for all;
            "softmax", "max": points of all query heads are summed, and candidates ranked by the heads' vote (see
            `vote`); "each": every query head searches for itself.

    An index row takes `D / 8` bytes of names, `D / 2` of codes and `D / 4` of weights in 16 bits. Signs stand in names
    and in codes. A head size that is no power of two, or below eight, is filled up with zeros to the next one before it
    is turned, and D is that size here. Beside them a KV head has 32 D counts of four bytes: rows of each name.

    Departures, from the paper's code (amy-77/ParisKV). It brings keys and queries to unit length first; lengths cancel
    in names, codes and weights, so that is left out. It turns in 16 bits, here float32. Its
    magnitudes come from fewer rounds on a sample, here they are exact. Of rows with as many points as
    the last candidate the newest are candidates; there any are. It answers contexts below 2,000 tokens, or of less than
    about twice the budget, by full attention; here a step reads all rows where the budget allows it alone. It has a
    sink of 4 tokens and a window, and encodes rows 512 at a time: both are the cache's here.

    `scanned`: names, and candidates. `scan_bytes`: the names of every row and the counts, once per KV head, and codes
    and weights of the candidates, for each query head with "each".

    Raises:
        ValueError: a share that is none.
    """

    operators = 90

    def __init__(
        self, collide: float | None = None, candidates: float | None = None, seed: int = 0, group: str = "sum"
    ) -> None:
        for name, share in (("collide", collide), ("candidates", candidates)):
            if share is not None and not 0 < share <= 1:
                raise ValueError(f"{name} is a share of the rows, above 0 to 1, or None, got {share}")
        self.collide, self.candidates, self.seed, self.group = collide, candidates, seed, check_group(group)
        self.names = RowBuffer(2, spare=0)  # [B,H,N,S] uint8; spare names must be there, too
        self.codes = RowBuffer(2, spare=0)  # [B,H,N,4*S] uint8, two channels a byte
        self.weights = RowBuffer(2, spare=0.0)  # [B,H,N,S] 16 bits
        self.counts = RowBuffer(2)  # [B,H,S,256] int32, real rows of each name

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.names, self.codes, self.weights):
            buffer.fix(rows)
        self.counts.fix()

    def append(self, rows: Rows) -> None:
        real = rows.positions >= 0
        cut = turned(rows.keys, self.seed).unflatten(3, (-1, CHANNELS))  # [B,H,n,S,8]
        signs, length = cut >= 0, cut.square().sum(-1).sqrt()
        names = (signs * _powers(CHANNELS, cut.device)).sum(-1, dtype=torch.uint8)
        size = cut.abs() / length.clamp(min=TINY)[..., None]  # of a unit vector
        edges, levels = _magnitudes(cut.device)
        magnitude = torch.bucketize(size, edges)
        own = (levels[magnitude] * size).sum(-1)  # product of a code with its direction
        self.names.append(names)
        self.codes.append(codebooks.paired((signs * MAGNITUDES + magnitude).to(torch.uint8).flatten(3)))
        self.weights.append((length / own.clamp(min=TINY)).to(half(rows.keys)))
        self._count(names, real)

    def _count(self, names: Tensor, real: Tensor) -> None:
        names = names.transpose(2, 3).long()  # [B,H,S,n]
        if not self.counts.rows:
            self.counts.capacity = names.shape[2]
            self.counts.append(torch.zeros(*names.shape[:3], PATTERNS, dtype=torch.int32, device=names.device))
        self.counts.data.scatter_add_(3, names, real.int()[:, None, None].expand_as(names))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        rotated = turned(query, self.seed) / self.temperature(query.shape[3])  # [B,H,G,D']
        if self.group == "sum":
            rotated = rotated.mean(2, keepdim=True)
        ids = self._candidates(self.points(rotated, step.valid), step.valid, budget)  # [B,L,C], L = H or H*G
        logits = self.estimated(rotated, ids)  # [B,L,G,C], G = 1 where a list has one query
        voted = logits[:, :, 0] if logits.shape[2] == 1 else vote(logits, self.group)
        slot = best_rows(voted, budget).long()
        return Selection.tokens(torch.where(slot < 0, -1, ids.gather(2, slot.clamp(min=0))))

    def points(self, rotated: Tensor, valid: Tensor) -> Tensor:
        """Return `[B,H,G,N]` float32: collisions of each row with queries `[B,H,G,D']`, turned; -inf where it is not
        real."""
        batch, heads, _, size = rotated.shape
        patterns = _patterns(rotated.device).expand(batch, heads, size // CHANNELS, -1, -1)
        order = codebooks.tables(rotated, patterns).argsort(dim=-1, descending=True, stable=True)  # [B,H,G,S,256]
        counts = self.counts.visible[:, :, None].expand_as(order).gather(4, order)
        before = counts.cumsum(-1) - counts  # rows of better patterns
        count = valid.sum(-1)  # [B]
        most = count * (self._shares(count)[0] if self.collide is None else self.collide)  # [B] float64
        tier = torch.zeros_like(before)
        for share in TIERS:
            tier += before < (most * share).ceil().view(-1, 1, 1, 1, 1)
        tables = torch.empty(order.shape, device=order.device).scatter_(4, order, tier.float())
        return codebooks.logits(tables, self.names.visible, valid)

    def _candidates(self, points: Tensor, valid: Tensor, budget: int) -> Tensor:
        """`[B,L,C]` int64: the rows with the most points, of equal ones the newest, -1 for none; C does not depend on
        what tensors hold."""
        total = points.flatten(1, 2) if self.group == "each" else points.sum(2)
        rows = total.shape[2]
        order = total.nan_to_num(neginf=-1.0).long() * rows + torch.arange(rows, device=total.device)
        many = max(budget, max(math.ceil(share * most) for share, most in self._lengths(rows)))
        top = order.topk(min(many, rows), dim=-1)
        count = valid.sum(-1)  # [B]
        wanted = (count * (self._shares(count)[1] if self.candidates is None else self.candidates)).ceil()
        wanted = wanted.clamp(min=budget)[:, None, None]
        used = (top.values >= 0) & (torch.arange(top.values.shape[2], device=total.device) < wanted)
        return torch.where(used, top.values % rows, -1)

    def estimated(self, rotated: Tensor, ids: Tensor) -> Tensor:
        """Return `[B,L,G',C]` float32: products of the codes of rows `ids` `[B,L,C]` with queries `[B,H,G,D']`, those
        of a list; -inf for -1."""
        (batch, heads, _, size), lists = rotated.shape, ids.shape[1]
        every = torch.arange(lists, device=ids.device)
        if lists > heads:
            rotated = rotated.reshape(batch, lists, 1, size)
        b, h = torch.arange(batch, device=ids.device)[:, None, None], (every * heads // lists)[:, None]
        at = ids.clamp(min=0)
        codes, weights = self.codes.visible[b, h, at], self.weights.visible[b, h, at].float()
        tables = codebooks.tables(rotated, _levels(rotated.device).expand(batch, lists, size, -1, -1))
        weights = weights.repeat_interleave(CHANNELS // 2, 3)
        return codebooks.logits(tables, codes, ids >= 0, weights)

    def _shares(self, count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of `SHARES` for sequences of `count` `[B]` rows, float64."""
        collide, candidates = (torch.full_like(count, share, dtype=torch.float64) for share in SHARES[-1][1:])
        for end, *shares in reversed(SHARES[:-1]):
            below = count < end
            collide, candidates = (
                torch.where(below, *pair) for pair in zip(shares, (collide, candidates), strict=True)
            )
        return collide, candidates

    def _lengths(self, rows: int) -> list[tuple[float, float]]:
        """(share of candidates, most rows that it is of) for every length of up to `rows`."""
        if self.candidates is not None:
            return [(self.candidates, rows)]
        starts = (0, *(share[0] for share in SHARES[:-1]))
        return [
            (share[2], min(share[0] - 1, rows)) for start, share in zip(starts, SHARES, strict=True) if start <= rows
        ]

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads, members, size = query.shape
        subspaces = _padded(size) // CHANNELS
        row, once, candidate = _reads(subspaces)
        choices, listed = members if self.group == "each" else 1, self._listed(sealed, budget)
        lists = heads * choices
        scan = Scan(sealed + listed, sealed * row + once + choices * listed * candidate)
        scored = batch * heads * (1 if self.group == "sum" else members)
        scoring = (
            Launch("names", batch * heads * (sealed * row + once), entries=scored * sealed * subspaces),
            Launch("sort", entries=sorted_best(batch * lists, sealed, listed)),
            Launch("names", batch * lists * listed * candidate, entries=scored * listed * 4 * subspaces),
        )
        return self.ranked(query, scan, scoring, (listed, min(budget, sealed)), group=self.group)

    def _listed(self, sealed: int, budget: int) -> int:
        """Candidates of a list, of so many rows."""
        share = float(self._shares(torch.tensor([sealed]))[1]) if self.candidates is None else self.candidates
        return min(max(budget, math.ceil(share * sealed)), sealed)


def _reads(subspaces: int) -> tuple[int, int, int]:
    """Bytes of a row's names, of the counts, once per KV head, and of a candidate's code and weights."""
    return subspaces, 4 * PATTERNS * subspaces, (CHANNELS // 2 + 2) * subspaces


def _padded(size: int) -> int:
    """D'."""
    return max(1 << (size - 1).bit_length(), CHANNELS)


def turned(x: Tensor, seed: int) -> Tensor:
    """`[..,D']` float32: `x` `[..,D]` by a randomised Hadamard transform, which keeps inner products.

    D' is the power of two from D on, 8 or more.
    """
    size = _padded(x.shape[-1])
    x = torch.nn.functional.pad(x.float(), (0, size - x.shape[-1]))
    return walsh_hadamard(x * _signs(seed, size, x.device))


@functools.lru_cache(maxsize=8)
def _signs(seed: int, size: int, device: torch.device) -> Tensor:
    """`[size]` float32, 1 or -1 each over the root of the size."""
    with torch.inference_mode(False):
        drawn = torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed))
        return ((2 * drawn - 1) / size**0.5).to(device)


def _powers(count: int, device: torch.device) -> Tensor:
    return (1 << torch.arange(count, device=device)).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _patterns(device: torch.device) -> Tensor:
    """`[256,8]` float32: the signs that a name stands for, 1 or -1, the first channel its lowest bit."""
    with torch.inference_mode(False):
        names = torch.arange(PATTERNS)[:, None]
        return (2.0 * (names >> torch.arange(CHANNELS) & 1) - 1).to(device)


@functools.lru_cache(maxsize=8)
def _levels(device: torch.device) -> Tensor:
    """`[16,1]` float32: what the four bits of a channel stand for, the highest its sign."""
    with torch.inference_mode(False):
        levels = _magnitudes(torch.device("cpu"))[1]
        return torch.cat([-levels, levels])[:, None].to(device)


@functools.lru_cache(maxsize=8)
def _magnitudes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Edges `[7]` and levels `[8]`, float32, with the least squared error for a coordinate of a unit vector of eight.

    Lloyd and Max's: an edge lies between two levels, and a level is the mean of its cell, where the size u of a
    coordinate of a direction drawn evenly has the density `(1 - u^2)^(5/2)`.
    """
    with torch.inference_mode(False):
        levels = (torch.arange(MAGNITUDES, dtype=torch.float64) + 0.5) / MAGNITUDES
        for _ in range(500):
            u = torch.cat([levels.new_zeros(1), (levels[1:] + levels[:-1]) / 2, levels.new_ones(1)])
            rest = (1 - u.square()).sqrt()
            mass = u * rest * (8 * u**4 - 26 * u**2 + 33) / 48 + u.asin() * 5 / 16  # the density's integral
            first = -(rest**7) / 7  # that of u times the density
            levels = first.diff() / mass.diff()
        edges = (levels[1:] + levels[:-1]) / 2
        return edges.float().to(device), levels.float().to(device)
