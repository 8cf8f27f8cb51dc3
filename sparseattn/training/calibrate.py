"""Calibrates Loki and Double Sparsity on traces: statistics of keys, and of queries, summed over prompts."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.cost_model.environment import versions
from sparseattn.selectors.parameters.channel_calibration import METHODS, Calibration
from sparseattn.training.prompts import Prompts, load, open_all
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.devices import usable_device


def calibrate(
    traces: Sequence[str | os.PathLike[str]],
    method: str,
    out: str | os.PathLike[str],
    *,
    layers: Sequence[int] | None = None,
    roped: bool = True,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    known: Callable[[int], dict[str, Tensor] | None] = lambda layer: None,
) -> Calibration:
    """Compute a method's statistics over all tokens of all prompts, and write them as the calibration `out`.

    One layer of one prompt is in memory at a time. Each query of a trace is paired with the key of its own token.

    Args:
        traces: trace files and folders of them, of one model; one is enough.
        method: "loki" or "doublesparsity".
        out: the file to write, a .safetensors file.
        layers: all with full attention by default.
        roped: use keys as attention sees them; otherwise keys before RoPE, for "loki" only.
        device: where to compute; a CUDA device if there is one.
        progress: called with the number of layers done, over all prompts, and their total.
        known: gives the statistics of a layer that are there already (`of_layer`).

    Returns:
        The calibration that was written.

    Raises:
        TrainingError: an unknown method, traces that do not belong together, an `out` that is no .safetensors file.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    out, place = output_file(out), usable_device(device)
    prompts = prompts_of(traces, method, layers, roped)
    total = len(prompts.shapes) * len(prompts.train)
    solved: dict[int, dict[str, Tensor]] = {}
    for index in prompts.shapes:
        before, there = len(solved) * len(prompts.train), known(index)
        if there is None:
            there = of_layer(prompts, method, index, roped, place, lambda done: progress(before + done, total))  # noqa: B023
        solved[index] = there
        progress(before + len(prompts.train), total)
    Calibration(method, solved, roped=roped, ropes=prompts.ropes, meta=meta_of(prompts)).save(out)
    return Calibration.load(out)


def prompts_of(
    traces: Sequence[str | os.PathLike[str]], method: str, layers: Sequence[int] | None, roped: bool
) -> Prompts:
    """Return the prompts of traces, with the layers to calibrate; raises as `calibrate`."""
    if method not in METHODS:
        raise TrainingError(f"a calibration is for one of {', '.join(METHODS)}, got {method!r}")
    if not roped and METHODS[method].queries:
        raise TrainingError(f"{method} takes keys and queries after RoPE, not before it")
    return open_all(traces, layers, roped)


def of_layer(
    prompts: Prompts,
    method: str,
    index: int,
    roped: bool,
    place: torch.device,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Tensor]:
    """Return a layer's statistics over all prompts; `progress` is called with the prompts done."""
    statistic, heads = METHODS[method], prompts.shapes[index].heads
    sums: list[dict[str, Any]] = [{} for _ in range(heads)]
    for number, prompt in enumerate(prompts.train, 1):
        for head, view in load(prompts, prompt, index, range(heads), roped, place):
            queries = view.query.to(place)[None] if statistic.queries else None
            keys = view.inputs[-view.query.shape[1] :] if statistic.queries else view.inputs
            for name, part in statistic.sums(keys[None], queries).items():
                sums[head][name] = sums[head].get(name, 0) + part
        progress(number)
    solved = [statistic.solved(part) for part in sums]
    return {name: torch.cat([solution[name] for solution in solved]) for name in statistic.names}


def output_file(out: str | os.PathLike[str]) -> Path:
    """Return where a calibration is to be written; TrainingError for what is no .safetensors file of a folder."""
    path = Path(out)
    if path.suffix != ".safetensors" or path.is_dir():
        raise TrainingError(f"a calibration is a .safetensors file, got {path}")
    if not path.parent.is_dir():
        raise TrainingError(f"{path} is in a folder that does not exist: {path.parent}")
    return path


def meta_of(prompts: Prompts) -> dict[str, Any]:
    """Return what a calibration says of where it comes from."""
    shape = next(iter(prompts.shapes.values()))
    return {
        "model": prompts.model,
        "config_hash": prompts.config_hash,
        "heads": shape.heads,
        "group": shape.group,
        "size": shape.size,
        "prompts": [{"name": p.trace.name, "sha256": p.sha256, "tokens": p.tokens} for p in prompts.train],
        "versions": versions(),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
