"""Training: one step, and a state on disk that a run resumes from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import LlamaForCausalLM

from scripts.reference.curriculum import (
    FACT_WEIGHT,
    GUIDED_ROWS,
    TOTAL_STEPS,
    Batch,
    Stage,
    learning_rate,
    make_batch,
    stage_at,
)
from scripts.reference.guidance import GUIDED_LAYERS, RETRIEVAL_HEADS, SHIFT_HEADS, AttentionInputs, guidance
from scripts.reference.model import new_model
from scripts.reference.text import Corpus
from sparseattn.utils.files import write_atomic


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, stage: Stage
) -> tuple[float, float]:
    """Take one step; return the loss in bits per supervised byte and the accuracy on copies' second and later bytes."""
    inputs = AttentionInputs(model, GUIDED_LAYERS) if stage.guide else None
    with torch.autocast("cpu", torch.bfloat16), inputs or contextlib.nullcontext():
        # Without an attention mask transformers takes a jump in position_ids for the start of another, packed sequence
        # and stops attention there; a mask of ones makes it leave the gaps alone.
        hidden = model.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=torch.ones_like(batch.tokens),
            use_cache=False,
        ).last_hidden_state
        chosen = batch.weight[:, 1:] > 0
        logits = model.lm_head(hidden[:, :-1][chosen]).float()
        guided = guidance(inputs, batch) if inputs else 0.0
    targets = batch.tokens[:, 1:][chosen]
    weight = batch.weight[:, 1:][chosen]
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none") @ (weight / weight.sum())
    (loss + stage.guide * guided).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    in_copy = batch.offset[:, 1:][chosen] > 0
    correct = (logits.argmax(-1) == targets)[in_copy]
    return loss.item() / math.log(2), correct.float().mean().item()


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def fingerprint(seed: int, corpus: Corpus, steps: int) -> str:
    """Return a digest of all that determines a run up to a step.

    So a state is never resumed under another recipe, but stages behind it may change.
    """
    recipe = [
        seed,
        corpus.digest,
        [(learning_rate(step), dataclasses.replace(stage_at(step), steps=0)) for step in range(steps)],
        [len(SHIFT_HEADS), GUIDED_LAYERS, RETRIEVAL_HEADS, GUIDED_ROWS, FACT_WEIGHT],
        new_model(seed).config.to_dict(),
    ]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds by the clock and of processor time: they differ where the cores are shared."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Spent:
        return cls(time.monotonic(), time.process_time())

    def since(self, start: Spent, before: Spent) -> Spent:
        return Spent(self.wall - start.wall + before.wall, self.cpu - start.cpu + before.cpu)


def save_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, step: int, spent: Spent, recipe: str
) -> None:
    """Write weights and optimizer moments as one safetensors file that replaces the last one in a single rename."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        tensors[f"weight/{name}"] = parameter.detach()
        tensors[f"mean/{name}"] = state["exp_avg"]
        tensors[f"square/{name}"] = state["exp_avg_sq"]
    metadata = {"step": str(step), "wall": repr(spent.wall), "cpu": repr(spent.cpu), "recipe": recipe}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors, metadata))


def load_state(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, recipe: Callable[[int], str]
) -> tuple[int, Spent]:
    """Restore what ``save_state`` wrote; return the steps done and the time they took."""
    remedy = "remove it or give another --work-dir"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "recipe" not in metadata:
                raise SystemExit(f"{path} is not a state of this training; {remedy}")
            step = int(metadata["step"])
            if step > TOTAL_STEPS or metadata["recipe"] != recipe(step):
                raise SystemExit(f"{path} is from another recipe, seed or corpus; {remedy}")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(file.get_tensor(f"weight/{name}"))
                    optimizer.state[parameter] = {
                        "step": torch.tensor(float(step)),
                        "exp_avg": file.get_tensor(f"mean/{name}"),
                        "exp_avg_sq": file.get_tensor(f"square/{name}"),
                    }
    except (SafetensorError, OSError) as error:
        raise SystemExit(f"{path} cannot be read as a state ({error}); {remedy}") from error
    return step, Spent(float(metadata["wall"]), float(metadata["cpu"]))


def train(
    corpus: Corpus, console: Console, *, seed: int, state: Path, stop_at: int | None, save_every: int, log_every: int
) -> tuple[LlamaForCausalLM, Spent]:
    """Train to the end of the curriculum or to ``stop_at``, from the file ``state`` if there; return model and time."""
    recipe = functools.partial(fingerprint, seed, corpus)
    model = new_model(seed)
    optimizer = new_optimizer(model)
    step, before = load_state(state, model, optimizer, recipe) if state.exists() else (0, Spent())
    if step:
        console.print(f"resuming at step {step} after {before.wall:.0f} s")
    last = min(TOTAL_STEPS, stop_at or TOTAL_STEPS)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = Spent.now()
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=last, completed=step)
        losses: list[float] = []
        accuracies: list[float] = []
        while step < last:
            stage = stage_at(step)
            # The backward pass of sdpa takes twice as long as that of plain matmuls at 64 tokens on a CPU.
            model.set_attn_implementation("eager" if stage.length <= 128 else "sdpa")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss, accuracy = train_step(model, optimizer, make_batch(seed, step, stage, corpus.train), stage)
            losses.append(loss)
            accuracies.append(accuracy)
            step += 1
            progress.update(task, completed=step, description=f"{stage.name} {loss:.2f} bits, copies {accuracy:.0%}")
            if step % log_every == 0 or step == last:
                spent = Spent.now().since(started, before)
                console.print(
                    f"{spent.wall:6.0f} s, {spent.cpu:6.0f} s of processor  step {step:5d}  {stage.name:8s} "
                    f"{np.mean(losses):6.3f} bits  copies {np.nanmean(accuracies):6.1%}"
                )
                losses.clear()
                accuracies.clear()
            if step % save_every == 0 or step == last:
                save_state(state, model, optimizer, step, Spent.now().since(started, before), recipe(step))
    return model, Spent.now().since(started, before)
