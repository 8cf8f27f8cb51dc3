"""What one decode step moves and computes, by formula: bytes, operations and launches, from shapes alone.

A step is launches one after another: of the method's kernels, which choose, and of the one that attends. A machine
(`sparseattn.cost_model.machine`) says how long each takes: as long as its bytes or its arithmetic need, whichever is
more, the roofline of Williams et al. 2009, https://doi.org/10.1145/1498765.1498785, and a fixed cost.

Letters: B sequences, H KV heads, G query heads per KV head, D head size, Hs selection heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparseattn.core.budget import Budget, Reader, budget_of

A_CANDIDATE = 1000  # look-ups of codes in registers that take as long as a candidate, see `summed`
MEMORY_PAGE = 4096  # bytes whose address is looked up at once

# What a launch runs, by which a machine knows its speed.
KINDS = {
    "step": "what every step does whatever the method, such as reading the query",
    "operator": "a tensor operation on a few numbers, which costs its launch alone",
    "dense": "attention over all tokens, as torch computes it",
    "attend": "attention over tokens in runs, such as pages; entries: runs",
    "gather": "attention over single tokens; entries: the pages of memory that hold them",
    "bounds": "products of the queries with the bounds of pages",
    "product": "products of the queries in float32 with a tensor in the keys' dtype; entries: scores",
    "codes": "products of the queries with keys of few bits, the group's vote and the top-k; entries: what is sorted",
    "listed": "the same for listed tokens",
    "sums": "sums of table entries of 8 bits that codes of 4 bits select, the group's vote and the top-k; entries: "
    "look-ups",
    "names": "sums of table entries that codes of centroids select; entries: look-ups",
    "classifier": "a two-layer network that ranks buckets, for few queries; entries: its weights",
    "network": "the same for many queries",
    "sort": "the top-k of many scores; entries: scores",
    "walk": "scores of scattered keys, as in a graph search; entries: keys",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers of a model have: B, H, G, D and the dtype of keys, values and queries.

    Raises:
        ValueError: a size below 1, or a dtype that is none of torch's floating ones.
    """

    batch: int
    heads: int
    group: int
    size: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "group", "size"):
            number = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} of a shape is 1 or more, an int, got {number!r}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"the dtype of a shape is a floating one such as torch.bfloat16, got {self.dtype!r}")

    @property
    def row_bytes(self) -> int:
        """Of a key and a value of one KV head."""
        return 2 * self.size * self.dtype.itemsize

    def query(self) -> Tensor:
        """`[B,H,G,D]` without data: what a step's query is, for formulas."""
        return torch.empty(self.batch, self.heads, self.group, self.size, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel of a step, or `count` equal ones.

    Args:
        kind: one of `KINDS`.
        bytes: that it moves between the memory and the processor, of all sequences and heads, each number once.
        flops: additions and multiplications.
        entries: what it handles one by one, see `KINDS`.
        count: launches; `bytes`, `flops` and `entries` are of all of them.
    """

    kind: str
    bytes: float = 0.0
    flops: float = 0.0
    entries: float = 0.0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Scan:
    """What one `select` reads, launches and names, from shapes alone.

    A method may say the first two alone. `scored_by_torch` then fills in the rest.

    Args:
        scanned: entries scored for a list of rows of one sequence: rows, pages or buckets.
        read: bytes of index, metadata and model read for a KV head of one sequence, for all of its query heads
            together.
        launches: of all sequences and heads.
        lists: Hs, lists of rows chosen: H, or H*G; 0 if the method says nothing of launches and rows.
        rows: rows that a list names.
        runs: runs of consecutive rows that they lie in; as many as rows if these are single.
        tail: rows of the selector's own that each KV head attends to besides.
        expected: which of these the data decide, so that a count is only expected, in words; "" for none.
    """

    scanned: float
    read: float
    launches: tuple[Launch, ...] = ()
    lists: int = 0
    rows: float = 0.0
    runs: float = 0.0
    tail: float = 0.0
    expected: str = ""

    def __post_init__(self) -> None:
        if not (0 <= self.scanned < math.inf and 0 <= self.read < math.inf):
            raise ValueError(f"a Scan is of 0 or more entries and bytes, got {self.scanned} and {self.read}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a step, or of several.

    Args:
        launches: in order.
        dtype: of keys and values, by which arithmetic has its speed.
        scan_bytes: that methods say they read to choose, of all sequences and heads.
        rows: rows attended by a KV head, in the mean of sequences and heads; where query heads choose for themselves
            as if no two chose the same.
        rows_bytes: of their keys and values.
        expected: what of it the data decide, in words.
        host: whether a method searches in host memory, so that no GPU runs it.
    """

    launches: tuple[Launch, ...]
    dtype: torch.dtype
    scan_bytes: float
    rows: float
    rows_bytes: float
    expected: str = ""
    host: bool = False

    @property
    def bytes(self) -> float:
        """That a step must move."""
        return sum(launch.bytes for launch in self.launches)

    @property
    def flops(self) -> float:
        return sum(launch.flops for launch in self.launches)

    @property
    def count(self) -> int:
        """Launches."""
        return sum(launch.count for launch in self.launches)


def total(costs: Iterable[Cost]) -> Cost:
    """Of the layers, or the groups of KV heads, of one step. `rows` is their sum.

    Raises:
        ValueError: no cost, or costs of more than one dtype.
    """
    parts = list(costs)
    kinds = {part.dtype for part in parts}
    if len(kinds) != 1:
        raise ValueError(f"costs that are added are one or more, of one dtype, got {sorted(map(str, kinds))}")
    return Cost(
        tuple(launch for part in parts for launch in part.launches),
        kinds.pop(),
        sum(part.scan_bytes for part in parts),
        sum(part.rows for part in parts),
        sum(part.rows_bytes for part in parts),
        "; ".join(dict.fromkeys(part.expected for part in parts if part.expected)),
        any(part.host for part in parts),
    )


def attention(
    shape: Shape,
    lists: int,
    unsealed: float,
    rows: float,
    runs: float,
    distinct: float,
    rows_stored: float,
    kind: str | None = None,
) -> Launch:
    """Return the launch that attends: every query head of a list to its `rows` and to the `unsealed` ones.

    Args:
        lists: Hs, H or H*G.
        unsealed: rows that every query reads.
        rows: that a list names, in so many `runs`.
        distinct: rows that are read for a KV head, each once, the near ones among them.
        rows_stored: rows that these are among.
        kind: of the launch; None: "gather" where runs are single rows, else "attend".
    """
    heads, single = shape.batch * shape.heads, 0 < rows <= runs
    return Launch(
        kind or ("gather" if single else "attend"),
        bytes=heads * distinct * shape.row_bytes,
        flops=4.0 * heads * shape.group * (unsealed + rows) * shape.size,
        entries=shape.batch * lists * (memory_pages(shape, rows, rows_stored) if single else runs),
    )


def memory_pages(shape: Shape, rows: float, rows_stored: float) -> float:
    """Pages of memory of 4 KiB in which keys and values of so many rows lie, of one KV head, where they are spread
    among `rows_stored` rows as at random."""
    pages = max(rows_stored * shape.row_bytes / 2 / MEMORY_PAGE, 1.0)
    return 2 * pages * (1 - math.exp(-rows / pages))


def dense_cost(shape: Shape, context: int) -> Cost:
    """Of full attention over `context` rows, as torch computes it."""
    launch = attention(shape, shape.heads, context, 0, 0, context, context, "dense")
    return Cost((launch,), shape.dtype, 0.0, context, launch.bytes)


def sorted_best(lists: float, many: float, few: float) -> float:
    """Entries of a sort that finds the best `few` of `many` scores for each list, and puts these in order."""
    return lists * (many + (few * math.log2(few) if few > 1 else 0.0))


def picked(lists: float, many: float, few: float) -> float:
    """Entries that are handled one by one to find the best `few` of `many` scores for each list, in no order: where
    these are scattered, next to none of the others."""
    return lists * min(many, 8 * few)


def summed(lists: float, looked_up: float, few: float) -> float:
    """Look-ups that find the best `few` rows for each list by so many look-ups of their codes. A candidate takes as
    long as many: it is listed, has an exponential for each query head and a place among the best."""
    return lists * (looked_up + A_CANDIDATE * 2 * few)


class Chooser(Reader, Protocol):
    """What a step's cost is asked of: a selector."""

    @property
    def unit(self) -> int: ...
    @property
    def host(self) -> bool: ...
    def allowed(self, budget: int) -> int: ...
    def full_scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None: ...


def step_cost(
    selector: Chooser,
    shape: Shape,
    context: int,
    budget: Budget,
    *,
    sink: int = 4,
    window: int = 64,
    waiting: int = 0,
    rows: float | None = None,
) -> Cost:
    """Of one step of one layer: choosing, and attention to what is chosen, to sink and window and to what waits.

    Args:
        selector: of the layer (`for_layer`) where the method has parameters of its own.
        shape: of the KV heads that it serves.
        context: rows of each sequence.
        budget: as of `decode`. Of a mass its most rows, as if all were read, unless `rows` says how many are.
        sink, window: of the cache.
        waiting: rows that wait to be sealed beyond those that fill no unit of the selector: 0 right after a seal,
            half of the cache's `seal` in the mean.
        rows: that a list names, where they are known better than by the method's formula, as from a comparison.

    Raises:
        ValueError: a method that does not say what choosing reads, a budget below its span, or a size below 0.
    """
    for name, number in {"context": context, "sink": sink, "window": window, "waiting": waiting}.items():
        if number < 0:
            raise ValueError(f"{name} is 0 or more rows, got {number}")
    sealed = max(context - sink - window - waiting, 0) // selector.unit * selector.unit
    unsealed = context - sealed
    scan = _scan(selector, shape, context, sealed, budget)
    named, runs = scan.rows, scan.runs
    if rows is not None and named:
        named, runs = rows, runs * rows / named
    distinct = unsealed + min(named * scan.lists / shape.heads, sealed)
    attend = attention(shape, scan.lists, unsealed, named, runs, distinct, sealed)
    launches = [Launch("step"), *scan.launches, attend]
    if scan.tail:
        launches.append(attention(shape, shape.heads, 0, scan.tail, scan.tail, scan.tail, scan.tail))
        distinct += scan.tail
    heads = shape.batch * shape.heads
    read, of_rows = heads * scan.read, heads * distinct * shape.row_bytes
    return Cost(tuple(launches), shape.dtype, read, distinct, of_rows, scan.expected, selector.host)


def _scan(selector: Chooser, shape: Shape, context: int, sealed: int, budget: Budget) -> Scan:
    """Return what choosing among `sealed` rows of `context` reads; ValueError where the method does not say."""
    if not sealed:
        return Scan(0.0, 0.0, (), shape.heads)
    allowed = min(selector.allowed(budget_of(selector, budget, context)), max(sealed, selector.span))
    scan = selector.full_scan(shape.query(), sealed, allowed)
    if scan is None:
        raise ValueError(f"{selector} does not say what choosing reads (scan), so no time can be predicted")
    return scan


def products(query: Tensor, entries: float, size: int, read: float = 0.0) -> Launch:
    """Of queries `[B,H,G,D]` with so many vectors of `size` numbers in each KV head, in float32, for which each KV head
    of each sequence reads `read` bytes."""
    scores = query.shape[:3].numel() * entries
    return Launch("product", query.shape[:2].numel() * read, 2.0 * scores * size, scores)


def scored_by_torch(scan: Scan, query: Tensor, rows: int, span: int, operators: int) -> Scan:
    """Return `scan` with the launches of a method that names none: torch multiplies the queries with each entry scanned
    and sorts the products, and one list a KV head names `rows` rows in spans of `span`."""
    batch, heads, _, size = query.shape
    spans = rows // span
    launches = (
        products(query, scan.scanned, size, scan.read),
        Launch("sort", entries=sorted_best(batch * heads, scan.scanned, spans)),
        Launch("operator", count=operators),
    )
    expected = "torch scores what the method scans, since the method names no launches"
    return replace(scan, launches=launches, lists=heads, rows=spans * span, runs=spans, expected=expected)


def both(first: str, second: str) -> str:
    """Return what two parts expect, in words."""
    return "; ".join(filter(None, (first, second)))
