"""The bucket table that SAAP and symmetric k-means share: keys in a trained partition, each bucket's rows contiguous.

https://arxiv.org/abs/2502.08246
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Launch, Scan, sorted_best
from sparseattn.kernels.bucket_spans.dispatch import bucket_spans
from sparseattn.selectors.base import LayerContext, Rows, Selector, StepContext, vote
from sparseattn.selectors.checks import check_group
from sparseattn.selectors.parameters.saap_artefact import AUTO, SHIPPED, Artefact, locate, shared, shipped_for
from sparseattn.selectors.parameters.saap_partition import Partition
from sparseattn.selectors.saved_state import Loaded, Wanted, check_tensors
from sparseattn.utils.hashing import file_hash, tensors_hash

CHUNK = 1 << 24  # numbers made at once of the keys of a seal, such as products with centroids: 64 MiB


@dataclasses.dataclass(frozen=True, eq=False)
class Parameters:
    """What a layer's artefact says, where the layer's rows lie.

    Args:
        partition: centroids and, where the method uses it, the classifier.
        rope: what keys and queries are turned back by; None: they are taken as attention sees them.
        group: query heads per KV head for which this was checked; None: for keys alone.
    """

    partition: Partition
    rope: Rope | None
    group: int | None

    @property
    def buckets(self) -> int:
        """C, how many there are."""
        return self.partition.centroids.shape[1]

    def plain(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x` `[B,H,n,D]` in float32, before RoPE if the artefact is de-roped, for `positions` `[B,n]` or
        `[B,1]`."""
        x = x.float()
        return x if self.rope is None else self.rope.unrotate(x, positions[:, None])


class Edges(RowBuffer):
    """`[B,H,R,C+2]` int32: rows of bucket c in segment r are `edges[c]` to `edges[c+1]`; bucket C is padding."""

    def __init__(self) -> None:
        super().__init__(2, spare=0)
        self._slots: list[int] = []  # `most` of what is stored, or of more after `take`; empty: not known yet

    def fresh(self) -> Edges:
        return Edges()

    def clone(self) -> Edges:
        twin = super().clone()
        assert isinstance(twin, Edges)
        twin._slots = self._slots  # replaced, never changed in place
        return twin

    def resize(self, rows: int, like: Tensor | None = None) -> Tensor:
        self._slots = []
        return super().resize(rows, like)

    def reset(self) -> None:
        super().reset()
        self._slots = []

    def most(self, span: int) -> list[int]:
        """Return a list whose entry p is the most slots of `span` rows that p + 1 buckets of a head fill. On a GPU the
        host waits for it once a seal."""
        if not self._slots:
            length = self.data.diff(dim=-1)[..., :-1]  # [B,H,R,C]
            slots = (length + span - 1).div(span, rounding_mode="floor").sum(2)
            self._slots = slots.sort(-1, descending=True).values.cumsum(-1).amax((0, 1)).tolist()
        return self._slots


class Partitioned(Selector):
    """Keys in the buckets of a partition trained beforehand; a query reads all rows of the buckets it ranks highest.

    A key joins the bucket of the centroid with which its inner product is largest, before RoPE unless the artefact is
    roped. Every sealed batch is stored bucket by bucket, a segment. When a segment is no longer than those behind it
    together, they become one (a permutation of the zone's last rows): after N rows in seals of n or more there are at
    most `log2(N/n) + 1` segments, and a row has moved at most `log2(N/n) + 1` times.

    Slots are as many as the `probes` largest buckets could fill, so they depend on what is stored and on the budget,
    not on the query; in fixed storage, as many as `probes` buckets in the most segments could. A budget cuts the last
    bucket that it reaches, behind its oldest rows. Buckets may be empty.

    Args:
        artefact: file of a trained partition, or the name of one that ships ("reference", "smollm2": the models that
            they are for); "auto" is the one that ships for the layer's RoPE.
        probes: buckets that a query visits, all if there are fewer; 32 in the paper.
        group: how a query group votes: "softmax" (the paper's joint probing) sums its query heads' probabilities,
            "each" lets every query head visit its own buckets, "sum" and "max" are of the raw scores.
        span: most rows of a slot, a power of two.

    `scanned`: buckets scored, all of them. `scan_bytes`: the model that scores them, once per KV head, and 8 bytes for
    each visited bucket of each segment.

    Raises:
        ValueError: an argument out of its range; an artefact that is not there; in `bind`, a layer that the
            artefact lacks.
    """

    knob = "probes"
    late = ("_held", "_here")

    def __init__(self, artefact: str = AUTO, probes: int = 32, group: str = "softmax", span: int = 16) -> None:
        if probes < 1:
            raise ValueError(f"probes is 1 or more buckets, got {probes}")
        if span < 1 or span & (span - 1):
            raise ValueError(f"span is a power of two (16, 32, ...), got {span}")
        if artefact != AUTO:
            locate(artefact)
        self.artefact, self.probes, self.group, self.span = artefact, probes, check_group(group), span
        self.edges = Edges()
        self._held: Artefact | None = None
        self._here: Parameters | None = None

    # -- the artefact ----------------------------------------------------------------------------------------------

    def trained(self) -> Artefact:
        """Return the artefact, read once for all layers and all selectors of the process that name the same file.

        Raises:
            ValueError: a file that is no artefact; "auto" where none ships for the layer's RoPE.
        """
        if self._held is None:
            self._held = shared(shipped_for(self.layer_context.rope) if self.artefact == AUTO else self.artefact)
        return self._held

    def bind(self, context: LayerContext) -> None:
        if self.artefact == AUTO and context.rope is not self.layer_context.rope:
            self._held = None  # another RoPE may have another one
        super().bind(context)
        self._here = None
        if self.artefact != AUTO or context.rope is not None:
            self.trained().holds(context.layer)

    def check_shape(self, heads: int, group: int | None, size: int) -> None:
        twin = copy.copy(self)  # what rows are scored by depends on their device and dtype, so nothing is kept
        twin._parameters(torch.empty(1, heads, 0, size), group)
        self._held = twin._held

    def fix(self, rows: int, seal: int) -> None:
        for _, state in self.buffers():
            if isinstance(state, RowBuffer):
                state.fix()
        self.edges.fix(max(rows // seal, 1).bit_length())  # log2(N/n) + 1

    def index_arguments(self) -> dict[str, Any]:
        """Of the artefact what assigns keys counts, wherever its file lies."""
        given, trained = super().index_arguments(), self.trained()
        del given["artefact"]
        centroids = self._own(trained.holds(self.layer)).centroids
        return given | {"centroids": tensors_hash({"centroids": centroids}), "roped": trained.roped}

    def source(self) -> str:
        may_be = SHIPPED if self.artefact == AUTO else (self.artefact,)
        digests = "".join(map(file_hash, map(locate, may_be)))
        return f"{super().source()} {hashlib.sha256(digests.encode()).hexdigest()[:16]}"

    def reset(self) -> None:
        super().reset()
        if self.edges.room is None:  # else a batch of the same shape comes, and a CUDA graph may hold the addresses
            self._here = None

    def _own(self, partition: Partition) -> Partition:
        """Return what of a layer's partition is of the heads that this instance is shown."""
        heads = self.layer_context.heads
        return partition if heads is None else partition.of_heads(heads.which)

    def _used(self, partition: Partition, like: Tensor) -> Partition:
        """Return what of the layer's partition the method needs for keys such as `like`: here the centroids."""
        return Partition(partition.centroids)

    def _parameters(self, like: Tensor, group: int | None = None) -> Parameters:
        """Return those of this layer, on the device of `like` `[B,H,n,D]`, keys or the queries of groups of `group`.

        Raises:
            ValueError: an artefact that was trained for another layer, shape or RoPE.
        """
        own = self._here
        if own is None or own.partition.centroids.device != like.device or group not in (own.group, None):
            rope, heads = self.layer_context.rope, self.layer_context.heads
            if rope is None and self.artefact == AUTO:
                raise ValueError(
                    f"{self} finds its artefact by the layer's RoPE, and no fixed RoPE of layer {self.layer} is "
                    f"known here: give for_layer a LayerContext with it, or name an artefact that needs none, "
                    f"artefact=FILE of rows without RoPE (`sparseattn train --roped`)"
                )
            if rope is None and not self.trained().roped:
                raise ValueError(
                    f"{self} takes RoPE back from keys and queries, and no fixed RoPE of layer {self.layer} is "
                    f"known here: give for_layer a LayerContext with it, or use an artefact of roped keys where the "
                    f"layer applies none or one whose frequencies change with the length of the sequence"
                )
            trained = self.trained()
            every = like.shape[1] if heads is None else heads.of
            partition = self._own(trained.check(self.layer, every, group, like.shape[3], rope))
            if rope is not None:
                rope = rope.to(like.device)
            partition = self._used(partition, like).to(like.device)
            self._here = own = Parameters(partition, None if trained.roped else rope, group)
        return own

    # -- the table -------------------------------------------------------------------------------------------------

    def append(self, rows: Rows) -> Tensor:
        own = self._parameters(rows.keys)
        new = rows.keys.shape[2]
        bucket = _assigned(rows, own)  # [B,H,n]
        self.joined(rows, bucket, own)
        starts = [0]
        if self.edges.rows:
            table = self.edges.data[0, 0]  # segments begin and end alike in all heads
            starts = [*table[:, 0].tolist(), int(table[-1, -1])]
        kept, low = _kept(starts, new)
        if kept < self.edges.rows:
            bucket = torch.cat([self._stored(kept), bucket], 2)
            self.edges.resize(kept)
        sizes = torch.zeros(*bucket.shape[:2], own.buckets + 1, dtype=torch.int64, device=bucket.device)
        ends = low + sizes.scatter_add_(2, bucket, torch.ones_like(bucket)).cumsum(2)  # [B,H,C+1]
        edges = torch.nn.functional.pad(ends, (1, 0), value=low)
        self.edges.append(edges[:, :, None].int())
        if self.edges.room is None:
            self.edges.most(self.span)
        return bucket.argsort(dim=2, stable=True)

    def joined(self, rows: Rows, bucket: Tensor, own: Parameters) -> None:
        """Take in what the method keeps besides of new rows, with the bucket of each, `[B,H,n]`, C for padding; here
        nothing."""

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        (batch, heads, new, _), buckets = rows.keys.shape, self._parameters(rows.keys).buckets
        check_tensors(state, {"edges": (torch.int32, (batch, heads, 1, buckets + 2)), **self.wanted(rows, buckets)})
        edges, padding = state["edges"][:, :, 0], (rows.positions < 0).cpu()  # [B,H,C+2], [B,n]
        if bool((edges[..., 0] != 0).any()) or bool((edges[..., -1] != new).any()) or bool((edges.diff() < 0).any()):
            raise ValueError(f"edges of buckets do not rise from 0 to the {new} rows")
        if bool((edges.diff()[..., -1] != padding.sum(1)[:, None]).any()):
            raise ValueError("edges do not leave the rows of padding apart")
        if order is None:
            raise ValueError("it holds no order of the rows")
        last = torch.arange(new) >= edges[..., -2:-1]  # [B,H,n] the places of padding
        if not torch.equal(padding[:, None].expand_as(last).gather(2, order.cpu()), last):
            raise ValueError("the order mixes rows of padding with others")

    def wanted(self, rows: Rows, buckets: int) -> Wanted:
        """Return dtypes and shapes of what the method keeps besides, of `rows` in C = `buckets`; here nothing."""
        return {}

    @property
    def places(self) -> int:
        """Return how many places are stored, padding included: on a GPU the host waits for it."""
        return int(self.edges.data[0, 0, -1, -1]) if self.edges.rows else 0

    def bucket_at(self, places: Tensor) -> Tensor:
        """Return the bucket of the row at each of `places` `[B,Hs,n]`: `[B,Hs,n]` int64, C for padding."""
        table = self.edges.visible  # [B,H,R,C+2]
        ends = table[..., 1:]
        if self.edges.room is not None:  # segments that are not taken end nowhere
            ends = ends.masked_fill(table[..., -1:] <= table[..., :1], torch.iinfo(torch.int32).max)
        ends = ends.flatten(2).contiguous()  # segments follow each other, so these rise
        by_head = places.int().unflatten(1, (table.shape[1], -1)).flatten(2).contiguous()
        return (torch.searchsorted(ends, by_head, right=True) % (table.shape[3] - 1)).view(places.shape)

    def _stored(self, first: int = 0) -> Tensor:
        """Return the bucket of every row from segment `first` on: `[B,H,n]` int64, C for padding."""
        table = self.edges.data[:, :, first:]
        low, high = int(table[0, 0, 0, 0]), int(table[0, 0, -1, -1])
        place = torch.arange(low, high, dtype=torch.int32, device=table.device)
        return self.bucket_at(place.expand(*table.shape[:2], -1))

    # -- the query -------------------------------------------------------------------------------------------------

    @abstractmethod
    def rank(self, query: Tensor, positions: Tensor, own: Parameters) -> Tensor:
        """Return a score of every bucket for a query `[B,H,G,D]` at `positions` `[B]`: `[B,H,G,C]`, logits of what
        `group` "softmax" sums."""

    @abstractmethod
    def ranking_scan(self, query: Tensor, sealed: int, partition: Partition) -> Scan:
        """Return what ranking all of a layer's buckets reads, and its launches, in which what all sequences share is
        read once.

        Args:
            query, sealed: as of `scan`.
            partition: of the KV heads that are served, as `_used` keeps it on a CPU.
        """

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        """Count bytes by the segments that there are, before rows are sealed as if these lay in one; and rows as if
        keys lay in one segment and in buckets of one size."""
        batch, heads, members, _ = query.shape
        own = self._parameters_for(query)
        buckets = own.buckets
        probes = min(self.probes, buckets)
        ranking, choices = self.ranking_scan(query, sealed, own.partition), members if self.group == "each" else 1
        edges = 8 * choices * probes * max(self.edges.rows, 1)
        lists = heads * choices
        rows = min(budget, sealed * probes / buckets)
        launches = (
            *ranking.launches,
            Launch("sort", entries=sorted_best(batch * heads * members, buckets, probes)),
            Launch("operator", count=self.operators),
        )
        runs = min(rows, probes * rows / max(sealed * probes / buckets, 1))
        expected = "all buckets hold equally many tokens, each in one segment"
        read = ranking.read + edges
        return Scan(ranking.scanned, read, launches, lists, rows, runs, expected=expected)

    def _parameters_for(self, query: Tensor) -> Parameters:
        """Return the layer's for queries of this shape, on the CPU where these have no data."""
        if not query.is_meta:
            return self._parameters(query, query.shape[2])
        return copy.copy(self)._parameters(torch.empty(query.shape, dtype=query.dtype), query.shape[2])

    def buckets_of(self, query: Tensor) -> int:
        """Return C, of the layer's artefact, for queries of this shape."""
        return self._parameters_for(query).buckets

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        own = self._parameters(query, query.shape[2])
        scores = vote(self.rank(query, step.positions, own), self.group)  # [B,Hs,C]
        table, probes = self.edges.visible, min(self.probes, own.buckets)
        ids = scores.topk(probes, dim=-1).indices  # [B,Hs,P]
        slots = budget // self.span + probes * table.shape[2]  # enough for whatever is chosen
        if self.edges.room is None:
            slots = min(slots, self.edges.most(self.span)[probes - 1])
        start, length = bucket_spans(ids, table, self.span, budget, slots)
        return Selection(start, length, self.span)


def _kept(starts: list[int], new: int) -> tuple[int, int]:
    """Return how many segments stay as they are when `new` rows come behind them, and where the last of these ends.

    Args:
        starts: of each segment, and the end of the last.
    """
    end = starts[-1] + new
    longer = [high - low > end - high for low, high in itertools.pairwise(starts)]  # than all that is behind it
    kept = longer.index(False) if False in longer else len(longer)
    return kept, starts[kept]


def _assigned(rows: Rows, own: Parameters) -> Tensor:
    """Return the bucket of every key: `[B,H,n]` int64, C for padding."""
    batch, heads, new, _ = rows.keys.shape
    step = max(CHUNK // (batch * heads * own.buckets), 1)
    bucket = torch.empty(batch, heads, new, dtype=torch.int64, device=rows.keys.device)
    for first in range(0, new, step):
        part = slice(first, first + step)
        keys = own.plain(rows.keys[:, :, part], rows.positions[:, part])
        bucket[:, :, part] = own.partition.assign(keys)
    return bucket.masked_fill_((rows.positions < 0)[:, None], own.buckets)
