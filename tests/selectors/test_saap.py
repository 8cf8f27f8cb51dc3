"""SAAP and k-means against brute force: which bucket a key joins, which buckets a query visits, what that costs."""

from __future__ import annotations

import copy
import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sparseattn import SAAP, KMeans, KVCache, Moments, PerfectBuckets, Rows, Selection, decode, make_selector
from sparseattn.core.context import LayerContext, StepContext
from sparseattn.core.rope import Rope
from sparseattn.evaluation.replay import evaluate
from sparseattn.selectors.clusters import bucket_table as table
from sparseattn.selectors.clusters import moments
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import ArtefactError, Classifier, Partition
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer
from tests.cases import heads, partition

B, H, G, D, C, F = 2, 2, 3, 32, 12, 8
LAYER = 2
ROPE = Rope.of(24)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return saved(tmp_path / "de-roped.safetensors")


def saved(path: Path, roped: bool = False, classifiers: int = 0, part: Partition | None = None, **meta) -> str:
    part = part or partition(H, D, C, F, classifiers)
    Artefact(
        {LAYER: part, 5: copy.deepcopy(part)}, roped=roped, ropes={LAYER: ROPE, 5: ROPE}, meta={"group": G, **meta}
    ).save(path)
    return str(path)


class Replay:
    """A prefill of two sequences, one of them shorter, then tokens; keeps what every token was before RoPE."""

    def __init__(
        self, selector: Partitioned, prefill: int = 150, tokens: int = 230, seal: int = 16, **settings
    ) -> None:
        self.queries, self.keys, self.values = heads(B, H, G, tokens, D)  # before RoPE
        self.padding = torch.tensor([0, 21])
        self.selector = selector.for_layer(LayerContext(LAYER, rope=ROPE))
        self.cache = KVCache(self.selector, sink=3, window=5, seal=seal, **settings)
        at = torch.arange(tokens) - self.padding[:, None]
        self.roped = ROPE.rotate(self.keys, at[:, None]), ROPE.rotate(self.queries, at[:, None, None])
        self.at = at.clamp(min=-1)
        self.now = prefill
        self._append(0, prefill)

    def _append(self, start: int, stop: int) -> None:
        rows = slice(start, stop)
        self.cache.append(self.roped[0][:, :, rows], self.values[:, :, rows], positions=self.at[:, rows])

    def step(self, budget: int | None = None) -> tuple[int, Selection]:
        """The number of the token decoded, and what was selected for it."""
        self._append(self.now, self.now + 1)
        self.now += 1
        return self.now - 1, self.cache.select(self.roped[1][:, :, :, self.now - 1], budget)

    def token(self) -> Tensor:
        """`[B,H,N]`: the token that every sealed row is, found by its value; -1 for padding."""
        same = (self.cache.stored.sealed_values[:, :, :, None, :4] == self.values[:, :, None, :, :4]).all(-1)
        return torch.where(same.any(-1), same.int().argmax(-1), -1)

    def named(self, selection: Selection) -> list[list[list[int]]]:
        """`[B][Hs]`: the tokens selected, in the selection's order."""
        token, rows = self.token(), selection.rows
        each = rows.shape[1] // H
        return [
            [token[b, s // each, rows[b, s][rows[b, s] >= 0]].tolist() for s in range(rows.shape[1])] for b in range(B)
        ]

    def bucket(self, centroids: Tensor) -> Tensor:
        """`[B,H,T]`: brute force in float64 over the keys before RoPE."""
        return (self.keys.double()[..., None, :] * centroids.double()[:, None]).sum(-1).argmax(-1)

    def sealed(self, b: int) -> set[int]:
        first = 3 + int(self.padding[b])
        return set(range(first, first + int(self.cache.sealed[b])))


def expected(replay: Replay, scores: Tensor, centroids: Tensor, probes: int) -> list[list[list[int]]]:
    """`[B][Hs]`: tokens of the `probes` best buckets of `scores` `[B,Hs,C]`, best first, oldest first in each."""
    bucket, found = replay.bucket(centroids), []
    for b in range(B):
        rows = sorted(replay.sealed(b))
        found.append(
            [
                [
                    t
                    for c in scores[b, s].topk(probes).indices
                    for t in rows
                    if bucket[b, s * H // len(scores[b]), t] == c
                ]
                for s in range(scores.shape[1])
            ]
        )
    return found


def forward(classifier: Classifier, a: int, query: Tensor) -> Tensor:
    hidden = (classifier.w1[a] @ query + classifier.b1[a]).clamp(min=0)
    return classifier.w2[a] @ hidden + classifier.b2[a]


def probabilities(replay: Replay, t: int, logits: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    """`[B,H,G,C]` from `logits(h, g, query [D])` of every query head, before RoPE."""
    queries = replay.queries[:, :, :, t]
    each = [[[logits(h, g, queries[b, h, g]) for g in range(G)] for h in range(H)] for b in range(B)]
    return torch.stack([torch.stack([torch.stack(g) for g in h]) for h in each]).softmax(-1)


@pytest.mark.parametrize(
    ("group", "classifiers", "apart"), [("softmax", H, None), ("softmax", H * G, "cpu"), ("each", H * G, None)]
)
def test_saap_reads_exactly_the_rows_of_the_buckets_that_its_classifier_names(
    tmp_path: Path, group: str, classifiers: int, apart: str | None
) -> None:
    """Through seals, segments that join, padding and reordering."""
    path = saved(tmp_path / "a", classifiers=classifiers)
    part = Artefact.load(path).layers[LAYER]
    classifier = part.classifier
    assert classifier is not None
    replay = Replay(SAAP(path, probes=3, group=group, span=4), sealed_device=apart)
    for _ in range(34):
        t, selection = replay.step()
        chances = probabilities(replay, t, lambda h, g, q: forward(classifier, h if classifiers == H else h * G + g, q))
        scores = chances.sum(2) if group == "softmax" else chances.flatten(1, 2)
        found, wanted = replay.named(selection), expected(replay, scores, part.centroids, 3)
        assert [[sorted(rows) for rows in b] for b in found] == [[sorted(rows) for rows in b] for b in wanted]
    assert replay.selector.edges.rows > 1


@pytest.mark.parametrize("group", ["softmax", "sum", "each"])
def test_kmeans_ranks_buckets_by_products_with_centroids(file: str, group: str) -> None:
    centroids = Artefact.load(file).layers[LAYER].centroids
    replay = Replay(KMeans(file, probes=2, group=group, span=1))
    for _ in range(20):
        t, selection = replay.step()
        products = torch.einsum("bhgd,hcd->bhgc", replay.queries[:, :, :, t], centroids)
        chances = (products / math.sqrt(D)).softmax(-1)
        scores = {"softmax": chances.sum(2), "sum": products.sum(2), "each": chances.flatten(1, 2)}[group]
        wanted = expected(replay, scores, centroids, 2)
        assert [[sorted(rows) for rows in b] for b in replay.named(selection)] == [
            [sorted(r) for r in b] for b in wanted
        ]


def test_a_roped_artefact_takes_keys_and_queries_as_they_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", roped=True)
    centroids = Artefact.load(path).layers[LAYER].centroids
    replay = Replay(KMeans(path, probes=2))
    plain, (replay.keys, replay.queries) = replay.keys, replay.roped
    t, selection = replay.step()
    products = torch.einsum("bhgd,hcd->bhgc", replay.queries[:, :, :, t], centroids) / math.sqrt(D)
    wanted = expected(replay, products.softmax(-1).sum(2), centroids, 2)
    assert replay.named(selection) == wanted
    replay.keys = plain
    assert wanted != expected(replay, products.softmax(-1).sum(2), centroids, 2), "RoPE matters here"


def test_perfect_buckets_are_ranked_by_the_attention_that_they_hold(file: str) -> None:
    centroids = Artefact.load(file).layers[LAYER].centroids
    replay = Replay(PerfectBuckets(file, probes=3, group="each"))
    for _ in range(20):
        t, selection = replay.step()
        bucket = replay.bucket(centroids)
        mass = torch.zeros(B, H, G, C, dtype=torch.float64)
        for b in range(B):
            rows = sorted(replay.sealed(b))
            logits = replay.roped[1][b, :, :, t].double() @ replay.roped[0][b][:, rows].double().mT / math.sqrt(D)
            index = bucket[b][:, None, rows].expand_as(logits)
            mass[b].scatter_add_(2, index, logits.softmax(-1))
        query, at = replay.roped[1][:, :, :, t], replay.cache.positions
        scores = replay.selector.rank(query, at, replay.selector._parameters(query, G))
        torch.testing.assert_close(scores.exp(), mass)
        wanted = expected(replay, mass.flatten(1, 2), centroids, 3)
        assert [[sorted(rows) for rows in b] for b in replay.named(selection)] == [
            [sorted(r) for r in b] for b in wanted
        ]
        assert selection.scanned is not None
        assert torch.equal(selection.scanned, replay.cache.sealed[:, None].expand(-1, H * G))


@pytest.mark.parametrize("context", [None, 0.8])
def test_moments_are_those_of_the_keys_in_each_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: float | None
) -> None:
    """Of the real rows sealed so far, through seals and parts of them; alone, or mixed with the classifier's logits."""
    monkeypatch.setattr(moments, "CHUNK", B * H * D * 7)
    path = saved(tmp_path / "a", part=partition(H, D, 40, F))  # more buckets, some of which stay empty
    part = Artefact.load(path).layers[LAYER]
    selector = Moments(path, probes=3) if context is None else SAAP(path, probes=3, context=context)
    replay = Replay(selector, 60, 130)
    empty = 0
    for _ in range(40):
        t, selection = replay.step()
        bucket, keys, queries = replay.bucket(part.centroids), replay.roped[0].double(), replay.roped[1].double()
        logits = torch.full((B, H, G, 40), -math.inf, dtype=torch.float64)
        for b in range(B):
            rows = torch.tensor(sorted(replay.sealed(b)))
            for h in range(H):
                for c in bucket[b, h, rows].unique():
                    mine = keys[b, h, rows[bucket[b, h, rows] == c]]
                    query = queries[b, h, :, t] / math.sqrt(D)
                    spread = query.square() @ mine.var(0, correction=0)
                    logits[b, h, :, c] = query @ mine.mean(0) + moments.SPREAD * spread / 2
        if context is not None:
            classifier = part.classifier
            assert classifier is not None
            plain = replay.queries[:, :, :, t]
            trained = torch.stack(
                [
                    torch.stack([forward(classifier, h, plain[b, h, g]) for g in range(G)])
                    for b in range(B)
                    for h in range(H)
                ]
            ).view(B, H, G, 40)
            logits = (1 - context) * trained + context * logits
        empty += int(logits.isinf().all(2).sum())
        wanted = expected(replay, logits.softmax(-1).sum(2), part.centroids, 3)
        assert [[sorted(rows) for rows in b] for b in replay.named(selection)] == [
            [sorted(rows) for rows in b] for b in wanted
        ]
    assert empty


def test_moments_of_keys_far_from_the_origin() -> None:
    """As biases of a projection make them; float32 squares of theirs would leave nothing of the variance."""
    kept, draw = moments.KeyMoments(), torch.Generator().manual_seed(0)
    keys = 200 + 0.5 * torch.randn(1, 1, 160, D, generator=draw)
    bucket = torch.randint(0, 4, (1, 1, 160), generator=draw)
    for rows in (slice(0, 16), slice(16, 100), slice(100, 160)):
        kept.add(keys[:, :, rows], bucket[:, :, rows], 3)  # of bucket 3, padding
    mean, variance, number = kept.parts()
    for c in range(3):
        mine = keys[0, 0, bucket[0, 0] == c].double()
        assert int(number[0, 0, c]) == len(mine)
        torch.testing.assert_close(mean[0, 0, c].double(), mine.mean(0), atol=1e-4, rtol=0)
        torch.testing.assert_close(variance[0, 0, c].double(), mine.var(0, correction=0), atol=1e-3, rtol=0)


def test_context_is_a_share(file: str) -> None:
    with pytest.raises(ValueError, match=r"context is a share, 0 .* to 1 .*, got 1.5"):
        SAAP(file, context=1.5)


def test_logits_are_those_of_the_plain_network_with_batch_normalisation(tmp_path: Path) -> None:
    nets = []
    for _ in range(H):
        net = nn.Sequential(nn.Linear(D, F), nn.BatchNorm1d(F), nn.ReLU(), nn.Linear(F, C)).eval()
        norm = net[1]
        assert isinstance(norm, nn.BatchNorm1d)
        for parameter in (norm.weight.data, norm.bias.data, norm.running_mean):
            parameter.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        nets.append(net)
    parts: dict[str, list[Tensor]] = {name: [] for name in ("w1", "b1", "w2", "b2")}
    for net in nets:
        scale = net[1].weight / (net[1].running_var + net[1].eps).sqrt()
        folded = scale[:, None] * net[0].weight, scale * (net[0].bias - net[1].running_mean) + net[1].bias
        for name, tensor in zip(parts, (*folded, net[3].weight, net[3].bias), strict=True):
            parts[name].append(tensor.detach())
    classifier = Classifier(**{name: torch.stack(tensors) for name, tensors in parts.items()})
    path = saved(tmp_path / "a", part=Partition(partition(H, D, C).centroids, classifier))
    replay = Replay(SAAP(path))
    t, _ = replay.step()
    query, selector = replay.roped[1][:, :, :, t], replay.selector
    scores = selector.rank(query, replay.cache.positions, selector._parameters(query, G))
    with torch.no_grad():
        plain = torch.stack(
            [net(replay.queries[:, h, :, t].flatten(0, 1)).view(B, G, C) for h, net in enumerate(nets)], 1
        )
    torch.testing.assert_close(scores, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("budget", [17, 33, 61])
def test_a_budget_cuts_the_buckets_that_come_last(file: str, budget: int) -> None:
    replay, free = (Replay(SAAP(file, probes=5, span=8)) for _ in range(2))
    for _ in range(24):
        _, selection = replay.step(budget)
        _, whole = free.step()
        for cut, rows in zip(replay.named(selection), free.named(whole), strict=True):
            assert cut == [head[:budget] for head in rows]


def test_slots_hold_every_choice_and_do_not_depend_on_the_query(file: str) -> None:
    part = Artefact.load(file).layers[LAYER]
    for group in ("softmax", "each"):
        for probes, span in ((1, 4), (4, 16), (C, 1)):
            replay = Replay(KMeans(file, probes=probes, group=group, span=span), seal=64)
            for _ in range(3):
                replay.step()
            selector, step = replay.selector, replay.cache.search.step()
            sizes = torch.stack([torch.bincount(head, minlength=C + 1) for head in selector._stored().flatten(0, 1)])
            sizes = sizes[:, :C].view(B, H, C)
            shapes, most = set(), 0
            for c in range(C):  # a query at each centroid, so that the largest buckets are among those visited
                aim = 50 * part.centroids[:, c]  # [H,D]
                query = ROPE.rotate(aim[None, :, None].expand(B, -1, G, -1), step.positions[:, None, None])
                selection = selector.select(query, step, 10**6)
                shapes.add(tuple(selection.start.shape))
                most = max(most, int(selection.attended.max()))
                visited = (part.centroids @ aim[..., None])[..., 0].topk(probes).indices  # [H,P]
                rows = sizes.gather(2, visited.expand(B, -1, -1)).sum(2)
                assert torch.equal(selection.attended, rows.repeat_interleave(selection.start.shape[1] // H, 1))
            assert len(shapes) == 1
            assert most <= shapes.pop()[-1] * span
            assert selector.select(query, step, 20).start.shape == selector.select(-query, step, 20).start.shape


def test_probes_is_a_knob_that_holds_from_the_next_query_on(file: str) -> None:
    replay = Replay(SAAP(file, probes=1))
    t, few = replay.step()
    query = replay.roped[1][:, :, :, t]
    replay.selector.probes = 100
    every = replay.selector.select(query, replay.cache.search.step(), 10**6)
    assert torch.equal(every.attended, replay.cache.sealed[:, None].expand(-1, H))
    replay.selector.probes = 1
    assert torch.equal(replay.selector.select(query, replay.cache.search.step(), 10**6).rows, few.rows)


@pytest.mark.parametrize("group", ["softmax", "each"])
def test_cost_is_that_of_the_model_and_of_the_table_read(tmp_path: Path, group: str) -> None:
    for classifiers in (H, H * G):
        path = saved(tmp_path / "a", classifiers=classifiers)
        model = {KMeans: C * D, Moments: C * (2 * D + 1), SAAP: (F * D + F + C * F + C) * (classifiers // H)}
        for method, numbers in model.items():
            replay = Replay(method(path, probes=5, group=group))
            for _ in range(50):
                _, selection = replay.step()
            visits = 5 * replay.selector.edges.rows * (G if group == "each" else 1)
            assert selection.scanned is not None
            assert selection.scan_bytes is not None
            assert selection.scanned.unique().tolist() == [C]
            assert selection.scan_bytes.unique().tolist() == [numbers * 4 + visits * 2 * 4]
            assert selection.scanned.shape == selection.start.shape[:2]
            assert selection.scan_bytes.shape == (B, H)


@pytest.mark.slow
def test_segments_join_so_that_they_stay_few_and_rows_seldom_move(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seal, rows = 16, 700
    replay, apart = Replay(SAAP(file, probes=4), 40, rows), Replay(SAAP(file, probes=4), 40, rows)
    moved, append = [], replay.selector.append
    replay.selector.append = lambda shown: moved.append(append(shown)) or moved[-1]  # type: ignore[method-assign]
    each = table._kept
    for t in range(40, rows):
        monkeypatch.setattr(table, "_kept", each)
        chosen = replay.step(200)[1]
        monkeypatch.setattr(table, "_kept", lambda starts, new: (len(starts) - 1, starts[-1]))
        loose = apart.step(200)[1]
        assert replay.selector.edges.rows <= math.log2(t / seal) + 1
        if t % 23 == 0 or t == rows - 1:
            for mine, other in zip(replay.named(chosen), apart.named(loose), strict=True):
                assert [sorted(head) for head in mine] == [sorted(head) for head in other]
            query = replay.roped[1][:, :, :, t]
            torch.testing.assert_close(decode(query, replay.cache, 200), decode(query, apart.cache, 200))
    assert apart.selector.edges.rows > 30
    assert sum(order.shape[2] for order in moved) <= rows * (math.log2(rows / seal) + 1)
    assert max(order.shape[2] for order in moved) > rows / 2, "the longest segments join too"


def test_segments_stay_few_whatever_the_sizes_of_seals() -> None:
    """Sizes that fall slowly, each longer than the next but not than all behind it, and random ones."""
    draw = torch.Generator().manual_seed(0)
    for sizes in (range(60, 0, -1), torch.randint(1, 50, (300,), generator=draw).tolist()):
        starts, moved, least = [0], 0, min(sizes)
        for new in sizes:
            kept, low = table._kept(starts, new)
            end = starts[-1] + new
            moved += end - low
            starts = [*starts[: kept + 1], end]
            segments = [high - low for low, high in itertools.pairwise(starts)]
            assert sum(segments) == end
            assert all(size > sum(segments[i + 1 :]) for i, size in enumerate(segments))
            assert len(segments) <= max(end // least, 1).bit_length()
        assert moved <= end * (math.log2(end / least) + 1)


def test_a_second_batch_of_another_dtype_or_shape_takes_its_own_parameters(file: str) -> None:
    selector = SAAP(file, probes=3).for_layer(LayerContext(LAYER, rope=ROPE))
    cache = KVCache(selector, sink=0, window=0)
    for dtype in (torch.bfloat16, torch.float32):
        queries, keys, values = heads(1, H, G, 40, D, dtype)
        cache.append(keys, values)
        cache.select(queries[:, :, :, -1], None)
        assert selector._here is not None
        classifier = selector._here.partition.classifier
        assert classifier is not None
        assert classifier.w1.dtype == dtype
        cache.reset()
    _, keys, values = heads(1, H + 1, G, 40, D)
    with pytest.raises(ArtefactError, match=f"layer {LAYER} here has {H + 1} of size {D}"):
        cache.append(keys, values)


def test_beams_and_clones_keep_their_buckets(file: str) -> None:
    replay = Replay(SAAP(file, probes=3))
    t, before = replay.step(50)
    twin, query, beams = replay.cache.clone(), replay.roped[1][:, :, :, t], torch.tensor([1, 1, 0])
    replay.cache.reorder(beams)
    after = replay.cache.select(query[beams], 50)
    assert torch.equal(after.rows, before.rows[beams])
    assert torch.equal(twin.select(query, 50).rows, before.rows)


def test_a_prompt_read_from_an_index_file_after_reset_has_slots_of_its_own(file: str, tmp_path: Path) -> None:
    first, second = (heads(1, H, G, rows, D, seed=rows) for rows in (40, 300))
    chosen = []
    for prompts in ((second,), (first, second)):
        cache = KVCache(
            KMeans(file, probes=3).for_layer(LayerContext(LAYER, rope=ROPE)), sink=0, window=0, indexes=tmp_path
        )
        for queries, keys, values in prompts:
            cache.reset()
            cache.append(keys, values)
            selection = cache.select(queries[:, :, :, -1], None)
        chosen.append(selection)
    assert len(list(tmp_path.glob("kmeans-*"))) == 2
    assert torch.equal(chosen[0].start, chosen[1].start)
    assert torch.equal(chosen[0].length, chosen[1].length)


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device, or copies between them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero", "equal"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [SAAP, KMeans, Moments])
def test_select_never_waits_for_the_device(file: str, method: type[Partitioned]) -> None:
    replay = Replay(method(file, probes=3))
    for _ in range(40):
        t, expected = replay.step(100)
    query = replay.roped[1][:, :, :, t]
    with NoSync():
        selection = replay.selector.select(query, replay.cache.search.step(), 100)
    assert torch.equal(selection.rows, expected.rows)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoSync():
        int(selection.start[0, 0, 0])


def test_an_artefact_is_read_once(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, load = [], Artefact.load
    monkeypatch.setattr(Artefact, "load", lambda path: reads.append(path) or load(path))
    selector = make_selector(f"saap:artefact={file},probes=16")
    assert repr(selector) == f"saap:artefact={file},probes=16,group=softmax,span=16,context=0.0"
    assert reads == [], "a spec reads nothing"
    layers = [one.for_layer(LayerContext(i, rope=ROPE)) for one in (selector, KMeans(file)) for i in (LAYER, 5)]
    assert len({id(one.trained()) for one in layers}) == len(reads) == 1  # type: ignore[attr-defined]
    saved(Path(file), part=partition(H, D, C + 1), note="longer")
    assert KMeans(file).for_layer(5).trained().layers[5].centroids.shape[1] == C + 1, "another file by the same name"
    assert len(reads) == 2


def test_an_index_is_not_that_of_another_artefact(file: str, tmp_path: Path) -> None:
    folder = tmp_path / "indexes"
    for _ in range(2):
        Replay(KMeans(file, probes=2), indexes=folder).step()
    assert len(list(folder.iterdir())) == 1
    part = partition(H, D, C, F)
    saved(Path(file), part=Partition(part.centroids.flip(1)), note="another")
    replay = Replay(KMeans(file, probes=2), indexes=folder)
    found = replay.step()[1]
    assert len(list(folder.iterdir())) == 2
    again = Replay(KMeans(file, probes=3), indexes=folder)
    again.selector.probes = 2
    assert torch.equal(again.step()[1].rows, found.rows)
    assert len(list(folder.iterdir())) == 2


def test_what_a_moved_artefact_built_is_found_again(file: str, tmp_path: Path) -> None:
    """By content: index files by what assigns keys, prompt caches by the whole file."""
    moved, folder = shutil.copy(file, tmp_path / "moved.safetensors"), tmp_path / "indexes"
    replays = [Replay(SAAP(str(name), probes=2), indexes=folder) for name in (file, moved)]
    chosen = [replay.step()[1].rows for replay in replays]
    assert torch.equal(*chosen)
    assert len(list(folder.iterdir())) == 1
    replays[0].cache.save(tmp_path / "prompt")
    cache = replays[1].cache
    cache.reset()
    assert cache.load(tmp_path / "prompt").counts == replays[0].cache.counts
    cache.reset()
    saved(Path(moved), note="another")
    with pytest.raises(ValueError, match=r"it is made by saap [0-9a-f]{16}, here it would be saap [0-9a-f]{16}"):
        cache.load(tmp_path / "prompt")


@pytest.mark.parametrize(("name", "kv", "group"), [("reference", 2, 4), ("smollm2", 3, 3)])
def test_the_artefact_that_ships_for_a_layer_is_found_by_its_rope(name: str, kv: int, group: int) -> None:
    """None named: the selector of each layer holds the one for its RoPE, whatever layer was asked for before."""
    rope, other = (Artefact.load(one).ropes[1] for one in (name, {"reference": "smollm2"}.get(name, "reference")))
    queries, keys, values = heads(1, kv, group, 200, 64)
    found = []
    for selector in (Moments(), Moments(name)):
        if selector.artefact == "auto":
            selector.for_layer(LayerContext(1, rope=other))
        here = selector.for_layer(LayerContext(1, rope=rope))
        assert here.trained().meta["heads"] == kv
        cache = KVCache(here, sink=4, window=16, seal=16)
        cache.append(keys, values)
        cache.seal()
        found.append(cache.select(queries[:, :, :, -1], 32).rows)
    assert torch.equal(*found)
    assert repr(Moments()) == "moments:artefact=auto,probes=32,group=softmax,span=16"
    assert Moments().source() != Moments(name).source()
    with pytest.raises(
        ArtefactError, match=r"no artefact that ships \(reference, smollm2\) is for a layer with a RoPE"
    ):
        Moments().for_layer(LayerContext(1, rope=Rope.of(24)))
    with pytest.raises(ValueError, match=r"no fixed RoPE of layer 1 is known here.+artefact=FILE of rows without RoPE"):
        Moments().for_layer(1).append(Rows(keys, values, torch.arange(200)[None]))


def test_a_layer_that_the_artefact_lacks_is_refused_before_any_work(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison over fewer layers, or one that reads all there, would flatter: it says what to do instead."""
    made = synthetic(300, heads=H, group=G, size=D)
    layer = made.layer(0)
    layers = [TraceLayer(i, layer.query, layer.keys, layer.values, layer.scale, ROPE) for i in (LAYER, 3)]
    trace = Trace.build(layers, made.positions, made.meta, "two")
    monkeypatch.setattr(KVCache, "append", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(
        ValueError, match=r"holds layers 2, 5, layer 3 is asked for: leave it out .+dense_layers.+method"
    ):
        evaluate(trace, KMeans(file), 32, last=2)
    monkeypatch.undo()
    assert evaluate(trace, KMeans(file), 32, last=2, layers=[LAYER]).layers == (LAYER,)


def test_bad_artefacts_and_arguments_get_a_sentence(file: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"saap:artefact=/nowhere.*/nowhere is no artefact file"):
        make_selector("saap:artefact=/nowhere")
    for bad, sentence in (
        ({"probes": 0}, "probes is 1 or more buckets, got 0"),
        ({"span": 12}, "span is a power of two .*got 12"),
        ({"group": "most"}, "max, sum, softmax, each, got 'most'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            SAAP(file, **bad)
    (tmp_path / "text").write_text("no artefact")
    with pytest.raises(ValueError, match="damaged or not an artefact"):
        SAAP(str(tmp_path / "text")).for_layer(LayerContext(LAYER, rope=ROPE))

    def shown(selector: Partitioned, kv: int = H, size: int = D, group: int = G) -> None:
        queries, keys, values = heads(1, kv, group, 40, size)
        selector.append(Rows(keys, values, torch.arange(40)[None]))
        selector.select(queries[:, :, :, -1], StepContext(torch.tensor([40]), torch.ones(1, 40, dtype=torch.bool)), 16)

    for act, sentence in (
        (lambda: shown(SAAP(file).for_layer(LayerContext(3, rope=ROPE))), "holds layers 2, 5, layer 3 is asked for"),
        (lambda: shown(SAAP(file).for_layer(LAYER)), "no fixed RoPE of layer 2 is known.*change with the length"),
        (
            lambda: shown(SAAP(file).for_layer(LayerContext(LAYER, rope=Rope.of(24, 500.0)))),
            "trained with a RoPE.*layer 2 here applies",
        ),
        (
            lambda: shown(SAAP(file).for_layer(LayerContext(LAYER, rope=ROPE)), kv=4),
            "for 2 KV heads.*layer 2 here has 4",
        ),
        (lambda: shown(SAAP(file).for_layer(LayerContext(LAYER, rope=ROPE)), size=64), "of size 32, .*of size 64"),
        (lambda: shown(SAAP(file).for_layer(LayerContext(LAYER, rope=ROPE)), group=4), "with 3 query heads.*2 with 4"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act()
    alone = saved(tmp_path / "alone", part=Partition(partition(H, D, C).centroids))
    shown(KMeans(alone).for_layer(LayerContext(LAYER, rope=ROPE)))
    with pytest.raises(ValueError, match=r"no query classifier for layer 2.*use KMeans"):
        shown(SAAP(alone).for_layer(LayerContext(LAYER, rope=ROPE)))
    with pytest.raises(ValueError, match="holds layers 2, 5"):
        Replay(KMeans(file), indexes=tmp_path / "i").selector.for_layer(LayerContext(0, rope=ROPE)).append(
            Rows(*torch.zeros(2, 1, H, 16, D), torch.arange(16)[None])
        )
