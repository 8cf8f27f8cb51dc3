"""Trains SAAP on the traces of many prompts and writes the artefact; Saap, https://arxiv.org/abs/2502.08246.

Letters: H KV heads, G query heads per KV head, D head size, C buckets, A classifiers of a layer (H, or H*G).

Layers are trained in turn, all heads of a layer at once. Everything drawn at random is keyed by (seed, layer, head,
...), and no number of a head depends on another head, so that a run that was killed goes on to the same weights, and
heads may be split over ranks. What is done is kept in `OUT.partial` (partial.py) until the artefact is written.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.cost_model.environment import machine, versions
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.training.examples import pool_of, sample_keys
from sparseattn.training.fit import Fit, over_distances
from sparseattn.training.kmeans import balance, mean_lengths, spherical_kmeans
from sparseattn.training.partial import Partial, Progress, identity
from sparseattn.training.prompts import Prompts, TracedPrompt, load, open_prompts, quota
from sparseattn.training.recipe import Recipe, TrainingError, bucket_stream
from sparseattn.training.validation import classifier_scores, held_of, recovered, symmetric_scores
from sparseattn.utils.devices import usable_device
from sparseattn.utils.tensors import STORED

CLUSTERS = 1024
ROWS_A_BUCKET = 32  # that the shortest prompt leaves to a bucket, where the number of clusters is not given
SAMPLE = 256  # keys of the k-means sample to a cluster
DISTANCES = 256  # that the linear path of the residual variant is averaged over


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
    """Train all layers and write the artefact `out`; continue where a killed run of the same recipe stopped.

    One layer of one prompt is in memory at a time, with samples of fixed size: memory does not grow with prompts.

    Args:
        traces: trace files and folders of them, of one model; 1 prompt in 5 is held out.
        out: the artefact to write, a .safetensors file.
        held_out: trace files and folders to validate on instead.
        layers: all with full attention by default.
        device: where to compute; a CUDA device if there is one.
        dtype: what tensors are stored in.
        rank, ranks: the number of this process, and how many processes share the heads.
        barrier: returns once all ranks have called it.
        save_every: steps between two states on disk.
        progress: called from time to time.

    Returns:
        The artefact that was written; None on ranks other than 0.

    Raises:
        TrainingError: traces that cannot be trained with, a dtype that no artefact has, or a partial run of other
            traces or another recipe.
        TraceError: a file that is no trace.
        ArtefactError: the artefact cannot be written.
        ValueError: a device that torch cannot use here.
    """
    place = usable_device(device)
    recipe = recipe or Recipe()
    out = Path(out)
    if dtype not in STORED.values():
        raise TrainingError(f"an artefact is stored as float32, float16 or bfloat16, got {dtype}")
    if out.suffix != ".safetensors" or out.is_dir():
        raise TrainingError(f"an artefact is a .safetensors file, got {out}")
    if not out.parent.is_dir():
        raise TrainingError(f"{out} is in a folder that does not exist: {out.parent}")
    prompts = open_prompts(
        traces, recipe.filters, held_out=held_out, layers=layers, roped=recipe.roped, seed=recipe.seed
    )
    recipe = resolved(recipe, prompts)
    folder = Partial(Path(f"{out}.partial"), identity(recipe, prompts))
    folder.open()
    try:
        for index, shape in prompts.shapes.items():
            mine = [h for h in range(shape.heads) if h % ranks == rank and not folder.finished(index, h).exists()]
            if mine:
                _train_layer(prompts, index, mine, recipe, place, folder, save_every, progress)
    except BaseException:  # a stopped run, a full disk, faiss that is missing: nothing done, nothing left
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
    """Return `recipe` with the numbers that depend on the prompts."""
    clusters = recipe.clusters
    if clusters is None:
        clusters = max(2, min(CLUSTERS, 2 ** int(math.log2(max(2, prompts.shortest // ROWS_A_BUCKET)))))
    sample = recipe.sample or SAMPLE * clusters
    share = quota(sample, len(prompts.train))
    there = sum(min(share, prompt.tokens - recipe.filters.sink) for prompt in prompts.train)
    if clusters > there:
        sampling = "" if recipe.sample is None else f" with sample={recipe.sample}"
        raise TrainingError(
            f"{clusters} clusters are more than the {there} keys of a head that {len(prompts.train)} prompts to train "
            f"on give{sampling}"
        )
    return replace(recipe, clusters=clusters, sample=sample)


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
    pool = None if recipe.symmetric else pool_of(prompts, index, heads, centroids, recipe, device, progress)
    held_out = held_of(prompts, index, heads, centroids, recipe, device)
    pool_seconds = time.perf_counter() - started - kmeans_seconds
    scale = prompts.shapes[index].scale
    figures: list[dict[str, Any]] = [dict(figures) for figures in key_figures]
    curves = {
        "symmetric": recovered(symmetric_scores(held_out.queries, centroids, scale), held_out),
        "oracle": recovered(held_out.mass.sum(1), held_out),
        "exact": held_out.exact,
    }
    fitted: list[Classifier | None] = [None] * len(heads)
    if pool is not None:
        far = torch.linspace(recipe.filters.gap + 1, prompts.shortest, DISTANCES, device=device)
        rope = None if recipe.roped else prompts.ropes[index]
        linear = scale * over_distances(lengths[..., None] * centroids, rope, far)
        fit = Fit(index, heads, prompts.shapes[index].group, linear, recipe, pool, held_out)
        fitted_all, steps = fit.run(folder, save_every, progress)
        width = len(fitted_all.w1) // len(heads)
        for i in range(len(heads)):
            rows = slice(i * width, (i + 1) * width)
            fitted[i] = Classifier(**{name: tensor[rows] for name, tensor in fitted_all.tensors().items()})
            figures[i] |= {
                "loss": fit.best_loss[i],
                "best_step": fit.best_step[i],
                "steps": steps[i],
                "passed": sum(pool.passed[i * width : (i + 1) * width]) / width,
            }
        curves["classifier"] = recovered(classifier_scores(fitted_all, held_out.queries), held_out)
    total_seconds = time.perf_counter() - started
    seconds = {
        "kmeans": kmeans_seconds / len(heads),
        "targets": pool_seconds / len(heads),
        "classifier": (total_seconds - kmeans_seconds - pool_seconds) / len(heads),
    }
    for i, head in enumerate(heads):
        shares = {
            name: {str(share): curve[i, ..., s].mean(-1).tolist() for s, share in enumerate(recipe.shares)}
            for name, curve in curves.items()
        }
        facts = figures[i] | {"layer": index, "head": head, "far_mass": held_out.far[i].mean(-1).tolist()}
        facts |= {"recovered": shares, "seconds": dict(seconds)}
        classifier = fitted[i]
        tensors = {"centroids": centroids[i]} | ({} if classifier is None else classifier.tensors())
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
        share = quota(recipe.sample, len(prompts.train))
        samples: dict[int, list[Tensor]] = {head: [] for head in heads}
        for done, prompt in enumerate(prompts.train):
            progress(Progress(index, "k-means", done, len(prompts.train)))
            for head, view in load(prompts, prompt, index, heads, recipe.roped, device):
                generator = bucket_stream(recipe.seed, index, head, "k-means", prompt.sha256)
                samples[head].append(sample_keys(view, recipe.filters.sink, share, generator))
        for head, path in zip(heads, kept, strict=True):
            keys = torch.cat(samples.pop(head))
            seed = int(torch.randint(2**31, (), generator=bucket_stream(recipe.seed, index, head, "k-means")))
            fitted = spherical_kmeans(keys, recipe.clusters, iterations=recipe.iterations, seed=seed)
            lengths = mean_lengths(keys, fitted)
            folder.write(
                path,
                {"centroids": fitted, "lengths": lengths},
                {"keys": len(keys), "train": balance(keys, fitted).as_dict()},
            )
    read = [folder.read(path) for path in kept]
    centroids, lengths = (torch.stack([tensors[name] for tensors, _ in read]) for name in ("centroids", "lengths"))
    return centroids.to(device), lengths.to(device), [facts for _, facts in read]


def _assembled(prompts: Prompts, recipe: Recipe, folder: Partial) -> Artefact:
    """Return the artefact of all finished heads."""
    layers, figures = {}, []
    for index, shape in prompts.shapes.items():
        read = [folder.read(folder.finished(index, head)) for head in range(shape.heads)]
        figures += [facts for _, facts in read]
        parts = {name: torch.cat([tensors[name] for tensors, _ in read]) for name in read[0][0] if name != "centroids"}
        centroids = F.normalize(torch.stack([tensors["centroids"] for tensors, _ in read]), dim=-1)
        layers[index] = Partition(centroids, Classifier(**parts) if parts else None)
    shape = next(iter(prompts.shapes.values()))

    def listed(some: Sequence[TracedPrompt]) -> list[dict[str, Any]]:
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
