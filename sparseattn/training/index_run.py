"""Trains `hata`, `hashattention`, `indexer` and `seer` on traces, layer by layer, to a file that they read.

Finished layers are kept in `OUT.partial` until the file is written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseattn.selectors.base import Selector
from sparseattn.selectors.pages.seer import Seer
from sparseattn.selectors.parameters.channel_calibration import BEFORE, Calibration
from sparseattn.selectors.tokens.hashattention import HashAttention
from sparseattn.selectors.tokens.hata import Hata
from sparseattn.selectors.tokens.indexer import Indexer
from sparseattn.training.block_gate import BlockGate
from sparseattn.training.calibrate import output_file
from sparseattn.training.layer_files import written_by_layer
from sparseattn.training.learned_index import (
    LEAST,
    HashByLabels,
    HashCodes,
    HashNetworks,
    Index,
    LowDimensions,
    PromptLayer,
    fit,
)
from sparseattn.training.partial import Partial
from sparseattn.training.prompts import Prompts, load, open_all
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device
from sparseattn.utils.hashing import stream

WIDTHS = {"hata": 128, "hashattention": 32, "indexer": 8, "seer": 64}  # of each method by default
METHODS, OBJECTIVES = tuple(WIDTHS), ("attention", "hata")
RATES = {"attention": 0.01, "hata": 0.1}  # by objective
OWN_RATES = {
    "hashattention": 0.003,
    "seer": 0.003,
    "indexer": 0.03,
}  # of methods that the objective's rate does not suit


@dataclass(frozen=True)
class IndexRecipe:
    """Everything that decides the outcome, except the prompts.

    Args:
        method: "hata", "hashattention", "indexer" or "seer".
        width: bits of a hash code, dimensions, or for "seer" rows of a block; 0: 128 bits for "hata" and 32 for
            "hashattention", as in their papers, 8 dimensions, 64 rows.
        objective: "attention": cross entropy of the attention from the scores; "hata": that method's own loss.
        steps: of each layer.
        rate: highest learning rate; None: .01, .03 for "indexer", .003 for "hashattention" and "seer", .1 with the
            objective "hata".
        seed: of the first maps, and of what steps draw.

    Raises:
        TrainingError: another method or objective, or a number out of its range.
    """

    method: str
    width: int = 0
    objective: str = "attention"
    steps: int = 500
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in WIDTHS:
            raise TrainingError(f"an index of {', '.join(METHODS)} is learned so, got {self.method!r}")
        if self.objective not in OBJECTIVES or (self.objective == "hata" and self.method != "hata"):
            raise TrainingError(
                f"the objective is attention, for the method hata also hata, got {self.objective!r} for {self.method}"
            )
        if self.steps < 2:  # the last one's rate is next to nothing
            raise TrainingError(f"steps are 2 or more, got {self.steps}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise TrainingError(f"a rate is above 0 and finite, got {self.rate}")
        try:
            self.selector()
        except ValueError as error:
            raise TrainingError(str(error)) from error

    @property
    def many(self) -> int:
        """Bits, dimensions, or rows of a block."""
        return self.width or WIDTHS[self.method]

    @property
    def highest(self) -> float:
        """The highest learning rate."""
        if self.rate is not None:
            return self.rate
        return OWN_RATES.get(self.method, RATES[self.objective])

    def selector(self) -> Selector:
        """Return a selector of this width."""
        if self.method == "seer":
            return Seer(page=self.many)
        if self.method == "indexer":
            return Indexer(dimensions=self.many)
        return (Hata if self.method == "hata" else HashAttention)(bits=self.many)

    def index(self, layer: PromptLayer, number: int) -> Index:
        """Return what is fitted to a layer of this number, whose shapes are those of `layer`."""
        draws = stream(self.seed, "first maps", number)
        heads, size = layer.query.shape[0], layer.query.shape[3]
        if self.method == "seer":
            return BlockGate(layer, self.many)
        if self.method == "indexer":
            return LowDimensions(layer, self.many, draws)
        if self.method == "hashattention":
            return HashNetworks(layer, self.many, draws)
        return (HashByLabels if self.objective == "hata" else HashCodes)(heads, size, self.many, draws)


def train_index(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    recipe: IndexRecipe,
    *,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Learn the index of all layers and write it as the calibration `out`; continue where a killed run stopped.

    A layer of all prompts is in memory at a time.

    Args:
        traces: trace files and folders of them, of one model; one is enough.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of steps done, over all layers, and their total.

    Returns:
        The calibration that was written. Its `meta["loss"]` has, by layer, the mean loss of the last steps.

    Raises:
        TrainingError: traces that do not belong together, an `out` that is no .safetensors file, or a partial run of
            other traces or another recipe.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    out, place = output_file(out), usable_device(device)
    roped = recipe.method not in BEFORE
    prompts = open_all(traces, layers, roped)
    whole = replace(recipe, width=recipe.many)  # which the file says
    return written_by_layer(
        recipe.method,
        prompts,
        whole,
        out,
        lambda folder: _learn(prompts, whole, folder, place, progress),
        "loss",
        roped,
    )


def _learn(
    prompts: Prompts,
    recipe: IndexRecipe,
    folder: Partial,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    """Write the file of each layer that has none."""
    total = recipe.steps * len(prompts.shapes)
    for number, index in enumerate(prompts.shapes):
        done = recipe.steps * number
        if not folder.layer(index).exists():
            maps, loss = _layer(prompts, index, recipe, device, _counted(progress, done, total))
            folder.write(folder.layer(index), {name: part.cpu() for name, part in maps.items()}, {"loss": loss})
        progress(done + recipe.steps, total)


def _counted(progress: Callable[[int, int], None], done: int, total: int) -> Callable[[], None]:
    at = [done]

    def step() -> None:
        at[0] += 1
        progress(at[0], total)

    return step


def _layer(
    prompts: Prompts, index: int, recipe: IndexRecipe, device: torch.device, step: Callable[[], None]
) -> tuple[dict[str, Tensor], float]:
    """Return the maps of a layer, and the mean loss of the last steps."""
    layers = layers_of(prompts, index, device)
    fitted = recipe.index(layers[0], index)
    fitted.parameters = {name: part.to(device) for name, part in fitted.parameters.items()}
    loss = fit(fitted, layers, recipe.steps, recipe.highest, (recipe.seed, "steps", index), step)
    return fitted.found(), loss


def layers_of(prompts: Prompts, index: int, device: torch.device) -> list[PromptLayer]:
    """Return a layer of every prompt."""
    views_of = []
    for prompt in prompts.train:
        if (tokens := prompt.trace.tokens) < LEAST:
            raise TrainingError(f"{prompt.path} has {tokens} tokens, and prompts to learn from have {LEAST} or more")
        heads = range(prompts.shapes[index].heads)
        views = [view for _, view in load(prompts, prompt, index, heads, True, device)]
        keys, query = torch.stack([view.keys for view in views]), torch.stack([view.query for view in views])
        views_of.append(PromptLayer(query, keys, views[0].scale, prompts.ropes.get(index), views[0].positions))
    return views_of
