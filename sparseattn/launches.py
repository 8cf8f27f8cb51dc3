"""Calls that are what each kind of launch is, at a few sizes, on random rows: what `sparseattn.measuring` times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache import KVCache
from sparseattn.costs import KINDS, Launch, Shape, attention, products, sorted_best
from sparseattn.kernels import attend, codebooks, lowbit, scoring
from sparseattn.selection import Bounds, Selection
from sparseattn.selectors.base import half

HELD = 131_072  # rows of which some are attended to: their addresses are spread as in a long context
PAGE, LONG = 16, 128  # rows of a page, and of a bucket
GROUP = 64  # rows of codes that share levels
HIDDEN, BUCKETS = 1024, 1024  # of the classifier
SUBSPACES, CENTROIDS = 16, 256  # of codebooks
OPERATORS = 8  # small operations in a probe of them
CHAIN = ("step", "bounds", "sort", "operator", "attend")


@dataclass(frozen=True)
class Probe:
    """A call, and what it is as a launch."""

    launch: Launch
    call: Callable[[], Any]


def probes_of(shape: Shape) -> list[Probe]:
    """Every kind at a few sizes."""
    made: list[Probe] = []
    for make in (_step, _operators, _dense, _attend, _bounds, _products, _codes, _names, _classifier, _sort, _walk):
        made += make(shape)
    missing = set(KINDS) - {probe.launch.kind for probe in made}
    assert not missing, f"nothing measures {missing}"
    return made


def chained(probes: Sequence[Probe]) -> list[int]:
    """Places of the least probes of launches that follow each other in a step."""
    kinds = [probe.launch.kind for probe in probes]
    return [kinds.index(kind) for kind in CHAIN]


def _query(shape: Shape) -> Tensor:
    return torch.randn(shape.query().shape).to(shape.dtype)


def _rows(shape: Shape, rows: int) -> Tensor:
    """`[B,H,n,D]`."""
    return torch.randn(shape.batch, shape.heads, rows, shape.size).to(shape.dtype)


def _spread(shape: Shape) -> Tensor:
    """`[B,H,n,D]` of a long context, all alike, and each page of the memory touched."""
    return torch.ones(shape.batch, shape.heads, HELD, shape.size, dtype=shape.dtype)


def _step(shape: Shape) -> list[Probe]:
    cache, query = KVCache("window", sink=4, window=64), _query(shape)
    cache.append(_rows(shape, 128), _rows(shape, 128))
    return [Probe(Launch("step"), lambda: cache.select(query, 1))]


def _operators(shape: Shape) -> list[Probe]:
    mask = torch.ones(shape.batch, 64, dtype=torch.bool)

    def call() -> Tensor:
        count = mask.sum(-1)[:, None]
        read = (count * 256).clamp(min=0)
        there = torch.where(read > 0, read, 0)
        return torch.cat([there, count], 1).int()

    return [Probe(Launch("operator", count=OPERATORS), call)]


def _dense(shape: Shape) -> list[Probe]:
    query, made = _query(shape), []
    for rows in (1024, 8192, 32768):
        keys, values = _rows(shape, rows), _rows(shape, rows)
        launch = attention(shape, shape.heads, rows, 0, 0, rows, "dense")

        def call(keys: Tensor = keys, values: Tensor = values) -> Tensor:
            return torch.softmax(query @ keys.mT * shape.size**-0.5, -1) @ values

        made.append(Probe(launch, call))
    return made


def _attend(shape: Shape) -> list[Probe]:
    held, near, query, made = HELD, 64, _query(shape), []
    keys, values = _spread(shape), _spread(shape)
    bounds = Bounds.of(shape.batch, held, sealed=held - near)
    for rows, run in (
        (PAGE, PAGE),
        (1024, PAGE),
        (8192, PAGE),
        (1024, LONG),
        (8192, LONG),
        (64, 1),
        (1024, 1),
        (4096, 1),
    ):
        span = min(run, PAGE)
        first = torch.rand(shape.batch, shape.heads, (held - near) // run).topk(rows // run).indices * (run // span)
        ids = first[..., None] + torch.arange(run // span)
        selection = Selection.pages(ids.flatten(2), span)
        launch = attention(shape, shape.heads, near, rows, rows / run, near + rows)

        def call(selection: Selection = selection) -> Any:
            return attend(query, keys, values, selection, bounds)

        made.append(Probe(launch, call))
    return made


def _bounds(shape: Shape) -> list[Probe]:
    query, made = _query(shape), []
    for pages in (64, 2048, 16384):
        low = _rows(shape, pages)
        high, real = low + 1, torch.ones(shape.batch, pages, dtype=torch.bool)
        heads = shape.batch * shape.heads
        launch = Launch("bounds", heads * pages * shape.row_bytes, 4.0 * heads * shape.group * pages * shape.size)

        def call(low: Tensor = low, high: Tensor = high, real: Tensor = real) -> Tensor:
            return scoring.page_scores(query, low, high, real, "sum")

        made.append(Probe(launch, call))
    return made


def _products(shape: Shape) -> list[Probe]:
    query, made = _query(shape), []
    for rows in (256, 4096, 32768):
        keys, real = _rows(shape, rows), torch.ones(shape.batch, rows, dtype=torch.bool)

        def call(keys: Tensor = keys, real: Tensor = real) -> Tensor:
            scores = query.float() @ keys.float().mT / shape.size**0.5
            return scores.masked_fill(~real[:, None, None], -torch.inf)

        made.append(Probe(products(query, rows, shape.size), call))
    return made


def _codes(shape: Shape) -> list[Probe]:
    query, made = _query(shape), []
    heads = shape.batch * shape.heads
    for rows in (1024, 16384, 65536):
        keys = _rows(shape, rows)
        packed, low, step = lowbit.quantise(keys, GROUP, 2, "bins", half(keys))
        real = torch.ones(shape.batch, rows, dtype=torch.bool)
        launch = Launch("codes", 0.0, 2.0 * heads * shape.group * rows * shape.size)

        def call(packed: Tensor = packed, low: Tensor = low, step: Tensor = step, real: Tensor = real) -> Tensor:
            return lowbit.best(query, packed, low, step, real, 2, "softmax", 512)

        made.append(Probe(launch, call))
    for listed in (64, 512, 2048):
        pages = torch.rand(shape.batch, shape.heads, rows // PAGE).topk(listed).indices
        launch = Launch("listed", 0.0, 2.0 * heads * shape.group * listed * PAGE * shape.size)

        def call_listed(pages: Tensor = pages) -> Any:
            return lowbit.best_listed(query, packed, low, step, real, 2, "softmax", pages, PAGE, 512)

        made.append(Probe(launch, call_listed))
    return made


def _names(shape: Shape) -> list[Probe]:
    made = []
    tables = torch.rand(shape.batch, shape.heads, shape.group, SUBSPACES, CENTROIDS)
    for rows in (256, 8192, 32768):
        codes = torch.randint(CENTROIDS, (shape.batch, shape.heads, rows, SUBSPACES), dtype=torch.uint8)
        real = torch.ones(shape.batch, rows, dtype=torch.bool)
        launch = Launch("names", entries=tables.shape[:3].numel() * rows * SUBSPACES)

        def call(codes: Tensor = codes, real: Tensor = real) -> Tensor:
            return codebooks.logits(tables, codes, real)

        made.append(Probe(launch, call))
    return made


def _classifier(shape: Shape) -> list[Probe]:
    made, kind = [], shape.dtype if shape.dtype.itemsize == 2 else torch.float32
    for heads, hidden, many in (
        (1, 64, 1),
        (shape.heads, HIDDEN, 1),
        (shape.heads, HIDDEN, 8),
        (shape.heads, HIDDEN, 64),
    ):
        first = torch.randn(heads, hidden, shape.size).to(kind)
        second = torch.randn(heads, BUCKETS, hidden).to(kind)
        x = torch.randn(heads, shape.group * many, shape.size)
        flops = 2.0 * heads * shape.group * many * hidden * (shape.size + BUCKETS)

        def call(first: Tensor = first, second: Tensor = second, x: Tensor = x) -> Tensor:
            return scoring.linear(scoring.linear(x, first, relu=True), second)

        launch = Launch("classifier", first.nbytes + second.nbytes, flops, first.numel() + second.numel())
        made.append(Probe(launch, call))
    return made


def _sort(shape: Shape) -> list[Probe]:
    made, lists = [], shape.batch * shape.heads
    for many, few in ((512, 16), (8192, 128), (65536, 128)):
        scores = torch.rand(shape.batch, shape.heads, many)

        def call(scores: Tensor = scores, few: int = few) -> Any:
            return scoring.best_pages(scores, few, PAGE)

        made.append(Probe(Launch("sort", entries=sorted_best(lists, many, few)), call))
    return made


def _walk(shape: Shape) -> list[Probe]:
    query, keys, made = _query(shape), _spread(shape), []
    for count in (64, 2048):
        ids = torch.rand(shape.batch, shape.heads * shape.group, HELD).topk(count).indices.sort().values.int()
        launch = Launch("walk", entries=ids.numel())

        def call(ids: Tensor = ids) -> Tensor:
            return scoring.listed_scores(query, keys, ids)

        made.append(Probe(launch, call))
    return made
