"""Prompts to train on: traces of one model, one layer of one prompt in memory at a time.

Saap, https://arxiv.org/abs/2502.08246, section 4.2. Letters: H KV heads, G query heads per KV head, T tokens, Q tokens
with queries, D head size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.traces.trace import LayerShape, Trace, TraceLayer
from sparseattn.training.recipe import Filters, TrainingError

LEAST = 16  # tokens of a prompt that have a far key, and queries of a prompt that are trained on at least


@dataclass(frozen=True)
class TracedPrompt:
    """One trace and the SHA-256 of what was read."""

    trace: Trace
    path: str
    sha256: str

    @property
    def tokens(self) -> int:
        return self.trace.tokens


@dataclass(frozen=True)
class Prompts:
    """Traces of one model: those to train on, those held out, and what they share.

    Attributes:
        model, config_hash: of the first trace; the config hash of all.
        shapes: layer -> its shape (without `queries`), ascending.
        ropes: layer -> its RoPE.
    """

    train: tuple[TracedPrompt, ...]
    held_out: tuple[TracedPrompt, ...]
    model: str
    config_hash: str | None
    shapes: dict[int, LayerShape]
    ropes: dict[int, Rope]

    @property
    def shortest(self) -> int:
        return min(prompt.tokens for prompt in (*self.train, *self.held_out))


def trace_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the trace files of `paths`; a folder stands for its `*.safetensors`, by name. Raises TrainingError."""
    files_of_all: list[Path] = []
    for path in map(Path, paths):
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files:
            raise TrainingError(f"the folder {path} holds no *.safetensors trace (`sparseattn capture` makes one)")
        files_of_all += files
    return files_of_all


def open_prompts(
    paths: Sequence[str | os.PathLike[str]],
    filters: Filters,
    *,
    held_out: Sequence[str | os.PathLike[str]] = (),
    layers: Sequence[int] | None = None,
    roped: bool = False,
    seed: int = 0,
) -> Prompts:
    """Open traces, check that they belong together, and hold out 1 prompt in 5 (at least one) if not told which.

    Only headers are read.

    Args:
        paths: trace files and folders of them, to train on (and to hold some out of).
        filters: every prompt must be long enough for them.
        held_out: trace files and folders to validate on instead.
        layers: all with full attention by default.
        roped: whether a layer may do without a known RoPE.
        seed: chooses the prompts that are held out, by their contents, whatever their order.

    Raises:
        TrainingError: a single prompt, one given twice, prompts of different models or shapes, too short ones, layers
            that are not there or whose RoPE is not known.
        TraceError: a file that is no trace.
    """
    given = [_prompt(path) for path in trace_files(paths)]
    apart = [_prompt(path) for path in trace_files(held_out)]
    if len(given) + len(apart) < 2 or not given:
        raise TrainingError(
            f"training takes at least 2 prompts, one of which is held out for validation, got {len(given) + len(apart)}"
        )
    prompts = _together((*given, *apart), layers, roped)
    for prompt in prompts.train:
        _check_length(prompt, filters, prompts.shapes)
    if not apart:
        order = sorted(given, key=lambda prompt: hashlib.sha256(f"{seed} {prompt.sha256}".encode()).digest())
        apart = order[: max(1, len(given) // 5)]
        given = [prompt for prompt in given if prompt not in apart]
    return replace(prompts, train=tuple(given), held_out=tuple(apart))


def open_all(
    paths: Sequence[str | os.PathLike[str]], layers: Sequence[int] | None = None, roped: bool = True
) -> Prompts:
    """Open one or more traces of any length, check that they belong together, and hold none out.

    Args: as of `open_prompts`.

    Raises:
        TrainingError: no trace, a prompt given twice, prompts of different models, shapes or RoPEs, layers that are not
            there or whose RoPE is not known.
        TraceError: a file that is no trace.
    """
    given = [_prompt(path) for path in trace_files(paths)]
    if not given:
        raise TrainingError("give at least one trace, or a folder of traces")
    return _together(given, layers, roped)


def _together(given: Sequence[TracedPrompt], layers: Sequence[int] | None, roped: bool) -> Prompts:
    """Different prompts of one model, all to train on; TrainingError where they are not."""
    every = sorted(given, key=lambda prompt: (prompt.sha256, prompt.path))
    for prompt_before, other in itertools.pairwise(every):
        if prompt_before.sha256 == other.sha256:
            raise TrainingError(f"{prompt_before.path} and {other.path} are of the same prompt; give each prompt once")
    _warn_of_bare(given)
    first = given[0].trace
    shapes = _chosen(given[0], layers)
    for prompt in given:
        _check_alike(given[0], prompt, shapes)
    ropes = _ropes(given[0], shapes, roped)
    for prompt in given:
        _check_ropes(given[0], prompt, shapes)
    model, config_hash = str(first.meta.get("model", "unknown")), first.meta.get("config_hash")
    return Prompts(tuple(given), (), model, config_hash, shapes, ropes)


def _warn_of_bare(prompts: Sequence[TracedPrompt]) -> None:
    bare = [prompt.path for prompt in prompts if prompt.trace.hashes is None]
    if bare:
        warnings.warn(
            f"{len(bare)} of {len(prompts)} traces carry no hash of their tensors, so that damage goes unnoticed "
            f"(an earlier release wrote {bare[0]})",
            stacklevel=4,
        )


def _prompt(path: Path) -> TracedPrompt:
    trace = Trace.open(path)
    known = trace.meta.get("tokens_sha256")
    if known is None:  # no captured one: what it was made from, which a recipe or a text says
        meta = {name: value for name, value in trace.meta.items() if name != "created"}
        known = hashlib.sha256(json.dumps([meta, trace.positions.tolist()], sort_keys=True).encode()).hexdigest()
    if (trace.positions.diff() <= 0).any():
        raise TrainingError(f"the positions of {path} do not ascend, so that distances say nothing about order")
    return TracedPrompt(trace, str(path), str(known))


def _chosen(prompt: TracedPrompt, layers: Sequence[int] | None) -> dict[int, LayerShape]:
    trace = prompt.trace
    if layers is not None and (not layers or len(set(layers)) < len(layers)):
        raise TrainingError(f"layers are one or more different indices, got {list(layers)}")
    for index in layers or ():
        if index not in trace.layers:
            raise TrainingError(f"{prompt.path} holds layers {', '.join(map(str, trace.layers))}, not {index}")
        if trace.shapes[index].window is not None:
            raise TrainingError(
                f"layer {index} of {prompt.path} attends to a sliding window of {trace.shapes[index].window} rows, "
                "nothing far is to be found there: leave it out"
            )
    chosen = {i: shape for i, shape in trace.shapes.items() if shape.window is None and (layers is None or i in layers)}
    if not chosen:
        raise TrainingError(f"{prompt.path} has no layer that attends to the whole context")
    return chosen


def _check_alike(first: TracedPrompt, prompt: TracedPrompt, shapes: dict[int, LayerShape]) -> None:
    ours, theirs = first.trace.meta, prompt.trace.meta
    for name in ("config_hash", "model"):
        if name == "model" and None not in (ours.get("config_hash"), theirs.get("config_hash")):
            continue  # one model may go by several names
        if ours.get(name) != theirs.get(name):
            raise TrainingError(
                f"{first.path} and {prompt.path} are of different models: {name} {ours.get(name)} and "
                f"{theirs.get(name)}"
            )
    for index, shape in shapes.items():
        other = prompt.trace.shapes.get(index)
        if other is None:
            layers = ", ".join(map(str, prompt.trace.layers))
            raise TrainingError(f"{first.path} has layer {index}, {prompt.path} holds layers {layers}")
        a, b = ((s.heads, s.group, s.size, s.scale, s.window) for s in (shape, other))
        if a != b:
            raise TrainingError(
                f"layer {index} has heads, group, size, scale and window {a} in {first.path}, {b} in {prompt.path}"
            )
    groups = {shape.group for shape in shapes.values()}
    if len(groups) > 1:
        raise TrainingError(f"{first.path} has layers of {' and '.join(map(str, sorted(groups)))} query heads per head")


def _check_length(prompt: TracedPrompt, filters: Filters, shapes: dict[int, LayerShape]) -> None:
    for shape in shapes.values():
        positions = prompt.trace.positions
        queries = positions[-(prompt.trace.shapes[shape.index].queries or len(positions)) :]
        first = positions[filters.sink] if filters.sink < len(positions) else positions[-1]
        reach = max(filters.gap + 1, filters.near)
        usable = int((queries - first >= reach).sum())
        if usable < LEAST:
            raise TrainingError(
                f"{prompt.path} is too short: of its {prompt.tokens} tokens {usable} have a key {reach} or more before "
                f"them, the first {filters.sink} aside, and at least {LEAST} are needed; give longer prompts or a "
                f"smaller gap, near or sink"
            )


def _ropes(first: TracedPrompt, shapes: dict[int, LayerShape], roped: bool) -> dict[int, Rope]:
    ropes = {}
    for index in shapes:
        rope = first.trace.ropes[index]
        if rope is not None:
            ropes[index] = rope
        elif not roped:
            why = first.trace.meta.get("rope_absent", {}).get(str(index), "the trace has none for it")
            raise TrainingError(
                f"the RoPE of layer {index} of {first.path} cannot be taken back ({why}): leave the layer out, or "
                "train on roped vectors"
            )
    return ropes


def _check_ropes(first: TracedPrompt, prompt: TracedPrompt, shapes: dict[int, LayerShape]) -> None:
    for index in shapes:
        ours, theirs = first.trace.ropes[index], prompt.trace.ropes[index]
        if ours is None or theirs is None:
            same = ours is theirs
        else:
            same = ours.equals(theirs)
        if not same:
            raise TrainingError(f"layer {index} of {prompt.path} has another RoPE than {first.path}")


@dataclass(frozen=True, eq=False)
class HeadView:
    """One KV head of one layer of one prompt.

    Attributes:
        keys: `[T,D]` float32 after RoPE.
        inputs: `[T,D]` the keys that buckets are of: de-roped, or `keys`.
        query: `[G,Q,D]` of the last Q tokens after RoPE, in the trace's dtype, on the CPU.
        positions: `[T]`.
        scale: logits are `scale * q.k`.
        rope: that takes inputs back, or None where they stay roped.
    """

    keys: Tensor
    inputs: Tensor
    query: Tensor
    positions: Tensor
    scale: float
    rope: Rope | None

    @property
    def query_positions(self) -> Tensor:
        """`[Q]`."""
        return self.positions[-self.query.shape[1] :]

    def queries(self, member: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        """`[n,D]` twice, the queries of members and rows `[n]` (on the CPU) after RoPE, and as classifier inputs."""
        device = self.keys.device
        roped = self.query[member, row].to(device).float()
        if self.rope is None:
            return roped, roped
        return roped, self.rope.unrotate(roped, self.query_positions[row.to(device)])


def load(
    prompts: Prompts, prompt: TracedPrompt, index: int, heads: Sequence[int], roped: bool, device: torch.device
) -> Iterator[tuple[int, HeadView]]:
    """Load one layer of one prompt, yield its heads one by one, and release it.

    Raises:
        TrainingError: numbers that are not finite.
        TraceError: numbers that are not those that were written.
    """
    prompt.trace.verify(index, ("query", "keys"))
    layer = prompt.trace.layer(index)
    _check_layer(prompt, layer)
    rope = None if roped else prompts.ropes[index]
    positions = prompt.trace.positions.to(device)
    for head in heads:
        keys = layer.keys[head].to(device).float()
        inputs = keys if rope is None else rope.unrotate(keys, positions)
        yield head, HeadView(keys, inputs, layer.query[head], positions, layer.scale, rope)


def _check_layer(prompt: TracedPrompt, layer: TraceLayer) -> None:
    for name, tensor in (("query", layer.query), ("keys", layer.keys)):
        if not all(head.isfinite().all() for head in tensor):  # one at a time: it takes 3 times a head's memory
            raise TrainingError(f"layer {layer.index} of {prompt.path} has {name} that are not finite")


def quota(total: int, prompts: int) -> int:
    """Return how much each of `prompts` may contribute to a sample of at most `total`."""
    return math.ceil(total / prompts)
