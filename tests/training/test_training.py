"""Training SAAP: samples and targets against loops, k-means against scikit-learn, resuming, ranks, and bad input."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from torch import Tensor

pytest.importorskip("faiss")

from typer.testing import CliRunner

from sparseattn.cli.app import app
from sparseattn.core.rope import Rope
from sparseattn.evaluation.builtin_traces import recall_bytes
from sparseattn.reporting import training_tables
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Partition
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace, TraceLayer
from sparseattn.training import Filters, Progress, Recipe, TrainingError, partial, train
from sparseattn.training.classifier import QueryClassifier, clip_each, divergence
from sparseattn.training.examples import examples
from sparseattn.training.fit import Fit, over_distances
from sparseattn.training.kmeans import assign, balance, mean_lengths, repaired, spherical_kmeans
from sparseattn.training.prompts import LEAST, HeadView, TracedPrompt, open_prompts
from sparseattn.training.validation import Held, classifier_scores, held, recovered, symmetric_scores
from sparseattn.utils.locks import locked

HEADS, GROUP, SIZE, TOKENS = 2, 2, 16, 384
FILTERS = Filters(gap=31, near=16)
SMALL: dict[str, Any] = {
    "clusters": 8,
    "hidden": 16,
    "steps": 20,
    "batch": 32,
    "queries": 600,
    "validate": 5,
    "filters": FILTERS,
}
ABLATED = {**SMALL, "steps": 5}


def prompt_trace(number: int, *, layers: int = 1, tokens: int = TOKENS, heads: int = HEADS, **meta: Any) -> Trace:
    """A prompt of the synthetic "model": keys and what queries aim at differ from prompt to prompt."""
    made = synthetic(tokens, heads, GROUP, SIZE, layers=layers, clusters=16, rope=True, sinks=1, seed=number)
    known = {"model": "toy", "config_hash": "c0", "tokens_sha256": f"prompt {number}", **meta}
    return Trace.build([made.layer(i) for i in made.layers], made.positions, known, f"prompt-{number}")


def write(folder: Path, count: int = 3, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        prompt_trace(number, **options).save(folder / f"{number}.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("traces"), layers=2)


def view(number: int = 0, roped: bool = False, head: int = 1) -> HeadView:
    trace = prompt_trace(number)
    layer = trace.layer(0)
    assert layer.rope is not None
    rope = None if roped else layer.rope
    keys = layer.keys[head]
    inputs = keys if rope is None else rope.unrotate(keys, trace.positions)
    return HeadView(keys, inputs, layer.query[head], trace.positions, layer.scale, rope)


def mass_by_loop(at: HeadView, member: int, row: int, assigned: Tensor, buckets: int, filters: Filters) -> list[float]:
    """The share of the attention to far keys in each bucket, key by key."""
    weights = [0.0] * buckets
    q = at.query[member, row].double()
    for key in range(filters.sink, len(at.positions)):
        distance = int(at.positions[row] - at.positions[key])
        if (abs(distance) if filters.two_sided else distance) > filters.gap:
            weights[int(assigned[key])] += torch.exp(at.scale * q @ at.keys[key].double()).item()
    return [weight / sum(weights) for weight in weights]


def passes_by_loop(at: HeadView, member: int, row: int, filters: Filters) -> bool:
    scores = {key: float(at.query[member, row] @ at.keys[key]) for key in range(filters.sink, row + 1)}
    best = max(scores, key=scores.__getitem__)
    return int(at.positions[row] - at.positions[best]) >= filters.near


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("roped", [False, True])
def test_examples_are_those_of_a_loop(two_sided: bool, roped: bool) -> None:
    at = view(roped=roped)
    filters = Filters(gap=40, near=25, sink=3, two_sided=two_sided)
    assigned = torch.arange(TOKENS) * 7 % 5
    got = examples(at, [0, 1], assigned, 5, filters, 64, torch.Generator().manual_seed(1))
    assert len(got.queries) == 64
    assert got.seen >= got.passed >= 64
    by_input = {}
    for member in range(GROUP):
        for row in range(TOKENS):
            roped_q, inputs = at.queries(torch.tensor([member]), torch.tensor([row]))
            by_input[tuple(inputs[0].tolist())] = (member, row)
            if roped:
                assert roped_q is inputs
    places = [by_input[tuple(query.tolist())] for query in got.queries]
    assert len(set(places)) == 64  # without replacement
    assert {member for member, _ in places} == {0, 1}
    for (member, row), target in zip(places, got.target.tolist(), strict=True):
        assert passes_by_loop(at, member, row, filters)
        assert target == pytest.approx(mass_by_loop(at, member, row, assigned, 5, filters), abs=1e-5)
    if two_sided:
        assert min(row for _, row in places) < 43  # these see later keys alone


def test_share_that_passes_is_that_of_a_loop() -> None:
    at = view()
    filters = Filters(gap=31, near=64)
    every = examples(at, [0], torch.zeros(TOKENS, dtype=torch.long), 2, filters, TOKENS, torch.Generator())
    rows = range(filters.gap + 1 + filters.sink, TOKENS)
    passing = [row for row in rows if passes_by_loop(at, 0, row, filters)]
    assert (every.passed, every.seen) == (len(passing), len(rows))
    assert 0 < every.passed < every.seen


def test_heads_that_look_nearby_give_the_queries_that_look_farthest() -> None:
    at = view()
    distances = at.positions[:, None] - at.positions
    near = torch.where((distances >= 0) & (distances < 4), 50.0, 0.0)  # as if by a head that reads the last 4 tokens
    keys = torch.eye(TOKENS)
    wide = HeadView(keys, keys, (near + torch.rand(TOKENS, TOKENS))[None], at.positions, 1.0, None)
    got = examples(wide, [0], torch.arange(TOKENS) % 3, 3, Filters(gap=31, near=16), 50, torch.Generator())
    assert got.passed == 0
    assert len(got.queries) == LEAST


def test_targets_over_sampled_keys() -> None:
    at = view()
    assigned = torch.arange(TOKENS) % 4
    whole, part = (
        examples(at, [0], assigned, 4, FILTERS, 40, torch.Generator().manual_seed(2), keys)
        for keys in (None, TOKENS // 2)
    )
    assert whole.target.shape == part.target.shape
    assert not torch.allclose(whole.target, part.target)
    torch.testing.assert_close(part.target.sum(-1), torch.ones(40))


def held_by_loop(at: HeadView, rows: Tensor, assigned: Tensor, buckets: int, share: float) -> tuple[Tensor, ...]:
    mass, far, exact = (torch.zeros(GROUP, len(rows), *more) for more in ((buckets,), (), ()))
    for g in range(GROUP):
        for v, row in enumerate(rows.tolist()):
            weights = (at.scale * at.query[g, row] @ at.keys[: row + 1].T).softmax(-1)
            seen = range(FILTERS.sink, row - FILTERS.gap)
            far[g, v] = sum(weights[key] for key in seen)
            for key in seen:
                mass[g, v, assigned[key]] += weights[key] / far[g, v]
            exact[g, v] = weights[list(seen)].sort(descending=True).values[: int((row + 1) * share)].sum() / far[g, v]
    return mass, far, exact


def test_validation_is_that_of_a_loop() -> None:
    at = view()
    assigned = torch.arange(TOKENS) * 3 % 8
    rows = torch.tensor([100, 200, 383])
    got = held(at, rows, assigned, 8, FILTERS, (0.02, 0.1))
    mass, far, exact = held_by_loop(at, rows, assigned, 8, 0.1)
    torch.testing.assert_close(got.mass, mass, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.far, far, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.exact[..., 1], exact, rtol=1e-4, atol=1e-5)
    assert got.rows.tolist() == [[2, 10], [4, 20], [7, 38]]
    assert got.sizes.sum(-1).tolist() == [100 - 31 - 1, 200 - 31 - 1, 383 - 31 - 1]
    # Buckets in the order of any scores, row by row until the budget is spent; the last one in proportion.
    scores = torch.rand(1, 3, 8)
    joined = Held(*(getattr(got, name)[None] for name in ("queries", "mass", "sizes")), got.rows, got.far, got.exact)
    found = recovered(scores, joined)
    for v in range(3):
        for s in range(2):
            left, total = float(got.rows[v, s]), torch.zeros(GROUP)
            for bucket in scores[0, v].argsort(descending=True).tolist():
                size = float(got.sizes[v, bucket])
                total += got.mass[:, v, bucket] * min(1.0, left / size)
                left = max(0.0, left - size)
            torch.testing.assert_close(found[0, :, v, s], total)


def test_kmeans_is_as_good_as_scikit_learns() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    keys = torch.nn.functional.normalize(view().inputs[1:].repeat(4, 1) + 0.3 * torch.randn(4 * (TOKENS - 1), SIZE))
    ours = spherical_kmeans(keys, 24, seed=3)
    theirs = cluster.MiniBatchKMeans(24, n_init=5, batch_size=512, max_iter=200, random_state=0).fit(keys.numpy())
    centroids = torch.nn.functional.normalize(torch.from_numpy(theirs.cluster_centers_).float())
    torch.testing.assert_close(ours.norm(dim=-1), torch.ones(24))
    assert balance(keys, ours).inertia < 1.02 * balance(keys, centroids).inertia
    assert balance(keys, ours).empty == 0


def test_kmeans_takes_keys_by_direction_alone() -> None:
    keys = torch.randn(300, SIZE)
    one, other = (
        spherical_kmeans(keys, 8, seed=1),
        spherical_kmeans(keys * torch.rand(300, 1) * 9 + 0 * keys, 8, seed=1),
    )
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_balance_of_known_clusters() -> None:
    centroids = torch.eye(4)[:3]
    figures = balance(torch.eye(4)[[0, 0, 0, 1]] * 5, centroids)
    assert (figures.inertia, figures.imbalance, figures.largest, figures.empty) == (0, 3 * 10 / 16, 0.75, 1)


def test_empty_clusters_are_filled() -> None:
    keys = torch.nn.functional.normalize(torch.randn(100, SIZE))
    dead = torch.cat([keys[:1], -keys.mean(0, keepdim=True).expand(5, -1)])
    assert balance(keys, torch.nn.functional.normalize(dead)).empty >= 2
    assert balance(keys, repaired(keys, torch.nn.functional.normalize(dead))).empty == 0
    same = keys[:1].expand(50, -1)
    assert balance(same, repaired(same, keys[:4])).empty == 3  # one direction has one cluster


def test_too_few_keys_for_the_clusters() -> None:
    with pytest.raises(TrainingError, match="9 clusters are more than the 8 keys to find them in"):
        spherical_kmeans(torch.randn(8, SIZE), 9)


def places(count: int) -> list[tuple[int | str, ...]]:
    return [(0, 0, head, "0-1") for head in range(count)]


@pytest.mark.parametrize("residual", [False, True])
def test_folding_keeps_what_it_computes(residual: bool) -> None:
    model = QueryClassifier(places(3), SIZE, 12, 7, torch.randn(3, 7, SIZE) if residual else None)
    model.w2.data.normal_()
    model.gamma.data.uniform_(0.5, 2)
    model.beta.data.normal_()
    for _ in range(5):
        model(torch.randn(3, 40, SIZE) * 3 + 1)
    model.eval()
    queries = torch.randn(3, 9, SIZE)
    torch.testing.assert_close(model.folded().logits(queries), model(queries), rtol=1e-5, atol=1e-5)


def test_each_head_is_torchs_own_stack() -> None:
    model = QueryClassifier(places(3), SIZE, 12, 7)
    queries = torch.randn(3, 40, SIZE) * 2 + 1
    for head in range(3):
        own = torch.nn.Sequential(
            torch.nn.Linear(SIZE, 12, bias=False), torch.nn.BatchNorm1d(12), torch.nn.ReLU(), torch.nn.Linear(12, 7)
        )
        own[0].weight.data.copy_(model.w1[head])
        own[3].weight.data.copy_(model.w2[head])
        own[3].bias.data.copy_(model.b2[head])
        alone = QueryClassifier(places(3), SIZE, 12, 7)
        torch.testing.assert_close(alone(queries)[head], own(queries[head]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(alone.mean[head], own[1].running_mean)
        torch.testing.assert_close(alone.variance[head], own[1].running_var)
        own.eval()
        torch.testing.assert_close(alone.eval()(queries)[head], own(queries[head]), rtol=1e-4, atol=1e-5)


def test_the_linear_path_begins_as_symmetric_kmeans() -> None:
    keys = view().inputs[1:]
    centroids = spherical_kmeans(keys, 8)
    member, total = assign(keys, centroids), torch.zeros(8)
    for key, bucket in zip(keys, member.tolist(), strict=True):
        total[bucket] += key.norm()
    lengths = mean_lengths(keys, centroids)
    torch.testing.assert_close(lengths, total / torch.bincount(member, minlength=8))
    model = QueryClassifier(places(1), SIZE, 12, 8, (0.25 * lengths[:, None] * centroids)[None])
    query = torch.randn(1, 5, SIZE)
    expected = 0.25 * query @ (lengths[:, None] * centroids).T
    torch.testing.assert_close(model.eval()(query), expected)


def test_the_linear_path_averages_over_distances() -> None:
    rope = Rope(Rope.of(SIZE).inv_freq, scaling=1.3)
    keys, query, distances = torch.randn(2, 5, SIZE), torch.randn(1, SIZE), torch.tensor([3.0, 70.0, 411.0])
    expected = torch.zeros(2, 5)
    for distance in distances.tolist():
        turned = rope.rotate(keys, torch.full((5,), 500 - distance))
        expected += (turned @ rope.rotate(query, torch.tensor([500.0])).T)[..., 0] / 3
    torch.testing.assert_close(over_distances(keys, rope, distances) @ query[0], expected, rtol=1e-3, atol=1e-3)
    assert over_distances(keys, None, distances) is keys


def test_loss_in_both_directions() -> None:
    logits, target = torch.randn(2, 5, 4), torch.rand(2, 5, 4).softmax(-1)
    f = logits.softmax(-1)
    torch.testing.assert_close(divergence(logits, target), (target * (target / f).log()).sum(-1).mean(-1))
    torch.testing.assert_close(
        divergence(logits, target, reverse=True), (f * (f / target).log()).sum(-1).mean(-1), rtol=1e-2, atol=1e-3
    )
    hard = torch.nn.functional.one_hot(torch.zeros(2, 5, dtype=torch.long), 4).float()
    for reverse in (False, True):
        assert divergence(logits, hard, reverse).isfinite().all()


def test_gradients_are_clipped_by_head() -> None:
    one, two = (torch.nn.Parameter(torch.zeros(2, n)) for n in (3, 1))
    one.grad, two.grad = torch.tensor([[3.0, 0, 0], [0.1, 0, 0]]), torch.tensor([[4.0], [0.0]])
    clip_each([one, two])
    torch.testing.assert_close(one.grad, torch.tensor([[0.6, 0, 0], [0.1, 0, 0]]))
    torch.testing.assert_close(two.grad, torch.tensor([[0.8], [0.0]]))


def tensors_of(artefact: Artefact) -> dict[str, Tensor]:
    out = {}
    for index, partition in artefact.layers.items():
        out[f"{index}.centroids"] = partition.centroids
        if partition.classifier is not None:
            out |= {f"{index}.{name}": tensor for name, tensor in partition.classifier.tensors().items()}
    return out


def same_weights(one: Artefact, other: Artefact, atol: float = 1e-5) -> None:
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_end_to_end_and_what_the_artefact_says(folder: Path, tmp_path: Path) -> None:
    seen = []
    artefact = train([folder], tmp_path / "a.safetensors", Recipe(**{**SMALL, "steps": 150}), progress=seen.append)
    assert artefact is not None
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    assert {at.stage for at in seen} == {"k-means", "targets", "classifier"}
    assert tuple(artefact.layers) == (0, 1)
    meta = artefact.meta
    assert (meta["model"], meta["config_hash"], meta["heads"], meta["group"], meta["size"]) == ("toy", "c0", 2, 2, 16)
    assert meta["recipe"]["clusters"] == 8
    assert [p["name"] for p in meta["train"] + meta["held_out"]] != []
    assert len(meta["held_out"]) == 1
    assert {p["sha256"] for p in meta["train"] + meta["held_out"]} == {f"prompt {i}" for i in range(3)}
    for one in meta["validation"]:
        mean = {name: sum(curve["0.05"]) / GROUP for name, curve in one["recovered"].items()}
        assert mean["classifier"] <= mean["exact"] + 1e-6
        assert set(one["seconds"]) == {"kmeans", "targets", "classifier"}
    trace = prompt_trace(1)
    artefact.check(0, HEADS, GROUP, SIZE, trace.layer(0).rope)


def test_the_classifier_learns(tmp_path: Path) -> None:
    """Same keys and same aims in every prompt, in another order: what can be learned is learned."""
    base = prompt_trace(0, tokens=768)
    layer = base.layer(0)
    assert layer.rope is not None
    keys, queries = layer.rope.unrotate(layer.keys, base.positions), layer.rope.unrotate(layer.query, base.positions)
    for number in range(4):
        order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(767)])
        turned = TraceLayer(
            0,
            layer.rope.rotate(queries[:, :, order], base.positions),
            layer.rope.rotate(keys[:, order], base.positions),
            layer.values[:, order],
            layer.scale,
            layer.rope,
        )
        meta = {"model": "toy", "tokens_sha256": str(number)}
        Trace.build([turned], base.positions, meta).save(tmp_path / f"{number}.safetensors")
    recipe = Recipe(**{**SMALL, "hidden": 64, "steps": 300, "queries": 3000, "validate": 50, "rate": 3e-3})
    artefact = train([tmp_path], tmp_path / "a.safetensors", recipe)
    assert artefact is not None
    for one in artefact.meta["validation"]:
        mean = {name: sum(curve["0.05"]) / GROUP for name, curve in one["recovered"].items()}
        assert mean["classifier"] > 1.2 * mean["symmetric"]
        assert mean["classifier"] > 0.8 * mean["oracle"]


@pytest.fixture(scope="module")
def unchanged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Artefact:
    """What the recipe of the ablations makes of layer 1 where none of it is changed."""
    found = train([folder], tmp_path_factory.mktemp("unchanged") / "b.safetensors", Recipe(**ABLATED), layers=[1])
    assert found is not None
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"roped": True},
        {"residual": True},
        {"per_query_head": True},
        {"symmetric": True},
        {"reverse": True},
        {"keys": 100},
        {"filters": Filters(gap=0, near=0)},
        {"filters": Filters(gap=31, near=16, two_sided=True)},
    ],
    ids=str,
)
def test_ablations(options: dict[str, Any], folder: Path, tmp_path: Path, unchanged: Artefact) -> None:
    artefact = train([folder], tmp_path / "a.safetensors", Recipe(**{**ABLATED, **options}), layers=[1])
    assert artefact is not None
    partition = artefact.layers[1]
    assert artefact.roped == (options.get("roped") is True)
    assert (partition.classifier is None) == ("symmetric" in options)
    if partition.classifier is not None:
        assert len(partition.classifier.w1) == (HEADS * GROUP if "per_query_head" in options else HEADS)
        assert (partition.classifier.skip is not None) == ("residual" in options)
        assert unchanged.layers[1].classifier is not None
        if "per_query_head" not in options:
            assert not partition.classifier.w2.equal(unchanged.layers[1].classifier.w2)
        queries = torch.randn(HEADS, GROUP, 3, SIZE)
        scores = classifier_scores(partition.classifier, queries)
        torch.testing.assert_close(scores.sum(-1), torch.full((HEADS, 3), float(GROUP)))
        if "per_query_head" in options:
            alone = partition.classifier.logits(queries.flatten(0, 1)).softmax(-1)
            torch.testing.assert_close(scores[1], alone[GROUP : 2 * GROUP].sum(0))
    assert symmetric_scores(torch.randn(HEADS, GROUP, 3, SIZE), partition.centroids, 0.25).shape == (HEADS, 3, 8)


def test_early_stop_keeps_the_best(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**SMALL, "steps": 500, "rate": 0.5, "patience": 2})
    artefact = train([folder], tmp_path / "a.safetensors", recipe, layers=[0])
    assert artefact is not None
    for one in artefact.meta["validation"]:
        assert one["best_step"] == one["steps"] - 2 * recipe.validate < 500


def test_a_head_that_diverges_is_said(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**SMALL, "rate": 1e6})
    words = (
        r"^layer 0, head 0 diverged: after 5 steps its loss on held-out tokens is nan; lower --rate \(given 1e\+06\)"
    )
    for _ in range(2):
        with pytest.raises(TrainingError, match=words):
            train([folder], tmp_path / "a.safetensors", recipe)


def test_a_head_that_diverges_later_keeps_what_it_had(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Fit.advance

    def diverging(self: Fit) -> Tensor:
        loss = advance(self)
        if self.step > 5:
            self.model.load_state_dict({name: part * torch.nan for name, part in self.model.state_dict().items()})
        return loss

    monkeypatch.setattr(Fit, "advance", diverging)
    artefact = train([folder], tmp_path / "a.safetensors", Recipe(**SMALL), layers=[0])
    assert artefact is not None
    assert [head["best_step"] for head in artefact.meta["validation"]] == [5, 5]


def test_a_state_says_finite_numbers(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"x\.safetensors cannot be written: of\[1\]\.kept is nan, and a finite"):
        partial.Partial.write(tmp_path / "x.safetensors", {}, {"of": [1.0, {"kept": math.nan}]})
    assert not list(tmp_path.iterdir())


def test_one_layer_of_one_prompt_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are loaded die before the next one is, and samples do not grow with the number of prompts."""
    real, loads, most = Trace.layer, [], []
    alive: list[Any] = []

    def layer(self: Trace, index: int) -> TraceLayer:
        alive[:] = [ref for ref in alive if ref() is not None]
        found = real(self, index)
        alive.append(weakref.ref(found))
        most.append(len(alive))
        loads.append(index)
        return found

    monkeypatch.setattr(Trace, "layer", layer)
    sizes = []
    real_run = torch.optim.AdamW.__init__

    for count in (3, 9):
        part = write(tmp_path / str(count), count, layers=2)
        for noted in (loads, alive, most):  # writing them loaded layers as well
            noted.clear()
        pools: list[int] = []

        def init(self: Any, *args: Any, pools: list[int] = pools, **options: Any) -> None:
            frame = sys._getframe(1)
            pools.append(frame.f_locals["pool"].queries.numel())
            real_run(self, *args, **options)

        monkeypatch.setattr(torch.optim.AdamW, "__init__", init)
        train([part], tmp_path / f"{count}.safetensors", Recipe(**{**SMALL, "steps": 1, "queries": 72, "sample": 72}))
        sizes.append(pools)
        held = max(1, count // 5)
        assert len(loads) == 2 * (2 * (count - held) + held), "twice a training prompt, once a held-out one"
        assert max(most) == 1
    assert sizes[0] == sizes[1]


def command(folder: Path, out: Path, *options: str) -> list[str]:
    small = ["--clusters", "8", "--hidden", "16", "--batch", "64", "--queries", "600", "--gap", "31", "--near", "16"]
    small += ["--dtype", "float32", "--device", "cpu"]
    return [sys.executable, "-m", "sparseattn", "train", str(folder), "--out", str(out), *small, *options]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "passive"}


def test_a_second_run_to_a_file_says_who_holds_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    with locked(tmp_path / ".a.safetensors.lock", "it"):
        done = CliRunner().invoke(app, command(folder, out)[3:])
    assert done.exit_code == 2
    assert f"--out {out} is in use by process {os.getpid()}" in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_killed_and_resumed(folder: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of the classifier, twice; the weights are those of a run that was not disturbed."""
    options = ("--steps", "400", "--validate", "100", "--save-every", "10", "--patience", "100")
    out = tmp_path / "killed.safetensors"
    partial = Path(f"{out}.partial")
    for wanted in ("layer-0.heads-0-1.state.safetensors", "layer-1.heads-0-1.state.safetensors"):
        process = subprocess.Popen(command(folder, out, *options), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 120
            while not (partial / wanted).exists():
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
        assert not out.exists()
    assert (partial / "layer-0.head-1.safetensors").exists()
    done = subprocess.run(command(folder, out, *options, "--json"), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["artefact"] == str(out)
    assert not partial.exists()
    recipe = Recipe(**{**SMALL, "batch": 64, "steps": 400, "validate": 100, "patience": 100})
    whole = train([folder], tmp_path / "whole.safetensors", recipe, device="cpu")
    assert whole is not None
    assert Artefact.load(out).meta["recipe"] == whole.meta["recipe"]
    same_weights(Artefact.load(out), whole)


@pytest.mark.slow
def test_two_ranks(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "ranks.safetensors"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    options = ("--steps", "60", "--validate", "20")
    done = subprocess.run(
        run + command(folder, out, *options)[2:], env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert not Path(f"{out}.partial").exists()
    alone = train(
        [folder], tmp_path / "alone.safetensors", Recipe(**{**SMALL, "batch": 64, "steps": 60, "validate": 20})
    )
    assert alone is not None
    same_weights(Artefact.load(out), alone)


def test_ranks_one_after_the_other(folder: Path, tmp_path: Path) -> None:
    """The split itself, without processes: rank 1 does its heads, rank 0 the rest and the artefact."""
    recipe = Recipe(**{**SMALL, "steps": 40})
    out = tmp_path / "a.safetensors"
    assert train([folder], out, recipe, rank=1, ranks=2) is None
    split = train([folder], out, recipe, rank=0, ranks=2)
    whole = train([folder], tmp_path / "b.safetensors", recipe)
    assert split is not None
    assert whole is not None
    same_weights(split, whole)


def test_a_partial_run_of_another_recipe(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.safetensors"
    recipe = Recipe(**SMALL)
    assert train([folder], out, recipe, rank=1, ranks=2) is None
    with pytest.raises(TrainingError, match=r"a.safetensors.partial is a run of other traces, options or versions"):
        train([folder], out, Recipe(**{**SMALL, "seed": 1}))
    finished = Path(f"{out}.partial") / "layer-0.head-1.safetensors"
    whole = finished.read_bytes()
    for part in (b"", whole[:200], whole[:-1]):
        finished.write_bytes(part)
        with pytest.raises(TrainingError, match=r"layer-0.head-1.safetensors is damaged; delete it"):
            train([folder], out, recipe)
    assert not out.exists()
    finished.unlink()
    assert train([folder], out, recipe) is not None


def edited(trace: Trace, **changes: Any) -> Trace:
    layer = trace.layer(0)
    values = {name: getattr(layer, name) for name in ("index", "query", "keys", "values", "scale", "rope", "window")}
    meta = changes.pop("meta", trace.meta)
    positions = changes.pop("positions", trace.positions)
    return Trace.build([TraceLayer(**{**values, **changes})], positions, meta, trace.name)


def last_queries(trace: Trace) -> Trace:
    return edited(trace, query=trace.layer(0).query[:, :, -8:])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: edited(t, meta={**t.meta, "config_hash": "c1"}), "are of different models: config_hash c0 and c1"),
        (lambda t: edited(t, meta={"model": "x"}), "are of different models: config_hash c0 and None"),
        (lambda t: prompt_trace(1, heads=3), r"has heads, group, size, .+ \(2, 2, 16, .+\) in .+, \(3, 2, 16, .+\) in"),
        (
            lambda t: prompt_trace(1, tokens=40),
            "of its 40 tokens 7 have a key 32 or more before them, the first 1",
        ),
        (last_queries, "is too short: of its 384 tokens 8 have a key 32 or more"),
        (lambda t: edited(t, meta={**t.meta, "tokens_sha256": "prompt 0"}), "are of the same prompt"),
        (lambda t: edited(t, positions=t.positions.flip(0)), r"the positions of .+ do not ascend"),
        (lambda t: edited(t, rope=Rope.of(SIZE)), "layer 0 of .+ has another RoPE than"),
        (lambda t: edited(t, rope=None), "layer 0 of .+ has another RoPE than"),
    ],
)
def test_traces_that_do_not_belong_together(change: Callable[[Trace], Trace], sentence: str, tmp_path: Path) -> None:
    source = write(tmp_path / "t", 1)
    change(prompt_trace(1)).save(source / "1.safetensors")
    with pytest.raises(TrainingError, match=sentence):
        train([source], tmp_path / "a.safetensors", Recipe(**SMALL), held_out=[])
    assert [path.name for path in tmp_path.iterdir()] == ["t"], "nothing was begun"


@pytest.mark.parametrize("name", ["query", "keys"])
def test_numbers_that_are_not_finite(name: str, tmp_path: Path) -> None:
    source = write(tmp_path / "t", 2)
    for path in source.iterdir():
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        del metadata["hashes"]  # as of an earlier release: they would meet it first
        tensors = load_file(path)
        tensors[f"layers.0.{name}"].view(-1)[77] = torch.nan
        save_file(tensors, path, metadata)
    unhashed = pytest.warns(UserWarning, match="^2 of 2 traces carry no hash of their tensors")
    with unhashed, pytest.raises(TrainingError, match=rf"layer 0 of .+ has {name} that are not finite"):
        train([source], tmp_path / "a.safetensors", Recipe(**SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_run_killed_while_its_files_go_is_done(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left of the folder, the same command makes the same artefact anew."""
    out, recipe, real = tmp_path / "a.safetensors", Recipe(**{**SMALL, "steps": 2}), shutil.rmtree

    def cut_short(path: Path, **options: Any) -> None:
        if path.exists():
            next(path.glob("run.json")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            train([folder], out, recipe)
    first = Artefact.load(out)
    again = train([folder], out, recipe)
    assert again is not None
    same_weights(again, first)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]
    assert shutil.rmtree is real


def test_a_rope_that_cannot_be_taken_back(tmp_path: Path) -> None:
    source = write(tmp_path / "t", 0)
    reason = "the rotary embedding given to the layer changed with the length"
    for number in range(2):
        trace = prompt_trace(number, rope_absent={"0": reason})
        edited(trace, rope=None).save(source / f"{number}.safetensors")
    with pytest.raises(TrainingError, match=rf"RoPE of layer 0 of .+ cannot be taken back \({reason}\): leave the"):
        train([source], tmp_path / "a.safetensors", Recipe(**SMALL))
    artefact = train([source], tmp_path / "a.safetensors", Recipe(**{**SMALL, "roped": True, "steps": 2}))
    assert artefact is not None
    artefact.check(0, HEADS, GROUP, SIZE, None)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"clusters": 1}, "clusters is at least 2, got 1"),
        ({"steps": 0}, "steps is at least 1, got 0"),
        ({"rate": 0.0}, "the learning rate is positive"),
        ({"shares": (0.5, 1.5)}, "shares of the context between 0 and 1"),
        ({"clusters": 800}, "800 clusters are more than the 766 keys of a head that 2 prompts to train on give$"),
        ({"sample": 4}, "8 clusters are more than the 4 keys of .+ give with sample=4"),
        ({"filters": Filters(31, 1000, 1)}, "is too short: of its 384 tokens 0 have a key 1000 or more before them"),
        ({"symmetric": True, "reverse": True}, "symmetric k-means has no classifier, so residual, per_query_head and"),
    ],
)
def test_recipes_that_are_refused(options: dict[str, Any], sentence: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=sentence):
        train([folder], tmp_path / "a.safetensors", Recipe(**{**SMALL, **options}))
    assert not list(tmp_path.iterdir())


def test_paths_and_layers_that_are_refused(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(**SMALL)
    out = tmp_path / "a.safetensors"
    one = folder / "0.safetensors"
    with pytest.raises(TrainingError, match="at least 2 prompts, one of which is held out for validation, got 1"):
        train([one], out, recipe)
    with pytest.raises(TrainingError, match="are of the same prompt; give each prompt once"):
        train([folder, one], out, recipe)
    with pytest.raises(TrainingError, match=r"holds no .+ trace"):
        train([tmp_path], out, recipe)
    with pytest.raises(TrainingError, match=r"an artefact is a \.safetensors file"):
        train([folder], tmp_path / "a.bin", recipe)
    with pytest.raises(TrainingError, match="is in a folder that does not exist"):
        train([folder], tmp_path / "no" / "a.safetensors", recipe)
    with pytest.raises(TrainingError, match="holds layers 0, 1, not 7"):
        train([folder], out, recipe, layers=[7])
    with pytest.raises(TrainingError, match="one or more different indices"):
        train([folder], out, recipe, layers=[])
    with pytest.raises(TrainingError, match=r"stored as float32, float16 or bfloat16, got torch\.int8"):
        train([folder], out, recipe, dtype=torch.int8)
    with pytest.raises(TrainingError, match="gap, near and sink are 0 or more"):
        Filters(gap=-1)
    assert not list(tmp_path.iterdir())


def test_sliding_layers_are_left_out(tmp_path: Path) -> None:
    source = write(tmp_path / "t", 0)
    for number in range(2):
        trace = prompt_trace(number, layers=2)
        slides = edited(trace, window=20).layer(0)
        Trace.build([slides, trace.layer(1)], trace.positions, trace.meta).save(source / f"{number}.safetensors")
    artefact = train([source], tmp_path / "a.safetensors", Recipe(**{**SMALL, "steps": 2}))
    assert artefact is not None
    assert tuple(artefact.layers) == (1,)
    with pytest.raises(TrainingError, match=r"layer 0 of .+ attends to a sliding window of 20 rows"):
        train([source], tmp_path / "b.safetensors", Recipe(**SMALL), layers=[0])


def test_clusters_by_the_shortest_prompt(folder: Path, tmp_path: Path) -> None:
    artefact = train([folder], tmp_path / "a.safetensors", Recipe(**{**SMALL, "clusters": None, "steps": 1}))
    assert artefact is not None
    assert artefact.meta["recipe"]["clusters"] == 8  # 384 / 32 = 12


def test_held_out_traces_by_name(folder: Path, tmp_path: Path) -> None:
    files = [folder / f"{i}.safetensors" for i in range(3)]
    recipe = Recipe(**{**SMALL, "steps": 1})
    artefact = train(files[:2], tmp_path / "a.safetensors", recipe, held_out=files[2:])
    assert artefact is not None
    assert [p["sha256"] for p in artefact.meta["held_out"]] == ["prompt 2"]


def test_the_command(folder: Path, tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "a.safetensors"
    done = runner.invoke(app, [*command(folder, out, "--steps", "5", "--layers", "1")[3:]])
    assert done.exit_code == 0, done.output
    assert "recovered on held-out prompts" in " ".join(done.output.split())
    assert "…" not in done.output
    assert "layers 1, 8 buckets" in done.output
    assert Artefact.load(out).layers.keys() == {1}
    for options, sentence in (
        (("--dtype", "int8"), "'int8' is not one of 'float32'"),
        (("--save-every", "0"), "--save-every must be 1 or more, got 0"),
        (("--shares", "a"), "--shares takes numbers separated by commas, got 'a'"),
        (("--device", "nowhere"), "device nowhere is not a torch device"),
        (("--layers", "9"), "holds layers 0, 1, not 9"),
        (("--gap", "1000"), "is too short"),
    ):
        refused = runner.invoke(app, command(folder, out, *options)[3:])
        assert refused.exit_code == 2, refused.output
        assert sentence in refused.stderr.replace("\n", " "), refused.stderr


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mps", "device mps: torch sees no MPS device here"),
        ("xpu", "device xpu: torch sees no XPU device here"),
        ("cuda", "device cuda: torch sees no CUDA device here"),
        ("cuda:3", "device cuda:3: torch sees no CUDA device here"),
        ("meta", "device meta holds shapes without numbers: nothing can be computed there"),
        ("nowhere", "device nowhere is not a torch device, such as cpu or cuda"),
    ],
)
def test_devices_that_are_not_here(
    name: str, sentence: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    refused = CliRunner().invoke(app, command(folder, tmp_path / "a.safetensors", "--device", name)[3:])
    assert refused.exit_code == 2
    assert refused.stderr.replace("\n", "") == f"sparseattn: {sentence}"
    with pytest.raises(ValueError, match=sentence):
        train([folder], tmp_path / "a.safetensors", Recipe(**SMALL), device=name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_a_folder_to_train_to_is_refused(out: str, folder: Path) -> None:
    refused = CliRunner().invoke(app, command(folder, Path(out))[3:])
    assert refused.exit_code == 2
    assert refused.stderr == f"sparseattn: --out must be a .safetensors file, got {out}\n"


def test_what_a_file_says_is_printed_as_text() -> None:
    artefact = Artefact({0: Partition(torch.eye(4)[None])}, roped=True)
    named = {"layer": "\x1b[2J7", "head": "[red]1[/red]", "far_mass": [0.5], "train": {"imbalance": 1.0}}
    artefact.meta |= {"recipe": {"shares": [0.05]}, "validation": [{**named, "recovered": {"exact": {"0.05": [1.0]}}}]}
    screen = Screen(width=80)
    with screen.capture() as shown:
        screen.print(training_tables.validation(artefact))
    assert "\x1b" not in shown.get()
    assert "[2J7" in shown.get()
    assert "[red]1[/red]" in shown.get()


def test_a_name_in_brackets_is_printed_whole(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "[red]a.safetensors"
    done = CliRunner().invoke(app, command(folder, out, "--steps", "1", "--layers", "0")[3:])
    assert done.exit_code == 0, done.output
    assert "[red]a.safetensors: layers 0" in done.output.replace("\n", "")


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No room for the file `name`; as the system has it, the error is of the file that was to become it."""
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize(
    ("full", "named", "left"),
    [
        ("run.json", "a.safetensors.partial", False),
        ("layer-0.head-0.centroids.safetensors", None, False),
        ("layer-0.heads-0-1.state.safetensors", None, True),
        ("layer-0.head-1.safetensors", None, True),
        ("a.safetensors", "a.safetensors", True),
    ],
)
def test_a_full_disk_names_the_file(
    full: str, named: str | None, left: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.safetensors"
    path = tmp_path / (named or f"a.safetensors.partial/{full}")
    options = {"layers": [0], "save_every": 2}
    with monkeypatch.context() as patch:
        full_disk(patch, full)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))} cannot be written: No space left on device$"):
            train([folder], out, Recipe(**SMALL), **options)
    assert not list(tmp_path.rglob("*.part"))
    assert [one.name for one in tmp_path.iterdir()] == (["a.safetensors.partial"] if left else [])
    seen: list[Progress] = []
    assert train([folder], out, Recipe(**SMALL), **options, progress=seen.append) is not None  # with what there is
    assert {at.stage for at in seen} == (
        set() if full == out.name else {"targets", "classifier"} if left else {"k-means", "targets", "classifier"}
    )


def test_a_run_that_did_nothing_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.safetensors"

    def stop(at: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([folder], out, Recipe(**SMALL), progress=stop)
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "faiss", None)
        with pytest.raises(ImportError, match="the k-means of training is faiss's, which is not installed"):
            train([folder], out, Recipe(**SMALL))
    assert not list(tmp_path.iterdir())


def test_a_partial_run_of_older_states(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, recipe = tmp_path / "a.safetensors", Recipe(**SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(partial, "VERSION", "1")
        assert train([folder], out, recipe, rank=1, ranks=2) is None
    with pytest.raises(TrainingError, match=r"a.safetensors.partial is a run of other traces, options or versions"):
        train([folder], out, recipe)


def test_states_edited_by_hand_are_refused(folder: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "a.safetensors", Recipe(**{**SMALL, "steps": 2})
    assert train([folder], out, recipe, rank=1, ranks=2) is None
    finished = Path(f"{out}.partial") / "layer-0.head-1.safetensors"
    with safe_open(finished, framework="pt") as file:
        metadata = file.metadata()
    facts = json.loads(metadata["facts"]) | {"loss": 0.0}
    save_file(load_file(finished), finished, {**metadata, "facts": json.dumps(facts)})
    with pytest.raises(TrainingError, match=r"layer-0.head-1.safetensors is damaged; delete it"):
        train([folder], out, recipe)


def test_a_trace_that_is_cut_off(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "0.safetensors").read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-10])
    refused = CliRunner().invoke(app, [*command(folder, tmp_path / "a.safetensors")[3:], "--held-out", str(cut)])
    assert refused.exit_code == 2
    assert "cut.safetensors is truncated" in refused.stderr.replace("\n", "")


def test_prompts_are_told_apart_without_a_hash_of_tokens(tmp_path: Path) -> None:
    for seed in range(2):
        synthetic(256, rope=True, seed=seed).save(tmp_path / f"{seed}.safetensors")
    opened = open_prompts([tmp_path], FILTERS)
    assert isinstance(opened.train[0], TracedPrompt)
    assert opened.train[0].sha256 != opened.held_out[0].sha256


def test_prompts_of_the_shipped_artefact() -> None:
    prompts = pytest.importorskip("scripts.saap.prompts")
    numpy = pytest.importorskip("numpy")
    text = numpy.frombuffer(b"Some words, Apache License. " + bytes(range(32, 127)) * 200, dtype=numpy.uint8)
    for make in (prompts.recall, prompts.plain, prompts.mixed):
        one, again, other = (make(numpy.random.default_rng(seed), text) for seed in (1, 1, 2))
        assert len(one) == prompts.TOKENS
        assert one == again != other
        assert prompts.LICENCE not in one.lower()
        assert one != recall_bytes()


@pytest.mark.gpu
def test_a_gpu_trains_as_well(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**SMALL, "steps": 100})
    made = [train([folder], tmp_path / f"{device}.safetensors", recipe, device=device) for device in ("cpu", "cuda")]
    again = train([folder], tmp_path / "again.safetensors", recipe, device="cuda")
    assert made[0] is not None
    assert made[1] is not None
    assert again is not None
    same_weights(made[1], again)
    for one, other in zip(made[0].meta["validation"], made[1].meta["validation"], strict=True):
        for way, curve in one["recovered"].items():
            assert curve["0.05"] == pytest.approx(other["recovered"][way]["0.05"], abs=0.1), way
