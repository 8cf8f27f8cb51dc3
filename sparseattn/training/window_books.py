"""Trains A2ATS's factor and codebook on traces of one model, layer by layer, to a file that it reads.

https://arxiv.org/abs/2502.12665. Finished layers are kept in `OUT.partial` until the file is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.window_codes import at_distance, window_codes
from sparseattn.selectors.tokens.a2ats import MOST_BITS
from sparseattn.training.calibrate import output_file
from sparseattn.training.layer_files import written_by_layer
from sparseattn.training.partial import Partial
from sparseattn.training.prompts import HeadView, Prompts, TracedPrompt, load, open_all, quota
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device
from sparseattn.utils.hashing import stream

METHOD = "a2ats"


@dataclass(frozen=True)
class WindowRecipe:
    """Everything that decides the outcome, except the prompts.

    Args:
        bits: of a name, 1 to 12, the paper's.
        distance: tokens between every key and the queries.
        sample: keys of a KV head, over all prompts.
        queries: of each query head for the second moment, over all prompts.
        seed: of the draws and of the first centroids.

    Raises:
        TrainingError: a number out of its range.
    """

    bits: int = MOST_BITS
    distance: int = 2048
    sample: int = 32768
    queries: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MOST_BITS:
            raise TrainingError(f"bits are 1 to {MOST_BITS}, got {self.bits}")
        if self.sample < 1 or self.queries < 1 or self.distance < 0:
            raise TrainingError(
                f"sample and queries are 1 or more and distance is 0 or more, got {self.sample}, {self.queries} and "
                f"{self.distance}"
            )


def train_window(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    recipe: WindowRecipe | None = None,
    *,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Learn factor and codebook of all layers and write them as the calibration `out`; continue a killed run.

    Args:
        traces: trace files and folders of them, of one model; one is enough. Their RoPE must be known.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of layers done and their total.

    Returns:
        The calibration that was written. Its `meta["error"]` has, by layer, the mean squared error of the codes, as a
        share of the coded keys' mean square.

    Raises:
        TrainingError: traces that do not belong together or whose RoPE is not known, an `out` that is no .safetensors
            file, or a partial run of other traces or another recipe.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    recipe, out, place = recipe or WindowRecipe(), output_file(out), usable_device(device)
    prompts = open_all(traces, layers, roped=False)

    def learn(folder: Partial) -> None:
        for done, index in enumerate(prompts.shapes, 1):
            if not folder.layer(index).exists():
                books, error = _layer(prompts, index, recipe, place)
                folder.write(folder.layer(index), {name: part.cpu() for name, part in books.items()}, {"error": error})
            progress(done, len(prompts.shapes))

    return written_by_layer(METHOD, prompts, recipe, out, learn, "error", roped=False)


def _layer(prompts: Prompts, index: int, recipe: WindowRecipe, device: torch.device) -> tuple[dict[str, Tensor], float]:
    """Return factor and centroids of a layer, and the error of its codes."""
    heads, keys, queries = range(prompts.shapes[index].heads), [], []
    for prompt in prompts.train:
        drawn = [
            _drawn(view, prompt, recipe, prompts) for _, view in load(prompts, prompt, index, heads, False, device)
        ]
        keys.append(torch.stack([of_head for of_head, _ in drawn]))
        queries.append(torch.stack([of_head for _, of_head in drawn]))
    sample = torch.cat(keys, 1)
    books = window_codes(sample, torch.cat(queries, 2), recipe.bits, recipe.seed)
    turned = sample @ books["factor"]
    distances = torch.stack([torch.cdist(*pair).amin(1) for pair in zip(turned, books["centroids"][:, 0], strict=True)])
    return books, float(distances.square().sum() / turned.square().sum())


def _drawn(view: HeadView, prompt: TracedPrompt, recipe: WindowRecipe, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Return a head's sample of one prompt: keys before RoPE `[n,D]` and queries at the distance `[G,q,D]`."""
    assert view.rope is not None
    many, device = len(prompts.train), view.keys.device
    which = torch.randperm(len(view.keys), generator=stream(recipe.seed, METHOD, prompt.sha256))
    which = which[: quota(recipe.sample, many)].sort().values.to(device)
    count = view.query.shape[1]
    at = torch.linspace(0, count - 1, min(count, quota(recipe.queries, many))).long()
    query_places = view.query_positions[at.to(device)]
    return view.inputs[which], at_distance(
        view.query[:, at].to(device).float(), query_places, view.rope, recipe.distance
    )
