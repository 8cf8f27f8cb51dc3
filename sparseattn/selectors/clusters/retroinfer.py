"""RetroInfer: clusters of a context's own keys; the nearest are read, the next stand in by their means.

https://arxiv.org/abs/2505.02922. Letters: P clusters.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Scan, products
from sparseattn.selectors.abilities import HasTail
from sparseattn.selectors.base import Rows, Selector, StepContext, best, vote
from sparseattn.selectors.checks import check_group, check_least, half
from sparseattn.selectors.tail_estimate import check_zone, estimated, outside, summed

MORE = 4  # clusters that a budget may take, for each one of mean size that fills it
LAST = (1 << 31) - 1  # where a cluster that is not taken begins


class RetroInfer(HasTail, Selector):
    """Reads the clusters whose centroids have the largest share of a softmax; the next ones stand in by their means.

    Every sealed batch is cut into segments, whose keys, less their mean, are clustered by spherical k-means that begins
    at evenly spaced keys. A cluster's rows are stored side by side, the oldest first. What is kept of it is the mean of
    its keys, after RoPE, which is its centroid, and the mean of its values.

    Args:
        cluster: rows of a cluster in the mean, a power of two; the cache seals multiples of it. 16 in the paper.
        zone: share of the clusters in the estimation zone, those that weigh most by the estimate (see `Tailed`); 23.2 %
            in the paper, behind the 1.8 % that are read. Above 0; 1: every row that is not read is estimated.
        segment: rows clustered together, a multiple of `cluster`; 8,192 in the paper.
        rounds: of k-means.
        group: how a query group votes for clusters: "softmax" (default, the paper's), "sum", "max", "each".

    Clusters are read best first until the budget's rows are full, the last in part; so many clusters at most as four
    times the budget would take of mean size. Departures: the paper reads a share of the clusters, here a budget of
    rows; the estimation zone is chosen with the clusters' sizes, which the paper's ranks leave out; keys that decoding
    seals are a segment of their own, here as many as the cache seals at once (1,024 by default, as there). Its buffer
    between GPU and CPU is not here: `KVCache(sealed_device="cpu")` keeps rows in host memory.

    `scanned`: clusters. `scan_bytes`: the centroid of each, of which those that stand in are counted with the tail, and
    8 bytes for its place.

    Raises:
        ValueError: an argument out of its range.
    """

    operators = 56

    def __init__(
        self, cluster: int = 16, zone: float = 0.232, segment: int = 8192, rounds: int = 10, group: str = "softmax"
    ) -> None:
        check_least(cluster=(cluster, 1), rounds=(rounds, 1))
        if cluster & (cluster - 1):
            raise ValueError(f"a cluster has a power of two rows in the mean, got {cluster}")
        if segment < cluster or segment % cluster:
            raise ValueError(f"a segment is a multiple of a cluster's {cluster} rows, got {segment}")
        self.cluster, self.zone, self.segment, self.rounds = cluster, check_zone(zone), segment, rounds
        self.group = check_group(group)
        self.span = cluster
        self.keys, self.values = RowBuffer(2), RowBuffer(2)  # [B,H,P,D] means, of 16 bits
        self.start = RowBuffer(2, spare=LAST)  # [B,H,P] int32, the place of a cluster's first row; these rise
        self.count = RowBuffer(2, spare=0)  # [B,H,P] int32, its rows
        self.shown = 0  # places, padding included

    def fix(self, rows: int, seal: int) -> None:
        for buffer in (self.keys, self.values, self.start, self.count):
            buffer.fix(rows // self.cluster)

    def reset(self) -> None:
        super().reset()
        self.shown = 0

    # -- rows --------------------------------------------------------------------------------------------------------

    def append(self, rows: Rows) -> Tensor:
        batch, heads, new, _ = rows.keys.shape
        clusters = new // self.cluster
        label = torch.full((batch, heads, new), clusters, device=rows.keys.device)  # padding's comes last
        for b, valid in enumerate(rows.positions >= 0):
            at = valid.nonzero()[:, 0]  # a sequence is clustered as it would be alone
            for first in range(0, len(at), self.segment):
                part = at[first : first + self.segment]
                own = clustered(rows.keys[b, :, part].float(), len(part) // self.cluster, self.rounds)
                label[b, :, part] = own + first // self.cluster
        ones = torch.ones_like(label, dtype=torch.int32)
        count = ones.new_zeros(batch, heads, clusters + 1).scatter_add_(2, label, ones)[..., :clusters]
        for buffer, part in ((self.keys, rows.keys), (self.values, rows.values)):
            mean = summed(part, label, clusters) / count.clamp(min=1)[..., None]
            buffer.append(mean.to(half(part)))
        self.start.append((count.cumsum(2) - count + self.shown).int())
        self.count.append(count)
        self.shown += new
        return label.argsort(dim=2, stable=True)

    # -- the query ---------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        heads, size = query.shape[1], query.shape[3]
        count, keys = self.count.visible, self.keys.visible
        logits = query.float() @ keys.float().mT / self.temperature(size)  # [B,H,G,P]
        ranks = vote(logits.masked_fill((count == 0)[:, :, None], -torch.inf), self.group)
        ids = best(ranks, MORE * -(-budget // self.cluster))  # [B,Hs,K]
        each = ranks.shape[1] // heads
        start, length = (
            part.repeat_interleave(each, 1).gather(2, ids.clamp(min=0)) for part in (self.start.visible, count)
        )
        chosen = Selection.runs(start, length.masked_fill(ids < 0, 0), self.span, budget)
        if not step.counted:
            return chosen
        clusters = (count > 0).sum(-1)  # [B,H]
        row = size * self.bytes_of(self.keys.full)
        read = outside(count, self._left(chosen), self.zone) * row + clusters * 8
        return replace(chosen, scanned=clusters.repeat_interleave(each, 1), scan_bytes=read)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Predict a step as if clusters held as many rows each."""
        (clusters, tail), size, rows = self._expected(sealed, budget), query.shape[3], min(budget, sealed)
        mean_bytes = size * self.bytes_of(torch.empty(0, dtype=half(query)))
        scan = Scan(clusters, (clusters - tail) * mean_bytes + 8 * clusters)
        ranking = products(query, clusters, size, 2.0 * clusters * size)
        best_few = clusters, -(-rows // self.cluster)
        expected = "all clusters hold equally many tokens"
        scan = self.ranked(query, scan, [ranking], best_few, group=self.group, expected=expected)
        return replace(scan, rows=rows, tail=tail)

    def _expected(self, sealed: int, budget: int) -> tuple[int, int]:
        """Return how many clusters there are expected to be, and how many of them stand in."""
        clusters = sealed // self.cluster
        return clusters, min(math.ceil(self.zone * clusters), clusters - min(budget, sealed) // self.cluster)

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        count, left = self.count.visible, self._left(selection)
        means = self.keys.visible, self.values.visible
        return estimated(query, *means, count, left, self.zone, self.temperature(query.shape[3]))

    def _left(self, selection: Selection) -> Tensor:
        """Return how many rows of each cluster a selection does not name: `[B,Hs,P]` int32."""
        count = self.count.visible
        heads, clusters = count.shape[1:]
        ends = (self.start.visible + count).contiguous()
        first = selection.start.unflatten(1, (heads, -1)).flatten(2).contiguous()  # a slot lies in one cluster
        at = torch.searchsorted(ends, first, right=True).clamp(max=clusters - 1).view(selection.start.shape)
        each = selection.start.shape[1] // heads
        return count.repeat_interleave(each, 1).scatter_add(2, at, -selection.length)


def clustered(keys: Tensor, clusters: int, rounds: int) -> Tensor:
    """Return the cluster of each key `[H,n,D]` float32, by spherical k-means of the keys less their mean: `[H,n]`
    int64."""
    keys = keys - keys.mean(1, keepdim=True)
    count, device = keys.shape[1], keys.device
    even = ((torch.arange(clusters, device=device) + 0.5) * count / clusters).long()
    centroids = keys[:, even]  # [H,C,D], as long as they are in the first round, as in the authors' code
    for _ in range(rounds - 1):
        total = summed(keys[None], _nearest(keys, centroids)[None], clusters)[0]
        taken = total.any(-1, keepdim=True)  # a cluster that loses its keys keeps its centroid
        centroids = torch.where(taken, functional.normalize(total, dim=-1), centroids)
    return _nearest(keys, centroids)


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    """Return the number of the centroid `[H,C,D]` with the largest product with each key `[H,n,D]`: `[H,n]` int64."""
    return torch.stack([(of_head @ own.mT).argmax(-1) for of_head, own in zip(keys, centroids, strict=True)])
