"""Training: one step, the loss that guides attention, and a state on disk that a run resumes from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import LlamaForCausalLM

from scripts.reference.curriculum import (
    CURRICULUM,
    LEARNING_RATES,
    TOTAL_STEPS,
    Batch,
    learning_rate,
    make_batch,
    stage_at,
)
from scripts.reference.model import new_model
from scripts.reference.text import Corpus
from sparseattn.files import write_atomic

# Heads of layer 0 guided to the byte 1, 2 and 3 back; heads of later layers guided to where a span at hand went on
# before, one to a key-value head.
SHIFT_HEADS = {0: 1, 1: 2, 2: 3}
RETRIEVAL_LAYERS = (1, 2)
RETRIEVAL_HEADS = (0, 4)


def guidance(weights: list[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Return minus the log of the attention that guided heads give to where they should look, averaged.

    ``weights`` are the attention weights of layers 0 to the last of ``RETRIEVAL_LAYERS``. Without guidance a head that
    matches one byte formed after 900 steps, and one that matches several had not after 2,100.
    """
    tokens, positions = batch.tokens, batch.positions
    losses = []
    for head, shift in SHIFT_HEADS.items():
        there = weights[0][:, head].diagonal(-shift, 1, 2)
        adjacent = positions[:, shift:] - positions[:, :-shift] == shift
        losses.append(-there[adjacent].float().clamp_min(1e-9).log().mean())
    # same[b, t, k]: the bytes t and k are equal; match: so are the last bytes up to t and up to k - 1, as many as the
    # copy has so far, 4 at most. The next byte must agree as well, so that no wrong continuation is rewarded.
    same = tokens[:, :, None] == tokens[:, None, :]
    going_on = torch.zeros_like(tokens, dtype=torch.bool)
    going_on[:, :-1] = batch.offset[:, 1:] > 0
    match = going_on[:, :, None] & (positions[:, :, None] > positions[:, None, :])
    match[:, :-1] &= same[:, 1:]
    for back in range(4):
        agree = torch.zeros_like(same)
        agree[:, back:, back + 1 :] = same[:, : same.shape[1] - back, : -back - 1]
        match &= agree | (batch.offset < back)[:, :, None]
    for layer in RETRIEVAL_LAYERS:
        for head in RETRIEVAL_HEADS:
            there = (weights[layer][:, head].float() * match).sum(-1)[match.any(-1)]
            losses.append(-there.clamp_min(1e-9).log().mean())
    return torch.stack([loss for loss in losses if loss.isfinite()]).mean()


def train_step(
    model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch, guide: float
) -> tuple[float, float]:
    """Take one step; return the loss in bits per supervised byte and the accuracy on copies' second and later bytes."""
    weights: list[torch.Tensor] = []
    layers = model.model.layers[: max(RETRIEVAL_LAYERS) + 1] if guide else ()
    hooks = [layer.self_attn.register_forward_hook(lambda *call: weights.append(call[2][1])) for layer in layers]
    with torch.autocast("cpu", torch.bfloat16):
        # Without an attention mask transformers takes a jump in position_ids for the start of another, packed sequence
        # and stops attention there; a mask of ones makes it leave the gaps alone.
        hidden = model.model(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            attention_mask=torch.ones_like(batch.tokens),
            use_cache=False,
        ).last_hidden_state
        chosen = batch.supervised[:, 1:]
        logits = model.lm_head(hidden[:, :-1][chosen]).float()
    targets = batch.tokens[:, 1:][chosen]
    loss = torch.nn.functional.cross_entropy(logits, targets)
    for hook in hooks:
        hook.remove()
    (loss + guide * guidance(weights, batch) if guide else loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    in_copy = batch.offset[:, 1:][chosen] > 0
    correct = (logits.argmax(-1) == targets)[in_copy]
    return loss.item() / math.log(2), correct.float().mean().item()


def new_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def fingerprint(seed: int, corpus: Corpus) -> str:
    """Return a digest of all that determines a run, so that a state is never resumed under another recipe."""
    recipe = [
        seed,
        corpus.digest,
        [dataclasses.astuple(stage) for stage in CURRICULUM],
        LEARNING_RATES,
        [list(SHIFT_HEADS.items()), RETRIEVAL_LAYERS, RETRIEVAL_HEADS],
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


def load_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, recipe: str) -> tuple[int, Spent]:
    """Restore what ``save_state`` wrote; return the steps done and the time they took."""
    remedy = "remove it or give another --work-dir"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "recipe" not in metadata:
                raise SystemExit(f"{path} is not a state of this training; {remedy}")
            if metadata["recipe"] != recipe:
                raise SystemExit(f"{path} is from another recipe, seed or corpus; {remedy}")
            step = int(metadata["step"])
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
    recipe = fingerprint(seed, corpus)
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
            # Only eager attention gives its weights away.
            model.set_attn_implementation("eager" if stage.guide else "sdpa")
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
            loss, accuracy = train_step(model, optimizer, make_batch(seed, step, stage, corpus.train), stage.guide)
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
                save_state(state, model, optimizer, step, Spent.now().since(started, before), recipe)
    return model, Spent.now().since(started, before)
