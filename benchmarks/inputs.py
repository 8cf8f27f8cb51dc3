"""Keys, values and queries to time with, of any length, and buckets for them.

Random keys would be unfair to graphs (they have no neighbourhoods) and to buckets (all of one size), so the rows are
`sparseattn.traces.synthetic`'s, turned by RoPE. Making those takes seconds per 100,000 rows and head, so long contexts
repeat the content of their first rows, each time turned by its own position.

Letters: B sequences, H KV heads, G query heads per KV head, N rows, D head size, C buckets, F hidden width.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.traces.synthetic import synthetic

THETA = 500_000.0  # Llama 3's
DISTINCT = 65_536  # rows of different content
HEADS = 8  # heads of different content
SHIFT = 997  # rows by which the content of one sequence of a batch lies behind the one before
ASKED = 64  # queries of different content, where no selector learns from the prefill's
CHUNK = 16_384  # rows stored at once
SAMPLE = 16  # keys per bucket that k-means sees
ROUNDS = 6  # of k-means


@dataclass(frozen=True)
class Shape:
    """Of one layer's cache: B, H, G, N and D, the dtype's name and the device."""

    batch: int
    heads: int
    group: int
    rows: int
    size: int
    dtype: str
    device: str

    @property
    def kind(self) -> torch.dtype:
        """The dtype itself."""
        kind = getattr(torch, self.dtype)
        assert isinstance(kind, torch.dtype)
        return kind

    @property
    def row_bytes(self) -> int:
        """Of a key and a value of one KV head."""
        return 2 * self.size * self.kind.itemsize

    @property
    def bytes(self) -> int:
        """Of all keys and values: what dense attention must read."""
        return self.batch * self.heads * self.rows * self.row_bytes

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Inputs:
    """The rows of one shape, the same for the same shape, made on demand where the cache lies.

    Args:
        shape: of the cache.
        learned: make a query for every row, for selectors that learn from the prefill's.
        distinct: rows of different content.
    """

    def __init__(self, shape: Shape, learned: bool = False, distinct: int = DISTINCT) -> None:
        self.shape, self.rope = shape, Rope.of(shape.size, THETA)
        self.distinct = min(shape.rows, distinct)
        queries = self.distinct if learned else min(ASKED, self.distinct)
        made = _content(self.distinct, min(shape.heads, HEADS), shape.group, shape.size, queries)
        self.content = tuple(part.to(shape.device) for part in made)

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values `[B,H,n,D]` of rows `[start, stop)`."""
        _, keys, values = self.content
        at = torch.arange(start, stop, device=keys.device)
        return self._turned(keys, at), self._made(values, at)

    def queries(self, start: int, stop: int) -> Tensor:
        """Queries `[B,H,G,n,D]` of the tokens at `[start, stop)`."""
        at = torch.arange(start, stop, device=self.content[0].device)
        return torch.stack([self._turned(self.content[0][:, g], at) for g in range(self.shape.group)], 2)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The rows of the prefill, in parts."""
        for start in range(0, self.shape.rows, CHUNK):
            yield start, min(start + CHUNK, self.shape.rows)

    def _made(self, content: Tensor, at: Tensor) -> Tensor:
        """`[B,H,n,D]` of `content` `[H',T,D]` for rows `at` `[n]`."""
        heads = torch.arange(self.shape.heads, device=at.device) % content.shape[0]
        first = torch.arange(self.shape.batch, device=at.device)[:, None] * SHIFT
        place = (first + at) % content.shape[1]  # [B,n]
        return content[heads[None, :, None], place[:, None]].to(self.shape.kind)

    def _turned(self, content: Tensor, at: Tensor) -> Tensor:
        return self.rope.rotate(self._made(content, at), at)

    def artefact(self, path: Path, buckets: int = 1024, hidden: int = 1024) -> dict[str, Any]:
        """Writes an artefact of the shape: k-means centroids of the keys before RoPE, classifiers of random weights.

        Bucket sizes are those of k-means on these keys, on which speed depends; which buckets a query visits is
        chance, on which it does not. Batch normalisation is folded into the first layer, as in a trained one.

        Returns:
            what it is, for the record: C, F, and how unequal the buckets are (1: all alike).
        """
        keys = self.content[1].float()  # [H',T,D]
        buckets = max(1, min(buckets, self.distinct // SAMPLE))
        sample = F.normalize(keys[:, torch.linspace(0, keys.shape[1] - 1, SAMPLE * buckets).long()], dim=-1)
        centroids = sample[:, ::SAMPLE].clone()
        for _ in range(ROUNDS):
            centroids = torch.stack([_lloyd(*pair) for pair in zip(sample, centroids, strict=True)])
        draw = torch.Generator().manual_seed(0)
        alike = len(centroids)
        weights = {"w1": (hidden, self.shape.size), "b1": (hidden,), "w2": (buckets, hidden), "b2": (buckets,)}
        parts = {name: torch.randn(alike, *each, generator=draw) / each[-1] ** 0.5 for name, each in weights.items()}
        which = torch.arange(self.shape.heads) % alike
        partition = Partition(centroids.cpu()[which], Classifier(**{name: part[which] for name, part in parts.items()}))
        Artefact({0: partition}, ropes={0: self.rope}, meta={"model": "none: weights are random"}).save(path)
        sizes = torch.stack(
            [torch.bincount(_nearest(*pair), minlength=buckets) for pair in zip(keys, centroids, strict=True)]
        )
        share = sizes / sizes.sum(-1, keepdim=True)
        return {
            "buckets": buckets,
            "hidden": hidden,
            "imbalance": round(float((share.square().sum(-1) * buckets).mean()), 3),
            "largest_share": round(float(share.max()), 5),
        }


@functools.lru_cache(maxsize=1)
def _content(rows: int, heads: int, group: int, size: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[H,G,Q,D]`, keys and values `[H,T,D]` without RoPE; the shapes of a benchmark often share them."""
    layer = synthetic(rows, heads, group, size, sinks=0, dtype=torch.bfloat16, queries=queries).layer(0)
    return layer.query, layer.keys, layer.values


def _nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    """`[n]` the centroid of the largest product, for keys `[n,D]`, in blocks."""
    return torch.cat([(part @ centroids.T).argmax(-1) for part in keys.split(8192)])


def _lloyd(keys: Tensor, centroids: Tensor) -> Tensor:
    """One round of spherical k-means; an empty cluster keeps its centroid."""
    total = torch.zeros_like(centroids).index_add_(0, _nearest(keys, centroids), keys)
    return torch.where(total.any(-1, keepdim=True), F.normalize(total, dim=-1), centroids)
