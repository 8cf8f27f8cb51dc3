"""What makes a selector's estimates of logits hold what they promise: a file of two numbers a head.

An estimate x of a logit becomes `scale * x + offset`, for each query head of each layer. `training.fit_logits` finds
them on traces, the selector `Fitted` applies them.

The file, format version 2 (any safetensors reader opens it):

    layers.{i}.scale     [H,G] float32, above 0
    layers.{i}.offset    [H,G] float32

    metadata (strings, as safetensors requires):
    format    "sparseattn-estimates"
    version   "2"
    selector  text of the selector whose estimates they are, with every argument (its `repr`)
    meta      JSON object: model, traces, tokens, versions
    sha256    SHA-256 of metadata and tensors (`tensor_files`)
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.utils.json_fields import FieldError, Object
from sparseattn.utils.json_text import JsonError, parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

FORMAT = "sparseattn-estimates"
VERSION = "2"
WHAT = "a file of fitted estimates (`sparseattn train --method mass` makes one)"


class EstimatesError(ValueError):
    """Fitted estimates that cannot be read, written or used for a layer, in one sentence."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """Scale and offset of a selector's estimates, for some layers of one model.

    Args:
        selector: `repr` of the selector.
        layers: layer -> scale and offset, `[H,G]` float32 each.
        meta: where they come from, for JSON.

    Raises:
        EstimatesError: no layer, or numbers of another shape or range.
    """

    selector: str
    layers: Mapping[int, tuple[Tensor, Tensor]]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise EstimatesError("fitted estimates are of at least one layer")
        for index, (scale, offset) in self.layers.items():
            shapes = scale.ndim == 2 and scale.shape == offset.shape
            if not shapes or scale.dtype != torch.float32 or offset.dtype != torch.float32:
                raise EstimatesError(
                    f"scale and offset of layer {index} are float32 [H,G], got {scale.dtype} {list(scale.shape)} and "
                    f"{offset.dtype} {list(offset.shape)}"
                )
            if not bool((scale > 0).all() and scale.isfinite().all() and offset.isfinite().all()):
                raise EstimatesError(f"scale and offset of layer {index} are finite, and the scale is above 0")

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Scale and offset of a layer; EstimatesError where it is not there."""
        if layer not in self.layers:
            raise EstimatesError(
                f"the estimates of {self.meta.get('model', 'a model')} are of layers "
                f"{', '.join(map(str, self.layers))}, layer {layer} is asked for: leave it out (of a comparison), make "
                f"it dense (dense_layers) or fit it too"
            )
        return self.layers[layer]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; EstimatesError where it cannot."""
        tensors = {
            f"layers.{i}.{name}": part
            for i, both in self.layers.items()
            for name, part in zip(("scale", "offset"), both, strict=True)
        }
        metadata = {"format": FORMAT, "version": VERSION, "selector": self.selector}
        try:
            save_tensors(path, tensors, metadata | {"meta": json.dumps(self.meta, sort_keys=True, allow_nan=False)})
        except (TensorFileError, TypeError, ValueError) as error:
            raise EstimatesError(str(error)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Estimates:
        """Read a file; EstimatesError where it is missing, damaged, another, or holds numbers that do not fit."""
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
        except TensorFileError as error:
            raise EstimatesError(str(error)) from error
        try:
            numbers = sorted({int(name.split(".")[1]) for name in tensors})
            layers = {i: (tensors.pop(f"layers.{i}.scale"), tensors.pop(f"layers.{i}.offset")) for i in numbers}
            meta = parse_entry(metadata, "meta")
            if tensors:
                raise LookupError("something else")
            Object().check(meta, "meta")
            return cls(metadata["selector"], layers, meta)
        except (EstimatesError, JsonError, FieldError) as error:
            raise EstimatesError(f"{path} is damaged: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise EstimatesError(f"{path} is damaged: its metadata and tensors do not fit together") from error


def shared(path: str | os.PathLike[str]) -> Estimates:
    """`Estimates.load`, read once for all selectors of the process until the file changes."""
    place = Path(path)
    if not place.is_file():
        raise EstimatesError(f"{path} is not there; it is to be {WHAT}")
    return _loaded(place.resolve(), place.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Estimates:
    return Estimates.load(path)
