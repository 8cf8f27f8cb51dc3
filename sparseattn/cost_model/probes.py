"""Calls that are what each kind of launch is, at a few sizes, on random rows, and whole steps of a short context: what
`sparseattn.cost_model.measure` times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.selection import Bounds, Selection
from sparseattn.core.step_cost import (
    KINDS,
    Cost,
    Launch,
    Shape,
    attention,
    picked,
    products,
    sorted_best,
    step_cost,
    summed,
)
from sparseattn.kernels import codebooks
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.encode_keys.dispatch import encode
from sparseattn.kernels.linear.dispatch import FEW, linear
from sparseattn.kernels.listed_scores.dispatch import listed_scores
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores
from sparseattn.kernels.product_codes import dispatch as product_codes
from sparseattn.kernels.product_codes.codes import ProductCodes, Tables
from sparseattn.kernels.quantized_keys import dispatch as quantized_keys
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_pages
from sparseattn.selectors.checks import half

HELD = 98_304  # rows of which some are attended to: their addresses are spread as in a long context
PAGE, LONG = 16, 128  # rows of a page, and of a bucket
GROUP = 64  # rows of codes that share levels
HIDDEN, BUCKETS = 1024, 1024  # of the classifier
SUBSPACES, CENTROIDS = 16, 256  # of codebooks
OPERATORS = 8  # small operations in a probe of them
CHAIN = ("bounds", "sort", "operator", "attend")
STEPS = ("quest", "lowbit", "twostage")  # of each way to choose
CONTEXT, BUDGET, SINK, WINDOW = 2048, 192, 4, 64  # of whole steps
MANY = 12  # sequences

_Index = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Probe:
    """A call, and what it is as a launch."""

    launch: Launch
    call: Callable[[], Any]


@dataclass(frozen=True)
class ProbedStep:
    """A whole decode step, and what it is made of by formula."""

    cost: Cost
    call: Callable[[], Any]


def steps_of(shape: Shape) -> list[ProbedStep]:
    """Return steps in which the memory does not bind."""
    made, query = [], _query(shape)
    keys, values = _rows(shape, CONTEXT), _rows(shape, CONTEXT)
    for name in STEPS:
        cache = KVCache(name, sink=SINK, window=WINDOW)
        cache.append(keys, values)
        cost = step_cost(cache.selector, shape, CONTEXT, BUDGET, sink=SINK, window=WINDOW)

        def call(cache: KVCache = cache) -> Tensor:
            return decode(query, cache, BUDGET)

        made.append(ProbedStep(cost, call))
    return made


def probes_of(shape: Shape) -> list[Probe]:
    """Every kind but a step's own at a few sizes."""
    keys, values = _spread(shape), _spread(shape)
    made = [*_attend(shape, keys, values), *_walk(shape, keys)]
    for make in (_operators, _dense, _bounds, _products, _codes, _sums, _names, _classifier, _sort):
        made += make(shape)
    missing = set(KINDS) - {"step"} - {probe.launch.kind for probe in made}
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
    for rows in (1024, 6144, 24576):
        keys, values = _rows(shape, rows), _rows(shape, rows)
        launch = attention(shape, shape.heads, rows, 0, 0, rows, rows, "dense")

        def call(keys: Tensor = keys, values: Tensor = values) -> Tensor:
            return torch.softmax(query @ keys.mT * shape.size**-0.5, -1) @ values

        made.append(Probe(launch, call))
    return made


def _attend(shape: Shape, keys: Tensor, values: Tensor) -> list[Probe]:
    unsealed, query, made = 64, _query(shape), []
    for count, rows, run in (
        (HELD, PAGE, PAGE),
        (HELD, 1024, PAGE),
        (HELD, 8192, PAGE),
        (HELD, 1024, LONG),
        (HELD, 8192, LONG),
        (HELD, 64, 1),
        (HELD, 1024, 1),
        (HELD, 4096, 1),
        (HELD // 24, 1024, 1),  # several in a page of memory
    ):
        span, bounds = min(run, PAGE), Bounds.of(shape.batch, count, sealed=count - unsealed)
        first = torch.rand(shape.batch, shape.heads, (count - unsealed) // run).topk(rows // run).indices * (
            run // span
        )
        ids = first[..., None] + torch.arange(run // span)
        ids = ids.flatten(2)
        selection = Selection.pages(ids.sort().values if run == 1 else ids, span)  # as kernels name them
        launch = attention(shape, shape.heads, unsealed, rows, rows / run, unsealed + rows, count)

        def call(selection: Selection = selection, bounds: Bounds = bounds, rows: int = count) -> Any:
            return attend(query, keys[:, :, :rows], values[:, :, :rows], selection, bounds)

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
            return page_scores(query, PageBounds(low, high, real), "sum")

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
    many = replace(shape, batch=MANY * shape.batch)
    made = []
    for of, rows, best in ((shape, 1024, 64), (shape, 16384, 512), (shape, 163_840, 64), (many, 4096, 1024)):
        index, query = _index(of, rows), _query(of)
        work = picked(of.batch * of.heads, rows, best)
        launch = Launch("codes", 0.0, 2.0 * query.numel() * rows, work)

        def call(index: QuantizedKeys = index, query: Tensor = query, best: int = best) -> Selection:
            ids = quantized_keys.best(query, index, "softmax", best)
            scanned = index.mask.sum(-1)[:, None].expand(-1, ids.shape[1])
            return Selection.pages(ids, 1, scanned, scanned)

        made.append(Probe(launch, call))
    for of, rows, listed, best in (
        (shape, 65536, 64, 64),
        (shape, 65536, 512, 64),
        (shape, 65536, 2048, 512),
        (many, 4096, 128, 1024),
    ):
        index, query = _index(of, rows), _query(of)
        pages = torch.rand(of.batch, of.heads, rows // PAGE).topk(listed).indices
        work = picked(of.batch * of.heads, listed * PAGE, best)
        launch = Launch("listed", 0.0, 2.0 * query.numel() * listed * PAGE, work)

        def call_listed(
            index: QuantizedKeys = index, query: Tensor = query, pages: Tensor = pages, best: int = best
        ) -> Selection:
            return Selection.tokens(quantized_keys.best_listed(query, index, "softmax", pages, PAGE, best)[0])

        made.append(Probe(launch, call_listed))
    return made


def _index(shape: Shape, rows: int) -> QuantizedKeys:
    """Return so many keys in two bits, all of them valid."""
    keys = _rows(shape, rows)
    return replace(encode(keys, GROUP, 2, "bins", half(keys)), valid=torch.ones(shape.batch, rows, dtype=torch.bool))


def _sums(shape: Shape) -> list[Probe]:
    made, kind = [], shape.dtype if shape.dtype.itemsize == 2 else torch.bfloat16  # as methods keep them
    least, size = 16, shape.size
    subspaces = size // math.gcd(size, 8)  # of eight channels, or of as many as divide the head
    query, turn = torch.randn(shape.query().shape), torch.eye(size, dtype=kind).expand(shape.batch, shape.heads, -1, -1)
    books = torch.randn(shape.batch, shape.heads, subspaces, least, size // subspaces).to(kind)
    for rows, best in ((1024, 64), (16384, 64), (16384, 1024), (163_840, 512)):
        codes = torch.randint(256, (shape.batch, shape.heads, -(-subspaces // 2), rows), dtype=torch.uint8)
        keys = ProductCodes(codes, 4, torch.ones(shape.batch, rows, dtype=torch.bool))
        work = summed(shape.batch * shape.heads, shape.group * subspaces * rows, best)
        flops = 2.0 * query.numel() * size + 2.0 * query.shape[:3].numel() * size * least

        def call(keys: ProductCodes = keys, best: int = best) -> Tensor:
            return product_codes.best(Tables(query, turn, books), keys, best)[0]

        made.append(Probe(Launch("sums", codes.nbytes, flops, work), call))
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
    few = FEW[kind.itemsize]
    for heads, hidden, vectors in (
        (1, 64, 1),
        (shape.heads, HIDDEN, 1),
        (shape.heads, HIDDEN, few // 4),
        (shape.heads, HIDDEN, few),
        (1, 64, few + 1),
        (shape.heads, HIDDEN, 2 * few),
        (shape.heads, HIDDEN, 4 * few),
    ):
        first = torch.randn(heads, hidden, shape.size).to(kind)
        second = torch.randn(heads, BUCKETS, hidden).to(kind)
        x = torch.randn(heads, vectors, shape.size)
        flops = 2.0 * heads * vectors * hidden * (shape.size + BUCKETS)

        def call(first: Tensor = first, second: Tensor = second, x: Tensor = x) -> Tensor:
            return linear(linear(x, first, relu=True), second)

        name = "network" if vectors > few else "classifier"
        made.append(Probe(Launch(name, first.nbytes + second.nbytes, flops, first.numel() + second.numel()), call))
    return made


def _sort(shape: Shape) -> list[Probe]:
    made, lists = [], shape.batch * shape.heads
    for many, few in ((512, 16), (8192, 128), (65536, 128)):
        scores = torch.rand(shape.batch, shape.heads, many)

        def call(scores: Tensor = scores, few: int = few) -> Any:
            return best_pages(scores, few, PAGE)

        made.append(Probe(Launch("sort", entries=sorted_best(lists, many, few)), call))
    return made


def _walk(shape: Shape, keys: Tensor) -> list[Probe]:
    query, made = _query(shape), []
    for count in (64, 2048):
        ids = torch.rand(shape.batch, shape.heads * shape.group, HELD).topk(count).indices.sort().values.int()
        launch = Launch("walk", entries=ids.numel())

        def call(ids: Tensor = ids) -> Tensor:
            return listed_scores(query, keys, ids)

        made.append(Probe(launch, call))
    return made
