"""Trains querypq's metric, rotation and codebooks on traces: the product codes of keys for many prompts of a model.

Letters: H KV heads, G query heads per KV head, D head size, S subspaces. A layer is learned from keys and queries drawn
from all prompts, as `QueryPQ` learns from those of its own. Finished layers are kept in `OUT.partial` until the file is
written.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.query_metric import codes_of, moves_ahead, reached, share_kept
from sparseattn.selectors.tokens.querypq import QueryPQ
from sparseattn.training.calibrate import output_file
from sparseattn.training.index_run import layers_of
from sparseattn.training.layer_files import written_by_layer
from sparseattn.training.learned_index import ProductBooks, fit
from sparseattn.training.partial import Partial
from sparseattn.training.prompts import HeadView, Prompts, TracedPrompt, load, open_all, quota
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device
from sparseattn.utils.hashing import stream

METHOD = "querypq"
MEANS = ("rope", "plain")
DISTIL_RATE = 0.03  # of the numbers' mean size


@dataclass(frozen=True)
class CodesRecipe:
    """Everything that decides the outcome, except the prompts.

    Args:
        subspaces, bits, reach, seed: see `QueryPQ`.
        ahead: tokens behind each prompt that codes are made for too, see `QueryPQ`; 0: none.
        mean: which mean key codes leave out: "rope", that of all prompts' keys before RoPE, "plain", that of keys as
            they are; see `QueryPQ`. As a second stage files of the plain mean alone serve.
        sample: keys of a KV head, over all prompts.
        queries: of each query head for the metric, over all prompts.
        distil: steps that fit centroids and the map of queries to the attention itself afterwards, in each layer.

    Raises:
        TrainingError: a number out of its range.
    """

    subspaces: int = 0
    bits: int = 4
    sample: int = 32768
    queries: int = 8192
    reach: float = 0.5
    seed: int = 0
    distil: int = 0
    ahead: int = 8192
    mean: str = "rope"

    def __post_init__(self) -> None:
        if self.distil < 0 or self.distil == 1:  # the last one's rate is next to nothing
            raise TrainingError(f"distil is a number of steps, 2 or more, or 0 for none, got {self.distil}")
        if self.mean not in MEANS:
            raise TrainingError(f"mean is one of {', '.join(MEANS)}, got {self.mean!r}")
        if self.sample < 1 or self.queries < 1:
            raise TrainingError(f"sample and queries are 1 or more, got {self.sample} and {self.queries}")
        try:
            self.selector()
        except ValueError as error:
            raise TrainingError(str(error)) from error

    def selector(self) -> QueryPQ:
        """Return a selector of these subspaces and bits, which knows what fits a head."""
        return QueryPQ(self.subspaces, self.bits, reach=self.reach, seed=self.seed, ahead=self.ahead, mean=self.mean)


def train_codes(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    recipe: CodesRecipe | None = None,
    *,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Learn the codes of all layers and write them as the calibration `out`; continue where a killed run stopped.

    One layer of one prompt is in memory at a time, with samples of fixed size; with `distil` a layer of all prompts is.

    Args:
        traces: trace files and folders of them, of one model; one is enough.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of layers done, over all prompts, and their total.

    Returns:
        The calibration that was written. Its `meta["kept"]` has, by layer, the share of the logits' variance that the
        codes keep, in the mean of KV heads, before they are distilled.

    Raises:
        TrainingError: traces that do not belong together, heads that no such subspaces cut, an `out` that is no
            .safetensors file, or a partial run of other traces or another recipe.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    recipe, out, place = recipe or CodesRecipe(), output_file(out), usable_device(device)
    prompts = open_all(traces, layers, roped=True)
    for shape in prompts.shapes.values():
        try:
            recipe.selector().check_shape(shape.heads, shape.group, shape.size)
        except ValueError as error:
            raise TrainingError(str(error)) from error
    return written_by_layer(
        METHOD, prompts, recipe, out, lambda folder: _learn(prompts, recipe, folder, place, progress), "kept"
    )


def _learn(
    prompts: Prompts,
    recipe: CodesRecipe,
    folder: Partial,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    """Write the file of each layer that has none."""
    steps, total = itertools.count(1), len(prompts.train) * len(prompts.shapes)

    def step() -> None:
        progress(next(steps), total)

    for index in prompts.shapes:
        if folder.layer(index).exists():
            for _ in prompts.train:
                step()
            continue
        codes, kept = _layer(prompts, index, recipe, device, step)
        folder.write(folder.layer(index), {name: part.cpu() for name, part in codes.items()}, {"kept": kept})


def _layer(
    prompts: Prompts, index: int, recipe: CodesRecipe, device: torch.device, step: Callable[[], None]
) -> tuple[dict[str, Tensor], float]:
    """Return what the keys of a layer are coded by, and the share of the logits' variance that it keeps."""
    drawn: list[dict[str, Tensor]] = []
    for prompt in prompts.train:
        views = load(prompts, prompt, index, range(prompts.shapes[index].heads), True, device)
        parts = [_drawn(view, prompt, recipe, prompts, index) for _, view in views]
        drawn.append({name: torch.stack([part[name] for part in parts]) for name in parts[0]})
        step()
    keys, queries, weights, at = (
        torch.cat([part[name] for part in drawn], dim)
        for name, dim in (("keys", 1), ("queries", 2), ("weights", 1), ("at", 1))
    )
    rope, coded, known = prompts.ropes.get(index), keys, {}
    if recipe.mean == "rope":
        known["root"] = torch.zeros_like(keys[:, 0]) if rope is None else rope.turn(keys, -at).mean(1)
        if rope is not None:
            coded = keys.clone()
            rope.take_off(coded, known["root"], at)
    subspaces = recipe.selector().subspaces_of(keys.shape[2])
    counts = weights if recipe.reach else None
    codes = known | codes_of(coded, queries, counts, subspaces, recipe.bits, recipe.seed)
    share = float(share_kept(keys, coded, codes).mean())
    if recipe.distil:
        books = ProductBooks(codes, prompts.shapes[index].scale, rope)
        fit(books, layers_of(prompts, index, device), recipe.distil, DISTIL_RATE, (recipe.seed, "steps", index))
        codes = books.found()
    return codes, share


def _drawn(
    view: HeadView, prompt: TracedPrompt, recipe: CodesRecipe, prompts: Prompts, index: int
) -> dict[str, Tensor]:
    """Return a head's sample of one prompt: keys `[n,D]`, where they are `[n]`, their weights `[n]`, and queries
    `[G,q,D]`.

    Its rows are the same in all heads, drawn by the prompt. Half of the keys and queries have the RoPE of positions
    behind the prompt, as far as the recipe looks ahead.
    """
    many, device = len(prompts.train), view.keys.device
    which = torch.randperm(len(view.keys), generator=stream(recipe.seed, METHOD, prompt.sha256))
    which = which[: quota(recipe.sample, many)].sort().values.to(device)
    count = view.query.shape[1]
    at = torch.linspace(0, count - 1, min(count, quota(recipe.queries, many))).long()
    queries, keys = view.query[:, at].to(device).float(), view.keys[which]
    query_places, places = view.query_positions[at.to(device)], view.positions[which]
    weights = reached((queries * view.scale)[None], query_places, keys[None], places)[0].pow(recipe.reach)
    if recipe.ahead and (rope := prompts.ropes.get(index)) is not None:
        first, draws = int(view.positions.max()) + 1, ("keys ahead", "queries ahead")
        of_keys, of_queries = (stream(recipe.seed, METHOD, prompt.sha256, name) for name in draws)
        moves = moves_ahead(places, first, recipe.ahead, of_keys)
        keys, places = rope.turn(keys.float(), moves), places + moves
        queries = rope.turn(queries, moves_ahead(query_places, first, recipe.ahead, of_queries))
    return {"keys": keys.float(), "at": places, "queries": queries, "weights": weights}


def kept(calibration: Calibration) -> dict[int, float]:
    """Return `meta["kept"]` of a file of `train_codes` by layer."""
    share: dict[str, Any] = calibration.meta["kept"]
    return {int(index): share[index] for index in sorted(share, key=int)}
