"""Trains Locret's retaining heads on traces of one model, layer by layer, to a file that it reads.

https://arxiv.org/abs/2410.01805. Finished layers are kept in `OUT.partial` until the file is written. Letters: H KV
heads, G query heads per KV head, D head size, T tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparseattn.selectors.eviction.locret import METHOD
from sparseattn.selectors.parameters.channel_calibration import Calibration
from sparseattn.selectors.parameters.retaining_heads import foreseen, random_heads
from sparseattn.training.calibrate import output_file
from sparseattn.training.layer_files import written_by_layer
from sparseattn.training.partial import Partial
from sparseattn.training.prompts import Prompts, TracedPrompt, open_all
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device
from sparseattn.utils.hashing import stream

TOKENS = 1024  # consecutive ones of a prompt that a step sees
SMOOTH = 0.0025 * 32  # what neighbours' differences weigh beside a layer's loss; in the authors' code, of 32 layers
CLIP = 0.5


@dataclass(frozen=True)
class RetainingRecipe:
    """Everything that decides the outcome, except the prompts.

    Args:
        hidden: width of the network, 1,024 in the paper.
        steps: of each layer; 3,000 in the paper, each with a prompt of its own.
        rate: highest learning rate, reached after two thirds of the steps.
        answer: last tokens of each prompt, whose queries say how much the tokens before them are attended to.
        seed: of the first weights, and of what steps draw.

    Raises:
        TrainingError: a number out of its range.
    """

    hidden: int = 1024
    steps: int = 500
    rate: float = 5e-4
    answer: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.hidden, self.steps, self.answer) < 1:
            raise TrainingError(
                f"hidden, steps and answer are 1 or more, got {self.hidden}, {self.steps} and {self.answer}"
            )
        if not 0 < self.rate < math.inf:
            raise TrainingError(f"a rate is above 0 and finite, got {self.rate}")


class RetainingExamples(NamedTuple):
    """Tokens of a prompt: queries `[H,G,n,D]` and keys `[H,n,D]` before RoPE, values `[H,n,D]`, labels `[H,n]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    labels: Tensor


def train_retaining(
    traces: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    recipe: RetainingRecipe | None = None,
    *,
    layers: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Train the heads of all layers and write them as the calibration `out`; continue a killed run.

    A token's label is the largest logit that a query of the answer has with it, over the query group too. The loss is
    the authors': smooth L1, and the squared differences of neighbours' scores.

    Args:
        traces: trace files and folders of them, of one model; one is enough. Their RoPE must be known.
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of layers done and their total.

    Returns:
        The calibration that was written. Its `meta["loss"]` has, by layer, the mean loss of the last tenth of the
        steps.

    Raises:
        TrainingError: traces that do not belong together, have no token with a query before the answer or whose RoPE is
            not known, an `out` that is no .safetensors file, or a partial run of other traces or another recipe.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    recipe, out, place = recipe or RetainingRecipe(), output_file(out), usable_device(device)
    prompts = open_all(traces, layers, roped=False)

    def learn(folder: Partial) -> None:
        for done, index in enumerate(prompts.shapes, 1):
            if not folder.layer(index).exists():
                weights, loss = _fitted(
                    [_examples(prompts, prompt, index, recipe) for prompt in prompts.train], recipe, index, place
                )
                folder.write(folder.layer(index), {name: part.cpu() for name, part in weights.items()}, {"loss": loss})
            progress(done, len(prompts.shapes))

    return written_by_layer(METHOD, prompts, recipe, out, learn, "loss", roped=False)


def _examples(prompts: Prompts, prompt: TracedPrompt, index: int, recipe: RetainingRecipe) -> RetainingExamples:
    """Return the tokens of a prompt that have a query and lie before its answer."""
    prompt.trace.verify(index, ("query", "keys", "values"))
    layer, rope, at = prompt.trace.layer(index), prompts.ropes[index], prompt.trace.positions
    queries, tokens = layer.query.shape[2], prompt.tokens
    first, last = tokens - queries, tokens - recipe.answer
    if last - first < 2:
        raise TrainingError(
            f"{prompt.path} has {tokens} tokens and the queries of its last {queries}: fewer than 2 of them lie before "
            f"an answer of {recipe.answer}"
        )
    answers = layer.query[:, :, -recipe.answer :].float()  # [H,G,a,D]
    keys = layer.keys[:, first:last].float()
    labels = (answers.flatten(1, 2) @ keys.mT).amax(1) * layer.scale
    mine = slice(0, queries - recipe.answer)
    return RetainingExamples(
        rope.unrotate(layer.query[:, :, mine].float(), at[first:last]),
        rope.unrotate(keys, at[first:last]),
        layer.values[:, first:last].float(),
        labels,
    )


def _fitted(
    prompts: Sequence[RetainingExamples], recipe: RetainingRecipe, index: int, device: torch.device
) -> tuple[dict[str, Tensor], float]:
    """Return the trained weights of a layer, and the mean loss of the last tenth of the steps."""
    heads, group, _, size = prompts[0].queries.shape
    weights = random_heads(heads, group, size, recipe.hidden, recipe.seed, index)
    weights = {name: part.to(device).requires_grad_() for name, part in weights.items()}
    optimizer = torch.optim.AdamW(weights.values(), recipe.rate, betas=(0.9, 0.95))
    warm = max(2 * recipe.steps // 3, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: (at + 1) / warm if at < warm else (recipe.steps - at) / max(recipe.steps - warm, 1)
    )
    losses = []
    with torch.enable_grad():
        for step in range(recipe.steps):
            loss = _loss(weights, prompts[step % len(prompts)], (recipe.seed, "tokens", index, step), device)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_value_(weights.values(), CLIP)
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
    if not math.isfinite(sum(losses)):
        raise TrainingError(f"the loss is not finite after {recipe.steps} steps at the rate {recipe.rate}")
    last = losses[-max(recipe.steps // 10, 1) :]
    return {name: part.detach() for name, part in weights.items()}, sum(last) / len(last)


def _loss(
    weights: dict[str, Tensor], prompt: RetainingExamples, seed: Sequence[int | str], device: torch.device
) -> Tensor:
    """Return the loss of consecutive tokens of a prompt, which the seed draws."""
    count = prompt.labels.shape[1]
    begin = int(torch.randint(max(count - TOKENS, 0) + 1, (), generator=stream(*seed)))
    part = slice(begin, begin + TOKENS)
    queries, keys, values = (x[None, ..., part, :].to(device) for x in prompt[:3])
    scores, labels = foreseen(weights, queries, keys, values)[0], prompt.labels[:, part].to(device)
    rough = (scores[:, 1:] - scores[:, :-1]).square().mean() if scores.shape[1] > 1 else scores.new_zeros(())
    return torch.nn.functional.smooth_l1_loss(scores, labels) + SMOOTH * rough
