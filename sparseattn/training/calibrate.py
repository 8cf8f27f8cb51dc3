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

    Returns:
        The calibration that was written.

    Raises:
        TrainingError: an unknown method, traces that do not belong together, an `out` that is no .safetensors file.
        TraceError: a file that is no trace.
        CalibrationError: a file that cannot be written.
        ValueError: a device that torch cannot use here.
    """
    if method not in METHODS:
        raise TrainingError(f"a calibration is for one of {', '.join(METHODS)}, got {method!r}")
    out, statistic, place = output_file(out), METHODS[method], usable_device(device)
    if not roped and statistic.queries:
        raise TrainingError(f"{method} takes keys and queries after RoPE, not before it")
    prompts = open_all(traces, layers, roped)
    total = len(prompts.shapes) * len(prompts.train)
    found: dict[int, dict[str, Tensor]] = {}
    for index, shape in prompts.shapes.items():
        sums: list[dict[str, Any]] = [{} for _ in range(shape.heads)]
        for prompt in prompts.train:
            for head, view in load(prompts, prompt, index, range(shape.heads), roped, place):
                queries = view.query.to(place)[None] if statistic.queries else None
                keys = view.inputs[-view.query.shape[1] :] if statistic.queries else view.inputs
                for name, part in statistic.sums(keys[None], queries).items():
                    sums[head][name] = sums[head].get(name, 0) + part
            progress(len(found) * len(prompts.train) + prompts.train.index(prompt) + 1, total)
        solved = [statistic.solved(one) for one in sums]
        found[index] = {name: torch.cat([one[name] for one in solved]) for name in statistic.names}
    Calibration(method, found, roped=roped, ropes=prompts.ropes, meta=meta_of(prompts)).save(out)
    return Calibration.load(out)


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
