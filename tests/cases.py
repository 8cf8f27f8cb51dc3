"""The one list of selectors that every law runs over. A new selector adds a line here and inherits all laws."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn import (
    A2ATS,
    A2SF,
    D2O,
    H2O,
    HNSW,
    IVF,
    PQ,
    SAAP,
    TOVA,
    Adamas,
    Bounds,
    CaM,
    Clse,
    Delta,
    DoubleSparsity,
    ElasticCache,
    Ellipsoid,
    Exact,
    FastGen,
    Fier,
    Flat,
    FreeKV,
    HashAttention,
    Hata,
    IndexCache,
    Indexer,
    InfiniGen,
    InfLLM,
    InfLLM2,
    Kascade,
    KDEformer,
    Keyformer,
    KMeans,
    KVCache,
    KVMerger,
    LessIsMore,
    Locret,
    Loki,
    Louver,
    LowBit,
    MagicPIG,
    Mean,
    Moments,
    PageMass,
    ParisKV,
    PerfectBuckets,
    Pillar,
    PQCache,
    PyramidKV,
    Quad,
    QueryBridge,
    QueryPQ,
    Quest,
    Random,
    RazorAttention,
    Recent,
    Reformer,
    RetrievalAttention,
    RetroInfer,
    RobustVamana,
    RocketKV,
    Rows,
    Scissorhands,
    Seer,
    Selection,
    Selector,
    SelfIndex,
    ShadowKV,
    SkipSoftmax,
    SnapKV,
    SparQ,
    Tail,
    Tailed,
    TopP,
    TwoStage,
    Unique,
    VAttention,
    Weighed,
    Window,
    ZipCache,
)
from sparseattn.core.context import LayerContext, StepContext
from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.step_cost import Scan
from sparseattn.kernels.product_codes.missed_rows import MissedRows
from sparseattn.selectors.abilities import (
    Biases,
    EstimatesMass,
    Evicts,
    FollowsMoves,
    HasTail,
    LearnsFromQueries,
    Observes,
    ReadsKeys,
)
from sparseattn.selectors.base import best, vote
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.combined.wrapper import Wrapper
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.selectors.saved_state import Loaded, of_parts
from sparseattn.traces.synthetic import synthetic


class Buckets(LearnsFromQueries, Selector):
    """A test double with everything the contract allows: queries, its own order, runs, several seals.

    Each sealed batch is sorted by the sign of the key's product with the mean of its queries, into two runs; a query
    visits runs by the product with their mean key. Shaped as SAAP is, small enough to check by eye.
    """

    span = 4
    queries_share = 1.0

    def __init__(self, reverse: bool = True) -> None:
        self.reverse = reverse
        self.mean = RowBuffer(2)  # [B,H,R,D]
        self.start = RowBuffer(2)  # [B,H,R]
        self.length = RowBuffer(2)  # [B,H,R]
        self.shown = RowBuffer(1)  # [B,n] rows shown so far, padding included

    def append(self, rows: Rows) -> Tensor:
        assert self.learns_once or rows.queries is not None
        batch, heads, new, size = rows.keys.shape
        pad = (rows.positions < 0)[:, None].expand(batch, heads, new)
        mean = rows.keys.new_zeros(batch, heads, size) if rows.queries is None else rows.queries.mean((2, 3))
        side = ((rows.keys * mean[:, :, None]).sum(-1) > 0).long()
        side = torch.where(pad, 2, side)
        order = side.argsort(dim=-1, stable=True)
        if self.reverse:  # the longest-waiting row last: any order within a run is allowed
            order = order.flip(-1)
            side = 2 - side
        sizes = torch.stack([(side == s).sum(-1) for s in range(3)], -1)  # [B,H,3]
        first = sizes.cumsum(-1) - sizes + self.shown.rows
        sums = torch.stack([((side == s)[..., None] * rows.keys).sum(2) for s in range(3)], 2)
        padding = 0 if self.reverse else 2
        sizes = sizes.clone()
        sizes[:, :, padding] = 0
        self.mean.append(sums)
        self.start.append(first)
        self.length.append(sizes)
        self.shown.append(rows.positions)
        return order

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        scores = vote((query @ self.mean.data.mT).float(), "sum")  # [B,H,R]
        ids = best(scores, scores.shape[-1])
        return Selection.runs(self.start.data.gather(2, ids), self.length.data.gather(2, ids), self.span, budget)


class SampledBuckets(Buckets):
    """Learns from the queries of a share of the rows, of none of them in a small seal."""

    def __init__(self, queries_share: float, reverse: bool = True) -> None:
        super().__init__(reverse)
        self.queries_share = queries_share


class Heaviest(Evicts, FollowsMoves, LearnsFromQueries, ReadsKeys, Selector):
    """A test double that evicts: each KV head holds the `rows` rows with the largest weight, others are gone for good.

    A row weighs the norm of its key and, where it is of the prompt, what the softmax of the prompt's last queries over
    all of the prompt gives it. Of those held, a query reads the best by its own product.
    """

    last_queries = 3

    def __init__(self, rows: int = 40) -> None:
        self.rows = rows
        self.weight = RowBuffer(2)  # [B,H,N] -inf where a row is not held

    def append(self, rows: Rows) -> None:
        weight = rows.keys.norm(dim=-1)
        if rows.last_queries is not None:
            weight = weight + self._votes(rows)
        self.weight.append(weight.masked_fill((rows.positions < 0)[:, None], -torch.inf))
        held = self.weight.data
        gone = held.argsort(dim=-1, descending=True, stable=True)[..., self.rows :]
        held.scatter_(2, gone, -torch.inf)

    @staticmethod
    def _votes(rows: Rows) -> Tensor:
        """`[B,H,n]`: the mean weight of a sealed row over the prompt's last queries."""
        queries, asked, keys, at = rows.last_queries, rows.last_positions, rows.unsealed, rows.unsealed_positions
        assert queries is not None
        assert asked is not None
        assert keys is not None
        assert at is not None
        every, places = torch.cat([rows.keys, keys], 2), torch.cat([rows.positions, at], 1)
        seen = (places[:, None] >= 0) & (places[:, None] <= asked[..., None])  # [B,q,N]
        logits = (queries @ every[:, :, None].mT / queries.shape[-1] ** 0.5).float()
        weights = logits.masked_fill(~seen[:, None, None], -1e9).softmax(-1) * (asked >= 0)[:, None, None, :, None]
        return weights[..., : rows.keys.shape[2]].mean((2, 3)) * 100

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        scores = query @ self.stored_keys().mT
        scores = scores.masked_fill(self.weight.data[:, :, None].isneginf(), -torch.inf)
        return Selection.tokens(best(vote(scores, "each"), budget))

    def held(self) -> Tensor:
        return ~self.weight.data.isneginf()

    def keep(self, ids: Tensor) -> None:
        self.weight.keep(ids)


class Estimate(Biases, Observes, HasTail, ReadsKeys, Selector):
    """A test double that biases, observes and has a tail: what it reads stands for more than itself.

    Rows rank by their product with the group's queries and by what they got so far. Where not all are read, every
    second one read has a bias of log 2 where it is `biased`, and what is left is one row: a zero key, the mean value of
    all, its number.
    """

    def __init__(self, biased: bool = True) -> None:
        self.biased = biased
        self.values = RowBuffer(2, spare=0.0)  # [B,H,N,D], padding 0
        self.got = RowBuffer(2, spare=0.0)  # [B,H,N] weights, summed over steps and query heads

    def has(self, ability: type) -> bool:
        return super().has(ability) and (self.biased or ability is not Biases)

    def fix(self, rows: int, seal: int) -> None:
        for _, state in self.buffers():
            state.fix(rows)

    def append(self, rows: Rows) -> None:
        real = rows.positions >= 0
        self.values.append(rows.values * real[:, None, :, None])
        self.got.append(torch.zeros(rows.keys.shape[:3], device=rows.keys.device))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        valid = step.valid[:, None]
        scores = vote((query @ self.stored_keys()[:, :, : valid.shape[2]].mT).float(), "sum") + 9 * self.got.visible
        ids = best(scores.masked_fill(~valid, -torch.inf), budget)
        second = torch.arange(ids.shape[2], device=ids.device) % 2
        bias = torch.where(valid.sum(-1, keepdim=True) > budget, second * math.log(2), 0.0).expand(ids.shape)
        bias = bias.float().masked_fill(ids < 0, torch.nan) if self.biased else None
        return Selection.tokens(ids, bias=bias)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        return Scan(sealed, sealed * query.shape[3] * self.bytes_of(query))

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        got, rows = self.got.visible, selection.rows
        each = weights.flatten(2).unflatten(1, (rows.shape[1], -1)).sum(2)  # [B,Hs,R]
        each, rows = (part.unflatten(1, (got.shape[1], -1)).flatten(2) for part in (each, rows))
        got.scatter_add_(2, rows.clamp(min=0), each)

    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        count = step.valid.sum(-1)[:, None]  # [B,1]
        left = count - selection.attended  # [B,Hs]
        mean = self.values.visible.sum(2, keepdim=True) / count.clamp(min=1)[..., None, None]
        ids = torch.where(left > 0, 0, -1)[..., None]
        bias = left.clamp(min=1).log()[..., None]
        return Tail(torch.zeros_like(mean), mean, Selection.tokens(ids, bias=bias))


class Foreseen(InfiniGen):
    """InfiniGen where the layer before foresees the query itself."""

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return super().select(query, dataclasses.replace(step, lookahead=query), budget)


class Same(EstimatesMass, Wrapper):
    """A test double with a part and nothing else: it does what its part does, in every law."""

    def has(self, ability: type) -> bool:
        return super().has(ability) and (ability is not EstimatesMass or self.inner.has(ability))

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        self.inner.check_state(of_parts(state, "inner")["inner"], rows, order)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        return self.inner.weigh(query, step, budget)


def partition(heads: int, size: int, buckets: int = 12, hidden: int = 8, classifiers: int = 0, skip: bool = False):
    """A random `Partition`; by default with one classifier per KV head."""
    draw = torch.Generator().manual_seed(heads * size)
    centroids = torch.nn.functional.normalize(torch.randn(heads, buckets, size, generator=draw), dim=-1)
    many = classifiers or heads
    shapes = {"w1": (many, hidden, size), "b1": (many, hidden), "w2": (many, buckets, hidden), "b2": (many, buckets)}
    if skip:
        shapes["skip"] = (many, buckets, size)
    made = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return Partition(centroids, Classifier(**made))


class Drawn(Artefact):
    """A random partition for whatever layer and heads ask for one."""

    def __init__(self, roped: bool) -> None:
        super().__init__({0: partition(1, 2)}, roped=roped, ropes=None if roped else {0: Rope.of(2)})

    def holds(self, layer):
        return self.layers[0]

    def check(self, layer, heads, group, size, rope):
        return partition(heads, size)


def drawn(method: type[Partitioned], roped: bool = True, **arguments) -> Selector:
    """`method` over a `Drawn` artefact."""
    selector = method(__file__, **arguments)  # some file that is there
    selector._held = Drawn(roped)
    selector.bind(LayerContext(rope=None if roped else Rope.of(16)))
    return selector


def with_rope(selector: Selector) -> Selector:
    """`selector`, told of a RoPE that takes keys of any size."""
    selector.bind(LayerContext(rope=Rope.of(16)))
    return selector


@dataclass(frozen=True)
class Case:
    """`make` builds the selector at its defaults, `exhaustive` so that it names every row at unlimited budget and drops
    none ("exhaustive and never evicting"), or None with the reason why there is no such construction. Methods that
    evict are made to hold fewer than 80 rows."""

    name: str
    make: Callable[[], Selector]
    exhaustive: Callable[[], Selector] | None
    reason: str = ""

    @property
    def second(self) -> bool:
        """Whether it is a further form of a method that another case has: it meets each law once, in the slow run."""
        return self.name in SECOND

    @property
    def by_turns(self) -> bool:
        """Whether the fast run may have a third of the laws that it meets, and the slow run the others."""
        return self.name not in FEW and not self.second


# Forms whose code differs from their method's first case by little. What differs much has tests of its own.
SECOND = {
    "a2ats-each", "adamas-sum", "bridge-few", "d2o-weigh", "doublesparsity-wide",
    "exact-layer", "exact-static", "freekv-next",
    "freekv-querypq", "hata-each", "hnsw-l2", "infinigen-group", "infllm-each", "infllm2-each", "ivf-few",
    "kascade-querypq", "kdeformer-one", "loki-before", "loki-each", "louver-mass", "pariskv-each", "pillar-newest",
    "pq-each", "querypq-additive", "querypq-codes", "querypq-keys", "querypq-missed", "querypq-page", "querypq-plain",
    "querypq-rope", "quest-max", "recent-few", "robustvamana-stitched", "saap-context", "saap-deroped", "same-estimate",
    "same-heaviest", "selfindex-max", "skipsoftmax-each", "snapkv-avg", "sparq-each", "tailed-querypq",
    "tailed-saap", "topp-group", "topp-querypq", "twostage-codes", "twostage-estimate", "twostage-querypq",
    "vattention-pages",
}  # fmt: skip


# One of each kind: keys alone, pages, buckets, a graph, queries, a bias with a tail, eviction, a host's index.
FEW = {"buckets", "estimate", "exact", "heaviest", "ivf", "lowbit", "quest", "retrieval", "saap"}


CASES = [
    Case("exact", Exact, Exact),
    Case("exact-group", lambda: Exact("softmax"), lambda: Exact("softmax")),
    Case("exact-layer", lambda: Exact("layer"), lambda: Exact("layer")),
    Case("exact-static", lambda: Exact(refresh=4), lambda: Exact(refresh=1)),
    Case("quest", Quest, Quest),
    Case("quest-each", lambda: Quest(8, "each"), lambda: Quest(8, "each")),
    Case("unique", lambda: Unique(8), lambda: Unique(8)),
    Case("mean", lambda: Mean(8, bits=8), lambda: Mean(8, bits=8)),
    Case("quad", lambda: Quad(bits=8), lambda: Quad(bits=8)),
    Case("clse", lambda: Clse(bits=4, rest=True), lambda: Clse(bits=4, rest=True)),
    Case("ellipsoid", lambda: Ellipsoid(8, 3, group="each"), lambda: Ellipsoid(8, 3, group="each")),
    Case("pagemass", PageMass, PageMass),
    Case("quest-int8", lambda: Quest(8, int8=True), lambda: Quest(8, int8=True)),
    Case("quest-max", lambda: Quest(32, "max"), lambda: Quest(32, "max")),
    Case("flat", Flat, Flat),
    Case("freekv", lambda: FreeKV(Quest(8, "each"), 0.0), FreeKV),
    Case("freekv-next", lambda: FreeKV(Same(drawn(SAAP, probes=3)), 0.3, True), lambda: FreeKV(Exact(), 0.5, True)),
    Case("infinigen", lambda: Foreseen(share=1.0), lambda: Foreseen(1.0, math.inf, share=1.0)),
    Case(
        "infinigen-group",
        lambda: Foreseen(0.5, 2.0, "softmax", 1.0),
        lambda: Foreseen(0.5, math.inf, "softmax", 1.0),
    ),
    Case("infllm", lambda: InfLLM(8), lambda: InfLLM(8, 8)),
    Case("infllm-each", lambda: InfLLM(16, 2, 20, "each"), lambda: InfLLM(16, 16, 20, "each")),
    Case("infllm2", lambda: InfLLM2(16), lambda: InfLLM2(16)),
    Case("infllm2-each", lambda: InfLLM2(32, "each"), lambda: InfLLM2(32, "each")),
    Case("ivf", IVF, lambda: IVF(probes=1 << 20)),
    Case("ivf-few", lambda: IVF(4, 1), lambda: IVF(4, 4)),
    # A graph that prunes no link is connected. With degree 32, 69 of 500 clustered keys lost every link to them.
    Case("hnsw", HNSW, lambda: HNSW(degree=128, build_beam=256)),
    Case("hnsw-l2", lambda: HNSW(metric="l2"), lambda: HNSW(degree=128, build_beam=256, metric="l2")),
    Case("reformer", lambda: Reformer(8, 16), lambda: Reformer(8, 16)),
    Case("retrieval", RetrievalAttention, lambda: RetrievalAttention(beam=1 << 20)),
    Case(
        "retrieval-query",
        lambda: RetrievalAttention(8, 10, 4, metric="query", guides=5),
        lambda: RetrievalAttention(1 << 20, 10, 2, metric="query", guides=0),
    ),
    Case("louver", lambda: Louver(sample=24), Louver),
    Case("louver-mass", lambda: Louver("mass", 0.9, 16, 3, 2), lambda: Louver(subspaces=3, rows=2)),
    Case("retroinfer", lambda: RetroInfer(8), lambda: RetroInfer(8, 1.0)),
    Case("robustvamana", RobustVamana, lambda: RobustVamana(beam=1 << 20)),
    Case(
        "robustvamana-stitched",
        lambda: RobustVamana(8, 8, build_beam=20, share=0.2),
        lambda: RobustVamana(1 << 20, 8, build_beam=20, share=0.2),
    ),
    Case("bridge", QueryBridge, lambda: QueryBridge(probes=1, neighbours=1024)),
    Case("bridge-few", lambda: QueryBridge(2, 8, 5, True), lambda: QueryBridge(3, 1024, 5)),
    Case("saap", lambda: drawn(SAAP, probes=3), lambda: drawn(SAAP, probes=1 << 20)),
    Case(
        "saap-each",
        lambda: drawn(SAAP, probes=2, group="each", span=4),
        lambda: drawn(SAAP, probes=12, group="each", span=4),
    ),
    Case("saap-deroped", lambda: drawn(SAAP, False, probes=3, span=1), lambda: drawn(SAAP, False, span=1)),
    Case("saap-context", lambda: drawn(SAAP, probes=3, context=0.8), lambda: drawn(SAAP, context=0.8)),
    Case("lowbit", lambda: LowBit(rows=16), lambda: LowBit(rows=16)),
    Case("lowbit-one", lambda: LowBit(1, 32, group="each"), lambda: LowBit(1, 32, group="each")),
    Case("lowbit-scales", lambda: LowBit(2, 16, scales=8), lambda: LowBit(2, 16, scales=8)),
    Case("lowbit-page", lambda: LowBit(4, 16, 8, "max"), lambda: LowBit(4, 16, 8, "max")),
    Case("twostage", lambda: TwoStage(times=2, rows=16), lambda: TwoStage(times=1, rows=16)),
    Case(
        "twostage-union",
        lambda: TwoStage(Quest(8, "each"), 3, rows=16),
        lambda: TwoStage(Quest(8, "each"), 1, rows=16),
    ),
    Case(
        "twostage-each",
        lambda: TwoStage(LowBit(1, 16, 4), 2, 4, 32, "each"),
        lambda: TwoStage(LowBit(1, 16, 4), 1, 4, 32, "each"),
    ),
    Case(
        "twostage-saap",
        lambda: TwoStage(drawn(SAAP, probes=4), 4, rows=16),
        lambda: TwoStage(drawn(SAAP, probes=1 << 20), 1, rows=16),
    ),
    Case("topp", lambda: TopP(p=0.9, propose=48, rows=16), lambda: TopP(p=1.0, propose=1.0, rows=16)),
    Case(
        "topp-group",
        lambda: TopP(Quest(8, "each"), 0.6, 40, 16, "softmax"),
        lambda: TopP(Quest(8, "each"), 1.0, 1.0, 16, "softmax"),
    ),
    # A base sample of as many draws as there are rows reads every row.
    Case("vattention", lambda: VAttention(top=5), lambda: VAttention(rate=1.0)),
    Case(
        "vattention-pages",
        lambda: VAttention(Quest(8), 0.5, 0.2, 0.1, 24),
        lambda: VAttention(Quest(8), 1e-6, 0.2, 1.0, 0.1),
    ),
    Case("same", lambda: Same(drawn(SAAP, probes=3)), lambda: Same(drawn(SAAP, probes=1 << 20))),
    Case("same-estimate", lambda: Same(Estimate()), lambda: Same(Estimate())),
    Case("same-sampled", lambda: Same(Same(SampledBuckets(0.3))), lambda: Same(Same(SampledBuckets(0.3)))),
    Case(
        "twostage-estimate",
        lambda: TwoStage(Estimate(False), 2, rows=16, group="each"),
        lambda: TwoStage(Estimate(False), 1, rows=16, group="each"),
    ),
    Case("estimate", Estimate, Estimate),
    Case("adamas", Adamas, Adamas),
    Case("adamas-sum", lambda: Adamas(1.0, "sum"), lambda: Adamas(1.0, "sum")),
    Case("fier", lambda: Fier(16), lambda: Fier(16)),
    # Rows of equal codes tie: these cases have none where a law's budget ends, at 8 to 16 names a key or by their vote.
    Case("selfindex", lambda: SelfIndex("sum"), lambda: SelfIndex("sum")),
    Case("selfindex-max", lambda: SelfIndex("max"), lambda: SelfIndex("max")),
    Case("pq", lambda: PQ(8), lambda: PQ(8)),
    Case("pq-each", lambda: PQ(16, 4, 300, 1, "each"), lambda: PQ(16, 4, 300, 1, "each")),
    Case("pqcache", lambda: PQCache(8), lambda: PQCache(8)),
    Case("querypq", lambda: with_rope(QueryPQ(8, 8, share=1.0)), lambda: with_rope(QueryPQ(8, 8, share=1.0))),
    Case(
        "querypq-plain",
        lambda: QueryPQ(8, 8, share=1.0, mean="plain"),
        lambda: QueryPQ(8, 8, share=1.0, mean="plain"),
    ),
    Case("querypq-keys", lambda: QueryPQ(16, 4, "keys", group="each"), lambda: QueryPQ(16, 4, "keys", group="each")),
    Case(
        "querypq-additive",
        lambda: QueryPQ(5, 4, share=1.0, additive=True),
        lambda: QueryPQ(16, 4, share=1.0, additive=True),
    ),
    Case(
        "querypq-page",
        lambda: QueryPQ(8, 8, share=1.0, group="sum", page=8),
        lambda: QueryPQ(8, 8, share=1.0, group="sum", page=8),
    ),
    Case(
        "querypq-rope",
        lambda: with_rope(QueryPQ(8, 4, share=1.0, additive=True)),
        lambda: with_rope(QueryPQ(8, 4, share=1.0, missed=0.0)),
    ),
    Case(
        "querypq-codes",
        lambda: with_rope(QueryPQ(8, 4, share=1.0, missed=0.0)),
        lambda: with_rope(QueryPQ(8, 4, share=1.0, missed=0.0)),
    ),
    Case(
        "querypq-missed",
        lambda: with_rope(QueryPQ(8, 4, share=1.0, missed=0.1)),
        lambda: with_rope(QueryPQ(8, 4, share=1.0, missed=0.1)),
    ),
    Case(
        "tailed-querypq",
        lambda: with_rope(Tailed(QueryPQ(8, 8, share=1.0), 8)),
        lambda: with_rope(Tailed(QueryPQ(8, 8, share=1.0), 8)),
    ),
    Case(
        "twostage-querypq",
        lambda: TwoStage(QueryPQ(8, 8, share=1.0), 2, rows=16),
        lambda: TwoStage(QueryPQ(8, 8, share=1.0), 1, rows=16),
    ),
    Case(
        "twostage-codes",
        lambda: TwoStage(drawn(SAAP, probes=4), 4, second=QueryPQ(8, 8, share=1.0, group="sum")),
        lambda: TwoStage(drawn(SAAP, probes=1 << 20), 1, second=QueryPQ(8, 8, share=1.0, group="sum")),
    ),
    Case(
        "topp-querypq",
        lambda: with_rope(TopP(QueryPQ(8, 8, share=1.0), 0.9, 48, rows=16)),
        lambda: with_rope(TopP(QueryPQ(8, 8, share=1.0), 1.0, 1.0, rows=16)),
    ),
    Case(
        "kascade-querypq",
        lambda: Kascade(anchors=[3], inner=QueryPQ(8, 8, share=1.0)),
        lambda: Kascade(anchors=[3], inner=QueryPQ(8, 8, share=1.0)),
    ),
    Case(
        "freekv-querypq", lambda: FreeKV(QueryPQ(8, 8, share=1.0), 0.0), lambda: FreeKV(QueryPQ(8, 8, share=1.0), 0.0)
    ),
    Case("pillar", Pillar, Pillar),
    Case("pillar-newest", lambda: Pillar(0), lambda: Pillar(0)),
    Case("hata", lambda: Hata(bits=24), lambda: Hata(bits=24)),
    Case("hata-each", lambda: Hata(bits=16, group="each"), lambda: Hata(bits=16, group="each")),
    Case("hashattention", lambda: HashAttention(bits=24), lambda: HashAttention(bits=24)),
    Case("seer", lambda: with_rope(Seer(page=8)), lambda: with_rope(Seer(page=8))),
    Case("indexer", lambda: Indexer(dimensions=3), lambda: Indexer(dimensions=3)),
    Case("sparq", lambda: SparQ(8), lambda: SparQ(1 << 20)),
    Case("sparq-mean", lambda: SparQ(8, True), lambda: SparQ(1 << 20, True)),
    Case("sparq-each", lambda: SparQ(4, True, "each"), lambda: SparQ(1 << 20, True, "each")),
    Case("rocketkv", lambda: RocketKV(8.0, page=4), lambda: RocketKV(8.0, page=3)),
    Case(
        "rocketkv-prompt",
        lambda: RocketKV(4.0, prompt=64, kernel=7, group="each"),
        lambda: RocketKV(4.0, prompt=1 << 20),
    ),
    Case("pariskv", ParisKV, ParisKV),
    Case(
        "pariskv-each",
        lambda: ParisKV(0.3, 0.2, group="each"),
        lambda: ParisKV(0.3, 1.0, group="each"),
    ),
    Case("a2ats", lambda: with_rope(A2ATS(share=1.0)), lambda: with_rope(A2ATS(2, share=1.0))),
    Case(
        "a2ats-each",
        lambda: with_rope(A2ATS(9, share=1.0, group="each")),
        lambda: with_rope(A2ATS(9, share=1.0, group="each")),
    ),
    Case("loki", Loki, lambda: Loki(1 << 20)),
    Case("loki-before", lambda: with_rope(Loki(6, before=True)), lambda: with_rope(Loki(1 << 20, before=True))),
    Case("loki-each", lambda: Loki(5, group="each"), lambda: Loki(1 << 20, group="each")),
    # Every row brings its query: a sequence whose first sealed rows had none would learn from its keys, and say so.
    Case("doublesparsity", lambda: DoubleSparsity(share=1.0), lambda: DoubleSparsity(1 << 20, share=1.0)),
    Case(
        "doublesparsity-wide",
        lambda: DoubleSparsity(5, 16, share=1.0, group="max"),
        lambda: DoubleSparsity(1 << 20, 16, share=1.0, group="max"),
    ),
    Case("delta", lambda: Delta(8, 1), lambda: Delta(8, 1)),
    Case("lessismore", LessIsMore, LessIsMore),
    Case("shadowkv", ShadowKV, ShadowKV),
    Case("skipsoftmax", lambda: SkipSoftmax(8), lambda: SkipSoftmax(8, 0.0)),
    Case("skipsoftmax-each", lambda: SkipSoftmax(8, 30.0, "each"), lambda: SkipSoftmax(8, 0.0, "each")),
    Case("moments", lambda: drawn(Moments, probes=3), lambda: drawn(Moments)),
    Case("kascade", lambda: Kascade(anchors=[3], inner=Quest(8)), lambda: Kascade(anchors=[3])),
    Case("indexcache", lambda: IndexCache(2, Quest(8)), lambda: IndexCache("FSSF")),
    Case("kdeformer", lambda: KDEformer(rows=16), lambda: KDEformer(rows=16)),
    Case("kdeformer-one", lambda: KDEformer(3, 0, 7), lambda: KDEformer(3, 0, 7)),
    Case("magicpig", lambda: MagicPIG(4, 20), lambda: MagicPIG(0, 2, floor=0.0)),
    Case("kmeans", lambda: drawn(KMeans, probes=5), lambda: drawn(KMeans)),
    Case("perfect", lambda: drawn(PerfectBuckets, probes=4), lambda: drawn(PerfectBuckets)),
    Case("h2o", H2O, H2O),
    Case("h2o-decode", lambda: H2O("decode", 0.25), lambda: H2O("decode", 0.25)),
    Case("a2sf", lambda: A2SF(0.95), lambda: A2SF(0.95)),
    Case("keyformer", Keyformer, Keyformer),
    Case("scissorhands", lambda: Scissorhands(16, 4), lambda: Scissorhands(16, 4)),
    Case("tova", TOVA, TOVA),
    Case("locret", lambda: with_rope(Locret(hidden=24)), lambda: with_rope(Locret(hidden=24))),
    Case("fastgen", lambda: FastGen(0.7), lambda: FastGen(1.0, 0, 0.0, 0.0)),
    Case("snapkv", SnapKV, SnapKV),
    Case("snapkv-avg", lambda: SnapKV(8, 5, "avg"), lambda: SnapKV(8, 5, "avg")),
    Case("d2o", D2O, D2O),
    Case("d2o-weigh", lambda: D2O(0.2, 0.3, True), lambda: D2O(0.2, 0.3, True)),
    Case("kvmerger", KVMerger, KVMerger),
    Case("elasticcache", lambda: ElasticCache(5), lambda: ElasticCache(5)),
    Case("cam", lambda: CaM(4), lambda: CaM(4)),
    Case("pyramidkv", lambda: PyramidKV(4), PyramidKV),
    Case("zipcache", lambda: ZipCache(0.1), lambda: ZipCache(0.1)),
    Case("random", Random, Random),
    Case("razor", lambda: RazorAttention(8), lambda: RazorAttention(8)),
    Case("recent", Recent, Recent),
    Case("recent-few", lambda: Recent(4), lambda: Recent(4)),
    Case("tailed", lambda: Tailed(LowBit(rows=16), 8, 0.5), lambda: Tailed(LowBit(rows=16), 8, 0.5)),
    Case("tailed-saap", lambda: Tailed(drawn(SAAP, probes=3)), lambda: Tailed(drawn(SAAP, probes=1 << 20))),
    Case("window", Window, None, "Window never reads beyond sink and window"),
    Case("heaviest", Heaviest, lambda: Heaviest(1 << 20)),
    Case("same-heaviest", lambda: Same(Heaviest(25)), lambda: Same(Heaviest(1 << 20))),
    Case("buckets", Buckets, Buckets),
    Case("buckets-forward", lambda: Buckets(False), lambda: Buckets(False)),
    Case("buckets-sampled", lambda: SampledBuckets(0.3), lambda: SampledBuckets(0.3)),
]


@functools.cache  # a dozen files ask it of each case
def missing(case: Case) -> str | None:
    """Which optional package is not here that the case needs: on a machine with a GPU there may be no faiss."""
    try:
        case.make()
    except ImportError as error:
        return str(error)
    return None


def on_device(case: Case) -> bool:
    """Whether a step of it fits one CUDA graph, in fixed storage. Counted in where a package is missing."""
    try:
        case.make().fix(1 << 12, 64)
    except ValueError:
        return False
    except ImportError:
        pass
    return True


def by_name(cases: list[Case], few: bool = False) -> pytest.MarkDecorator:
    """Parametrizes `case`; what cannot run here skips with the reason. With `few`, those not in `FEW` are `slow`: for
    tests that repeat what the laws say, in another way."""
    parameters = []
    for case in cases:
        why = missing(case)
        marks = [] if why is None else [pytest.mark.skip(reason=why)]
        slow = [pytest.mark.slow] * (few and case.name not in FEW)
        parameters.append(pytest.param(case, id=case.name, marks=[*marks, *slow]))
    return pytest.mark.parametrize("case", parameters)


def by_case(
    cases: Sequence[Case] | Sequence[str], *, called: str = "case", **factors: Mapping[str, Any]
) -> pytest.MarkDecorator:
    """Parametrizes `case`, or what it is `called`, and the factors (each: values by their ids).

    The fast run has each case once, at values that go round, the slow run each case once more, at the next ones. The
    product has more, and finds hardly more.
    """
    parameters = []
    for at, case in enumerate(cases):
        first = []
        for values in factors.values():  # the digits of a number whose base is mixed, so that values meet all others
            at, digit = divmod(at, len(values))
            first.append(digit)
        for more in range(2):
            items = [list(values.items()) for values in factors.values()]
            chosen = [one[(start + more) % len(one)] for one, start in zip(items, first, strict=True)]
            name = "-".join([getattr(case, "name", case), *(name for name, _ in chosen)])
            marks = [pytest.mark.slow] * bool(more)
            parameters.append(pytest.param(case, *(value for _, value in chosen), id=name, marks=marks))
    return pytest.mark.parametrize((called, *factors), parameters)


ON_DEVICE = [case for case in CASES if on_device(case)]


def heads(batch: int, kv: int, group: int, rows: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """Random queries `[B,H,G,N,D]`, keys and values `[B,H,N,D]`."""
    draw = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, kv, group, rows, size, generator=draw)
    keys, values = torch.randn(2, batch, kv, rows, size, generator=draw)
    return queries.to(dtype), keys.to(dtype), values.to(dtype)


def attention(batch: int, kv: int, group: int, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `heads`, from the synthetic generator: clustered keys, queries that aim at some of them, sinks, RoPE."""
    return tuple(x.clone() for x in _drawn_attention(batch, kv, group, rows, size))  # type: ignore[return-value]


@functools.cache  # a law over all methods draws the same each time, which takes as long as many a law
def _drawn_attention(batch: int, kv: int, group: int, rows: int, size: int) -> tuple[Tensor, ...]:
    layer = synthetic(rows, heads=batch * kv, group=group, size=size, clusters=8, rope=True).layer(0)
    split = (layer.query, layer.keys, layer.values)
    return tuple(x.unflatten(0, (batch, kv)) for x in split)


def rows_missed(selector: QueryPQ, rows: int) -> Tensor:
    """Return of which rows a selector keeps what codes miss, `[B,H,N]` bool."""
    ids = MissedRows(selector.missed_rows.visible, selector.back.visible).ids
    return (ids[..., None] == torch.arange(rows)).any(2)


def full(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Full attention of `[B,H,G,D]` over `[B,H,N,D]`, in float64."""
    logits = query.double() @ keys.double().mT / query.shape[-1] ** 0.5
    return torch.softmax(logits, -1) @ values.double()


def together(cache: KVCache) -> tuple[Tensor, Tensor, Bounds]:
    """Keys, values and bounds of every row as one storage, `sink | sealed | recent`, wherever they lie."""
    if cache.sealed_device is None:
        return cache.keys, cache.values, cache.bounds
    sink, bounds, zone = cache.sink, cache.bounds, cache.stored.sealed_keys.shape[2]
    assert bounds.base == sink
    assert bool((bounds.sealed == sink).all()), "no row beside sink and recent ones is left on the cache's device"
    near, far = (cache.keys, cache.values), (cache.stored.sealed_keys, cache.stored.sealed_values)
    keys, values = (
        torch.cat([a[:, :, :sink], b.to(a.device), a[:, :, sink:]], 2) for a, b in zip(near, far, strict=True)
    )
    return keys, values, Bounds(bounds.sink, sink, bounds.sealed + zone, bounds.rows + zone)


def whole(batch: int, rows: int) -> Bounds:
    """Bounds under which every query reads every row."""
    return Bounds.of(batch, rows, sink=rows)
