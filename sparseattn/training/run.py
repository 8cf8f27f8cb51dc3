"""Fits SAAP to the traces of many prompts and writes the artefact; Saap, https://arxiv.org/abs/2502.08246.

Letters: H KV heads, G query heads per KV head, D head size, C buckets, A classifiers of a layer (H, or H*G).

Layers are trained in turn, all heads of a layer at once. Everything drawn at random is keyed by (seed, layer, head,
...), and no number of a head depends on another head, so that a run that was killed goes on to the same weights, and
heads may be split over ranks. What is done is kept in `OUT.partial`, next to the artefact, until that is written: all
ranks need to see this folder.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.artefact import Artefact, Classifier, Partition
from sparseattn.environment import machine, versions
from sparseattn.files import write_atomic
from sparseattn.rope import Rope
from sparseattn.tensorfiles import TensorFileError, load_tensors, save_tensors
from sparseattn.training import data
from sparseattn.training.classifier import QueryClassifier, clip_each, divergence
from sparseattn.training.data import Filters, Held, Prompts, TrainingError, bucket_stream
from sparseattn.training.kmeans import balance, spherical_kmeans

FORMAT = "sparseattn-saap-state"  # of a file in the folder of a run that is not done
VERSION = "1"
CLUSTERS = 1024
ROWS_A_BUCKET = 32  # that the shortest prompt leaves to a bucket, where the number of clusters is not given
SAMPLE = 256  # keys of the k-means sample to a cluster
DISTANCES = 256  # that the linear path of the residual variant is averaged over
HELD_TOKENS = 512  # held-out tokens that a head is validated on, over all held-out prompts
WARM_UP = 0.05  # share of the steps over which the learning rate grows


@dataclass(frozen=True)
class Recipe:
    """All that decides the outcome, besides the prompts.

    Args:
        clusters: C; by default 1,024, or the largest power of two that leaves a bucket 32 rows of the shortest prompt.
        iterations: of k-means.
        sample: keys that a head's k-means sees, over all prompts; by default 256 a cluster.
        hidden: width of the classifier.
        steps: at most.
        batch: queries of a step, from one prompt.
        queries: distinct queries that a classifier is trained on, over all prompts.
        keys: far keys that a query's target is computed over; all by default.
        rate: the highest learning rate; it grows over the first 5 % of the steps and falls along a cosine to zero.
        decay: of AdamW.
        validate: steps between two validations.
        patience: validations without a better one after which a head stops.
        shares: budgets of validation, as shares of the context.
        filters: which pairs and queries count.
        roped: buckets and classifier of vectors as attention sees them, not de-roped.
        residual: a linear path beside the classifier's two layers, which begins as the logits of mean keys: fewer
            prompts do. (The paper does not say how its residual variant begins, and found it no better.)
        per_query_head: a classifier for each query head, not one for the group.
        symmetric: no classifier, queries go to the nearest centroids.
        reverse: the other direction of the loss, KL(f || smoothed target).
        seed: any integer.

    Raises:
        TrainingError: a number out of its range.
    """

    clusters: int | None = None
    iterations: int = 25
    sample: int | None = None
    hidden: int = 1024
    steps: int = 2000
    batch: int = 1024
    queries: int = 65536
    keys: int | None = None
    rate: float = 1e-3
    decay: float = 0.01
    validate: int = 100
    patience: int = 10
    shares: tuple[float, ...] = (0.01, 0.05)
    filters: Filters = field(default_factory=Filters)
    roped: bool = False
    residual: bool = False
    per_query_head: bool = False
    symmetric: bool = False
    reverse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"clusters": 2, "iterations": 1, "sample": 1, "hidden": 1, "steps": 1, "batch": 2, "queries": 2}
        least |= {"keys": 1, "validate": 1, "patience": 1}
        for name, bound in least.items():
            number = getattr(self, name)
            if number is not None and number < bound:
                raise TrainingError(f"{name} is at least {bound}, got {number}")
        if not 0 < self.rate < math.inf or not 0 <= self.decay < math.inf:
            raise TrainingError(
                f"the learning rate is positive and the decay not negative, got {self.rate} and {self.decay}"
            )
        if self.symmetric and (self.residual or self.per_query_head or self.reverse):
            raise TrainingError(
                "symmetric k-means has no classifier, so residual, per_query_head and reverse do not go with it"
            )
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise TrainingError(f"validation takes shares of the context between 0 and 1, got {list(self.shares)}")

    def learning_rate(self, step: int) -> float:
        """Of step 0 and up."""
        warm = max(1, round(WARM_UP * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        return self.rate * (1 + math.cos(math.pi * (step - warm) / max(1, self.steps - warm))) / 2


@dataclass(frozen=True)
class Progress:
    """Where a run is: a stage ("k-means", "targets", "classifier") of a layer, and what it last measured."""

    layer: int
    stage: str
    done: int
    total: int
    loss: float | None = None
    recovered: float | None = None


def train(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    recipe: Recipe | None = None,
    *,
    held_out: Sequence[str | os.PathLike[str]] = (),
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    rank: int = 0,
    ranks: int = 1,
    barrier: Callable[[], None] = lambda: None,
    save_every: int = 100,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Artefact | None:
    """Trains all layers and writes the artefact `out`; goes on where a killed run of the same recipe stopped.

    Memory holds one layer of one prompt, and samples of fixed size: it does not grow with the number of prompts.

    Args:
        traces: trace files and folders of them, of one model; 1 prompt in 5 is held out.
        out: the artefact to write, a .safetensors file.
        held_out: trace files and folders to validate on instead.
        layers: all with full attention by default.
        device: where to compute; a GPU if there is one.
        dtype: what tensors are stored in.
        rank, ranks: this process and how many share the heads.
        barrier: returns once all ranks have called it.
        save_every: steps between two states on disk.
        progress: called now and then.

    Returns:
        The artefact as written; None on ranks other than 0.

    Raises:
        TrainingError: traces that cannot be trained with, or a partial run of other traces or another recipe.
        TraceError: a file that is no trace.
        ArtefactError: the artefact cannot be written.
    """
    recipe = recipe or Recipe()
    out = Path(out)
    if out.suffix != ".safetensors" or out.is_dir():
        raise TrainingError(f"an artefact is a .safetensors file, got {out}")
    if not out.parent.is_dir():
        raise TrainingError(f"{out} is in a folder that does not exist: {out.parent}")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    prompts = data.open_prompts(
        traces, recipe.filters, held_out=held_out, layers=layers, roped=recipe.roped, seed=recipe.seed
    )
    recipe = resolved(recipe, prompts)
    folder = Partial(Path(f"{out}.partial"), _identity(recipe, prompts))
    folder.open()
    try:
        for index, shape in prompts.shapes.items():
            mine = [h for h in range(shape.heads) if h % ranks == rank and not folder.finished(index, h).exists()]
            if mine:
                _train_layer(prompts, index, mine, recipe, place, folder, save_every, progress)
    except TrainingError:
        if ranks == 1:
            folder.remove_if_bare()
        raise
    barrier()
    if rank:
        barrier()
        return None
    artefact = _assembled(prompts, recipe, folder)
    artefact.save(out, dtype)
    folder.remove()
    barrier()
    return Artefact.load(out)


def resolved(recipe: Recipe, prompts: Prompts) -> Recipe:
    """`recipe` with the numbers that depend on the prompts."""
    clusters = recipe.clusters
    if clusters is None:
        clusters = max(2, min(CLUSTERS, 2 ** int(math.log2(max(2, prompts.shortest // ROWS_A_BUCKET)))))
    sample = recipe.sample or SAMPLE * clusters
    share = data.quota(sample, len(prompts.train))
    there = sum(min(share, prompt.tokens - recipe.filters.sink) for prompt in prompts.train)
    if clusters > there:
        asked = "" if recipe.sample is None else f" with sample={recipe.sample}"
        raise TrainingError(
            f"{clusters} clusters are more than the {there} keys of a head that {len(prompts.train)} prompts to train "
            f"on give{asked}"
        )
    return replace(recipe, clusters=clusters, sample=sample)


@dataclass(frozen=True)
class Partial:
    """The folder of a run that is not done: states, finished heads, and whose they are."""

    path: Path
    identity: str

    def open(self) -> None:
        """Makes the folder, or accepts one of the same run; else TrainingError."""
        shutil.rmtree(self._gone, ignore_errors=True)
        stamp = self.path / "run.json"
        if self.path.exists():
            try:
                theirs = json.loads(stamp.read_text())["identity"]
            except FileNotFoundError:
                theirs = None if any(self.path.glob("*.safetensors")) or not self.path.is_dir() else self.identity
            except (OSError, ValueError, LookupError, TypeError):
                theirs = None
            if theirs != self.identity:
                raise TrainingError(
                    f"{self.path} is a run of other traces, options or versions that is not done; delete it, or go on "
                    "with it by the same command"
                )
        try:
            self.path.mkdir(exist_ok=True)
            write_atomic(stamp, json.dumps({"identity": self.identity}).encode())
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def remove(self) -> None:
        """In one step: a run that is killed while its files go must not look like another one that is not done."""
        os.replace(self.path, self._gone)
        shutil.rmtree(self._gone, ignore_errors=True)

    @property
    def _gone(self) -> Path:
        return self.path.with_name(f"{self.path.name}.done")

    def remove_if_bare(self) -> None:
        """Removes it where nothing is done yet."""
        if not any(self.path.glob("*.safetensors")):
            self.remove()

    def finished(self, layer: int, head: int) -> Path:
        return self.path / f"layer-{layer}.head-{head}.safetensors"

    def centroids(self, layer: int, head: int) -> Path:
        return self.path / f"layer-{layer}.head-{head}.centroids.safetensors"

    def state(self, layer: int, heads: Sequence[int]) -> Path:
        return self.path / f"layer-{layer}.heads-{'-'.join(map(str, heads))}.state.safetensors"

    @staticmethod
    def write(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        try:
            save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "facts": json.dumps(facts)})
        except TensorFileError as error:
            raise TrainingError(str(error)) from error

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, "a state of training")
            return tensors, json.loads(metadata["facts"])
        except (TensorFileError, LookupError, ValueError) as error:
            raise TrainingError(f"{path} is damaged; delete it, and the run goes on without it") from error


def _identity(recipe: Recipe, prompts: Prompts) -> str:
    """SHA-256 of all that decides the weights, but for rounding: recipe, prompts, layers and torch's version."""
    known = {
        "recipe": asdict(recipe),
        "train": [prompt.sha256 for prompt in prompts.train],
        "held_out": [prompt.sha256 for prompt in prompts.held_out],
        "layers": list(prompts.shapes),
        "stored": [
            [str(prompt.trace.dtype), [prompt.trace.shapes[index].queries for index in prompts.shapes]]
            for prompt in (*prompts.train, *prompts.held_out)
        ],
        "config": prompts.config_hash,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class Pool:
    """What the classifiers of some heads of a layer learn from; every prompt has its own stretch of each one's rows.

    Attributes:
        queries: `[A,P,D]` float32.
        target: `[A,P,C]` float16, 6e-8 and less being nothing; a batch's rows are brought to a sum of 1 again.
        entropy: `[A,P]` of the targets.
        ends: `[A,prompts+1]` where each prompt's rows end.
        passed: `[A]` share of the queries looked at that passed the filters.
    """

    queries: Tensor
    target: Tensor
    entropy: Tensor
    ends: list[list[int]]
    passed: list[float]

    def batch(self, places: Sequence[tuple[int | str, ...]], step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of one prompt for each classifier, drawn by (place, step): `[A,n,D]`, targets `[A,n,C]`, entropy `[A,n]`."""
        rows = []
        for ends, place in zip(self.ends, places, strict=True):
            generator = bucket_stream(*place, "step", step)
            filled = [i for i in range(len(ends) - 1) if ends[i + 1] > ends[i]]
            prompt = filled[int(torch.randint(len(filled), (), generator=generator))]
            rows.append(torch.randint(ends[prompt], ends[prompt + 1], (size,), generator=generator))
        device = self.queries.device
        chosen = torch.arange(len(rows), device=device)[:, None], torch.stack(rows).to(device)  # [A,1], [A,n]
        target = self.target[chosen].float()
        return self.queries[chosen], target / target.sum(-1, keepdim=True), self.entropy[chosen]


def _train_layer(
    prompts: Prompts,
    index: int,
    heads: Sequence[int],
    recipe: Recipe,
    device: torch.device,
    folder: Partial,
    save_every: int,
    progress: Callable[[Progress], None],
) -> None:
    """Trains some heads of a layer and writes each one's file."""
    started = time.perf_counter()
    centroids, lengths, key_figures = _centroids(prompts, index, heads, recipe, device, folder, progress)
    kmeans_seconds = time.perf_counter() - started
    pool = None if recipe.symmetric else _pool(prompts, index, heads, centroids, recipe, device, progress)
    held = _held(prompts, index, heads, centroids, recipe, device)
    pool_seconds = time.perf_counter() - started - kmeans_seconds
    scale = prompts.shapes[index].scale
    found: list[dict[str, Any]] = [dict(figures) for figures in key_figures]
    curves = {
        "symmetric": recovered(symmetric_scores(held.queries, centroids, scale), held),
        "oracle": recovered(held.mass.sum(1), held),
        "exact": held.exact,
    }
    fitted: list[Classifier | None] = [None] * len(heads)
    if pool is not None:
        far = torch.linspace(recipe.filters.gap + 1, prompts.shortest, DISTANCES, device=device)
        rope = None if recipe.roped else prompts.ropes[index]
        linear = scale * over_distances(lengths[..., None] * centroids, rope, far)
        fit = Fit(index, heads, prompts.shapes[index].group, linear, recipe, pool, held)
        fitted_all, steps = fit.run(folder, save_every, progress)
        width = len(fitted_all.w1) // len(heads)
        for i in range(len(heads)):
            rows = slice(i * width, (i + 1) * width)
            fitted[i] = Classifier(**{name: tensor[rows] for name, tensor in fitted_all.tensors().items()})
            found[i] |= {
                "loss": fit.best_loss[i],
                "best_step": fit.best_step[i],
                "steps": steps[i],
                "passed": sum(pool.passed[i * width : (i + 1) * width]) / width,
            }
        curves["classifier"] = recovered(classifier_scores(fitted_all, held.queries), held)
    total_seconds = time.perf_counter() - started
    for i, head in enumerate(heads):
        facts = found[i] | {
            "layer": index,
            "head": head,
            "far_mass": held.far[i].mean(-1).tolist(),
            "recovered": {
                name: {str(share): curve[i, ..., s].mean(-1).tolist() for s, share in enumerate(recipe.shares)}
                for name, curve in curves.items()
            },
            "seconds": {
                "kmeans": kmeans_seconds / len(heads),
                "targets": pool_seconds / len(heads),
                "classifier": (total_seconds - kmeans_seconds - pool_seconds) / len(heads),
            },
        }
        one = fitted[i]
        tensors = {"centroids": centroids[i]} | ({} if one is None else one.tensors())
        folder.write(folder.finished(index, head), tensors, facts)
    for path in (folder.state(index, heads), *(folder.centroids(index, head) for head in heads)):
        path.unlink(missing_ok=True)


def _centroids(
    prompts: Prompts,
    index: int,
    heads: Sequence[int],
    recipe: Recipe,
    device: torch.device,
    folder: Partial,
    progress: Callable[[Progress], None],
) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
    """Centroids `[H,C,D]` for `heads`, mean lengths of their keys `[H,C]`, how balanced they are; kept on disk."""
    assert recipe.clusters is not None
    assert recipe.sample is not None
    kept = [folder.centroids(index, head) for head in heads]
    if not all(path.exists() for path in kept):
        share = data.quota(recipe.sample, len(prompts.train))
        samples: dict[int, list[Tensor]] = {head: [] for head in heads}
        for done, prompt in enumerate(prompts.train):
            progress(Progress(index, "k-means", done, len(prompts.train)))
            for head, view in data.load(prompts, prompt, index, heads, recipe.roped, device):
                generator = bucket_stream(recipe.seed, index, head, "k-means", prompt.sha256)
                samples[head].append(data.sample_keys(view, recipe.filters.sink, share, generator))
        for head, path in zip(heads, kept, strict=True):
            keys = torch.cat(samples.pop(head))
            seed = int(torch.randint(2**31, (), generator=bucket_stream(recipe.seed, index, head, "k-means")))
            found = spherical_kmeans(keys, recipe.clusters, iterations=recipe.iterations, seed=seed)
            lengths = mean_lengths(keys, found)
            folder.write(
                path,
                {"centroids": found, "lengths": lengths},
                {"keys": len(keys), "train": balance(keys, found).as_dict()},
            )
    read = [folder.read(path) for path in kept]
    centroids, lengths = (torch.stack([tensors[name] for tensors, _ in read]) for name in ("centroids", "lengths"))
    return centroids.to(device), lengths.to(device), [facts for _, facts in read]


def over_distances(keys: Tensor, rope: Rope | None, distances: Tensor) -> Tensor:
    """`[H,C,D]` whose product with a de-roped query is that of roped query and keys, in the mean over distances.

    Pairs that turn fast average out. Left in, as they are in the product of de-roped vectors, they are noise: in the
    reference model's layer 1 they take symmetric k-means from 0.63 of the far mass to 0.56.
    """
    if rope is None:
        return keys
    return rope.scaling * torch.stack([rope.rotate(keys, -distance) for distance in distances]).mean(0)


def mean_lengths(keys: Tensor, centroids: Tensor) -> Tensor:
    """`[C]` mean length of the keys `[n,D]` of each bucket; of all keys where it has none."""
    member, length = data.assign(keys, centroids), keys.norm(dim=-1)
    total, count = (
        length.new_zeros(len(centroids)).index_add_(0, member, x) for x in (length, torch.ones_like(length))
    )
    return torch.where(count > 0, total / count.clamp(min=1), length.mean())


def _pool(
    prompts: Prompts,
    index: int,
    heads: Sequence[int],
    centroids: Tensor,
    recipe: Recipe,
    device: torch.device,
    progress: Callable[[Progress], None],
) -> Pool:
    """The training queries of `heads` and their targets, one prompt in memory at a time."""
    group = prompts.shapes[index].group
    buckets, size = centroids.shape[1:]
    limit = data.quota(recipe.queries, len(prompts.train))
    units = [(head, members) for head in heads for members in _members(group, recipe.per_query_head)]
    rows = limit * len(prompts.train)
    queries = torch.zeros(len(units), rows, size, device=device)
    target = torch.zeros(len(units), rows, buckets, dtype=torch.float16, device=device)
    entropy = torch.zeros(len(units), rows, device=device)
    ends = [[0] for _ in units]
    passed, seen = [0] * len(units), [0] * len(units)
    for done, prompt in enumerate(prompts.train):
        progress(Progress(index, "targets", done, len(prompts.train)))
        for head, view in data.load(prompts, prompt, index, heads, recipe.roped, device):
            assigned = data.assign(view.inputs, centroids[heads.index(head)])
            for a, (of, members) in enumerate(units):
                if of != head:
                    continue
                generator = bucket_stream(recipe.seed, index, *_unit(head, members), "queries", prompt.sha256)
                got = data.examples(view, members, assigned, buckets, recipe.filters, limit, generator, recipe.keys)
                at = ends[a][-1]
                ends[a].append(at + len(got.queries))
                queries[a, at : ends[a][-1]] = got.queries
                target[a, at : ends[a][-1]] = got.target.half()
                entropy[a, at : ends[a][-1]] = torch.special.entr(got.target).sum(-1)
                passed[a] += got.passed
                seen[a] += got.seen
    for a, (head, _) in enumerate(units):
        if not ends[a][-1]:
            raise TrainingError(f"layer {index}, head {head}: the filters leave no query of any prompt to train on")
    return Pool(queries, target, entropy, ends, [p / s for p, s in zip(passed, seen, strict=True)])


def _members(group: int, per_query_head: bool) -> list[tuple[int, ...]]:
    """The query heads of each of a KV head's classifiers."""
    return [(member,) for member in range(group)] if per_query_head else [tuple(range(group))]


def _unit(head: int, members: Sequence[int]) -> tuple[int | str, ...]:
    """What names a classifier in random streams."""
    return (head, "-".join(map(str, members)))


def _held(
    prompts: Prompts, index: int, heads: Sequence[int], centroids: Tensor, recipe: Recipe, device: torch.device
) -> Held:
    """The held-out tokens of `heads`, of all held-out prompts, with the heads in front (`rows`: the same for all)."""
    limit = data.quota(HELD_TOKENS, len(prompts.held_out))
    shape = prompts.shapes[index]
    parts: list[list[Held]] = [[] for _ in heads]
    for prompt in prompts.held_out:
        queries = prompt.trace.shapes[index].queries or prompt.tokens
        generator = bucket_stream(recipe.seed, index, "held-out", prompt.sha256)
        rows = data.held_tokens(prompt, queries, recipe.filters, limit, generator)
        for i, (_, view) in enumerate(data.load(prompts, prompt, index, heads, recipe.roped, device)):
            assigned = data.assign(view.inputs, centroids[i])
            parts[i].append(data.held(view, rows, assigned, centroids.shape[1], recipe.filters, recipe.shares))
    assert shape.group == parts[0][0].queries.shape[0]

    def joined(name: str, dim: int) -> Tensor:
        return torch.stack([torch.cat([getattr(part, name) for part in of_head], dim) for of_head in parts])

    return Held(
        queries=joined("queries", 1),
        mass=joined("mass", 1),
        sizes=joined("sizes", 0),
        rows=joined("rows", 0)[0],
        far=joined("far", 1),
        exact=joined("exact", 1),
    )


def classifier_scores(classifier: Classifier, queries: Tensor) -> Tensor:
    """`[H,V,C]` the sum over the group of each query's probabilities, for queries `[H,G,V,D]`; eq. 2."""
    heads, group, tokens, _ = queries.shape
    width = len(classifier.w1) // heads  # classifiers to a head: 1 or G
    logits = classifier.logits(queries.reshape(heads * width, group // width * tokens, -1))
    return logits.softmax(-1).view(heads, group, tokens, -1).sum(1)


def symmetric_scores(queries: Tensor, centroids: Tensor, scale: float) -> Tensor:
    """`[H,V,C]` the same of symmetric k-means: softmax of `scale * <q,c>`, summed over the group."""
    return (scale * queries @ centroids[:, None].mT).softmax(-1).sum(1)


def recovered(scores: Tensor, held: Held) -> Tensor:
    """`[H,G,V,S]` share of the attention to far rows that buckets visited in the order of `scores` `[H,V,C]` hold.

    The bucket in which the budget ends counts in proportion to its rows within it.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    sizes = held.sizes.gather(-1, order)  # [H,V,C]
    before = sizes.cumsum(-1) - sizes
    mass = held.mass.gather(-1, order[:, None].expand_as(held.mass))
    out = []
    for s in range(held.rows.shape[-1]):
        part = ((held.rows[:, s, None] - before) / sizes.clamp(min=1)).clamp(0, 1)  # [H,V,C]
        out.append((mass * part[:, None]).sum(-1))
    return torch.stack(out, -1)


class Fit:
    """The classifiers of some heads of a layer, in training.

    Attributes:
        best_loss, best_step: per head, of the validation whose weights are kept.

    Args:
        linear: `[H,C,D]` what the residual variant's linear path begins as: the logit of a bucket's mean key, averaged
            over far distances.
    """

    def __init__(
        self,
        layer: int,
        heads: Sequence[int],
        group: int,
        linear: Tensor,
        recipe: Recipe,
        pool: Pool,
        held: Held,
    ) -> None:
        assert recipe.clusters is not None
        self.layer, self.heads, self.recipe, self.pool, self.held = layer, list(heads), recipe, pool, held
        members = _members(group, recipe.per_query_head)
        self.width = len(members)
        self.places: list[tuple[int | str, ...]] = [
            (recipe.seed, layer, *_unit(head, some)) for head in heads for some in members
        ]
        skip = linear.repeat_interleave(self.width, 0) if recipe.residual else None  # [A,C,D]
        self.model = QueryClassifier(self.places, linear.shape[-1], recipe.hidden, recipe.clusters, skip)
        self.model.to(linear.device)
        decayed = [p for p in self.model.parameters() if p.ndim == 3]
        others = [p for p in self.model.parameters() if p.ndim != 3]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}], lr=recipe.rate
        )
        self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.best_score = [-math.inf] * len(heads)
        self.best_loss = [math.inf] * len(heads)
        self.best_step = [0] * len(heads)
        self.stale = [0] * len(heads)
        self.stopped = [0] * len(heads)  # step at which a head had no patience left, 0: not yet
        self.step = 0

    def run(
        self, folder: Partial, save_every: int, progress: Callable[[Progress], None]
    ) -> tuple[Classifier, list[int]]:
        """Trains to the last step, or until every head has stopped; the best weights of each, and its steps."""
        path = folder.state(self.layer, self.heads)
        if path.exists():
            self._restore(*folder.read(path))
        while self.step < self.recipe.steps and not all(self.stopped):
            loss = self.advance()
            if self.step % self.recipe.validate == 0 or self.step == self.recipe.steps:
                self._validate()
            if self.step % save_every == 0 and self.step < self.recipe.steps:
                folder.write(path, *self._state())
            if self.step % 10 == 0 or self.step == self.recipe.steps:
                best = [score for score in self.best_score if score > -math.inf]
                mean = sum(best) / len(best) if best else None
                progress(Progress(self.layer, "classifier", self.step, self.recipe.steps, float(loss.mean()), mean))
        self.model.load_state_dict(self.best)
        return self.model.folded(), [stopped or self.step for stopped in self.stopped]

    def advance(self) -> Tensor:
        """One step; `[A]` losses."""
        recipe = self.recipe
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(self.step)
        self.model.train()
        queries, target, entropy = self.pool.batch(self.places, self.step, recipe.batch)
        losses = divergence(self.model(queries), target, recipe.reverse, entropy)
        self.optimizer.zero_grad(set_to_none=True)
        losses.sum().backward()
        clip_each(list(self.model.parameters()))
        self.optimizer.step()
        self.step += 1
        return losses.detach()

    @torch.no_grad()
    def _validate(self) -> None:
        """Keeps the weights of heads that recover more of the far mass of held-out tokens, and counts the others'."""
        folded = self.model.folded()
        score = recovered(classifier_scores(folded, self.held.queries), self.held).mean((1, 2, 3)).tolist()
        logits = folded.logits(self.held.queries.reshape(len(self.places), -1, self.held.queries.shape[-1]))
        target = self.held.mass.reshape(len(self.places), -1, self.held.mass.shape[-1])
        loss = divergence(logits, target, self.recipe.reverse).view(len(self.heads), -1).mean(1).tolist()
        now = self.model.state_dict()
        for i in range(len(self.heads)):
            if self.stopped[i]:
                continue
            if score[i] > self.best_score[i]:
                self.best_score[i], self.best_loss[i], self.best_step[i] = score[i], loss[i], self.step
                self.stale[i] = 0
                rows = slice(i * self.width, (i + 1) * self.width)
                for name, tensor in self.best.items():
                    tensor[rows] = now[name][rows]
            else:
                self.stale[i] += 1
                if self.stale[i] >= self.recipe.patience:
                    self.stopped[i] = self.step

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"now/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state[parameter]
            tensors[f"mean/{name}"] = moments["exp_avg"]
            tensors[f"square/{name}"] = moments["exp_avg_sq"]
        return tensors, {name: getattr(self, name) for name in self._COUNTERS}

    _COUNTERS = ("step", "best_loss", "best_step", "stale", "stopped", "best_score")

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        for name in self._COUNTERS:
            setattr(self, name, facts[name])
        device = self.best["w1"].device
        self.model.load_state_dict({name: tensors[f"now/{name}"] for name in self.best})
        self.best = {name: tensors[f"best/{name}"].to(device) for name in self.best}
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step)),
                "exp_avg": tensors[f"mean/{name}"].to(device),
                "exp_avg_sq": tensors[f"square/{name}"].to(device),
            }


def _assembled(prompts: Prompts, recipe: Recipe, folder: Partial) -> Artefact:
    """The artefact of all finished heads."""
    layers, figures = {}, []
    for index, shape in prompts.shapes.items():
        read = [folder.read(folder.finished(index, head)) for head in range(shape.heads)]
        figures += [facts for _, facts in read]
        parts = {name: torch.cat([tensors[name] for tensors, _ in read]) for name in read[0][0] if name != "centroids"}
        centroids = F.normalize(torch.stack([tensors["centroids"] for tensors, _ in read]), dim=-1)
        layers[index] = Partition(centroids, Classifier(**parts) if parts else None)
    shape = next(iter(prompts.shapes.values()))

    def listed(some: Sequence[data.Prompt]) -> list[dict[str, Any]]:
        return [{"name": p.trace.name, "sha256": p.sha256, "tokens": p.tokens} for p in some]

    meta = {
        "model": prompts.model,
        "config_hash": prompts.config_hash,
        "group": shape.group,
        "heads": shape.heads,
        "size": shape.size,
        "recipe": asdict(recipe),
        "seed": recipe.seed,
        "train": listed(prompts.train),
        "held_out": listed(prompts.held_out),
        "validation": figures,
        "versions": versions(),
        "machine": machine(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return Artefact(layers, roped=recipe.roped, ropes=prompts.ropes, meta=meta)
