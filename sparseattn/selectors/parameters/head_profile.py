"""A file of how much a KV head's output changes if it streams, reading sink and newest rows alone, for DuoAttention.

https://arxiv.org/abs/2410.10819. `training.head_errors` measures it on traces, `gates` makes scores of heads of it for
`roles.papers.duo`.

The file, format version 1 (any safetensors reader opens it):

    layers.{i}.error    [H] float32, 0 or more

    metadata (strings, as safetensors requires):
    format    "sparseattn-heads"
    version   "1"
    meta      JSON object: model, traces, sink, window, queries, versions
    sha256    SHA-256 of metadata and tensors (`tensor_files`)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparseattn.utils.json_fields import FieldError, Object
from sparseattn.utils.json_text import JsonError, parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

FORMAT, VERSION = "sparseattn-heads", "1"
WHAT = "a profile of heads (`sparseattn train --method duo` makes one)"
WEIGHT = 0.05  # of the gates in DuoAttention's objective


class ProfileError(ValueError):
    """A profile of heads that cannot be read, written or used, in one sentence."""


@dataclass(frozen=True, eq=False)
class HeadProfile:
    """Of the KV heads of some layers of a model, what streaming does to their outputs.

    Args:
        layers: layer -> `[H]` float32, the mean squared difference of a head's output, as a share of the mean square of
            its layer's outputs.
        meta: where it comes from, for JSON.

    Raises:
        ProfileError: no layer, or numbers of another shape or range.
    """

    layers: Mapping[int, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProfileError("a profile of heads is of at least one layer")
        for index, error in self.layers.items():
            if error.ndim != 1 or not len(error) or error.dtype != torch.float32:
                raise ProfileError(f"errors of layer {index} are float32 [H], got {error.dtype} {list(error.shape)}")
            if not bool((error >= 0).all() and error.isfinite().all()):
                raise ProfileError(f"errors of layer {index} are finite and 0 or more")

    def gates(self, weight: float = WEIGHT) -> dict[int, list[float]]:
        """Return DuoAttention's gate of each KV head, 0 streaming to 1 retrieval, as if heads were alone.

        With a gate a, a head's output is `a full + (1 - a) streaming`, so that its error is `(1 - a)^2 e`. The paper's
        objective is the error of the model's last hidden states, and `weight` times the sum of the gates; of one head's
        own error, `(1 - a)^2 e + weight a`, the least is at `1 - weight / (2 e)`, cut to 0 and 1.

        Args:
            weight: above 0; 0.05 in the authors' runs.

        Raises:
            ValueError: another weight.
        """
        if not weight > 0:
            raise ValueError(f"weight is above 0, got {weight}")
        made = {index: (1 - weight / (2 * error.double())).clamp(min=0.0) for index, error in self.layers.items()}
        return {index: gate.tolist() for index, gate in made.items()}

    def threshold(self, share: float, weight: float = WEIGHT) -> float:
        """Return the threshold for `duo` with which a `share` of all heads streams, those of the least errors; ties
        stream too. ValueError for a share outside 0 to 1."""
        if not 0 <= share <= 1:
            raise ValueError(f"share is the share of heads that stream, 0 to 1, got {share}")
        gates = sorted(gate for layer in self.gates(weight).values() for gate in layer)
        count = round(share * len(gates))
        return gates[count - 1] if count else -1.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; ProfileError where it cannot."""
        metadata = {"format": FORMAT, "version": VERSION}
        tensors = {f"layers.{index}.error": error for index, error in self.layers.items()}
        try:
            save_tensors(path, tensors, metadata | {"meta": json.dumps(self.meta, sort_keys=True, allow_nan=False)})
        except (TensorFileError, TypeError, ValueError) as error:
            raise ProfileError(str(error)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HeadProfile:
        """Read a file; ProfileError where it is missing, damaged or another."""
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
        except TensorFileError as error:
            raise ProfileError(str(error)) from error
        try:
            numbers = sorted(int(name.split(".")[1]) for name in tensors)
            layers = {index: tensors.pop(f"layers.{index}.error") for index in numbers}
            meta = parse_entry(metadata, "meta")
            Object().check(meta, "meta")
            return cls(layers, meta)
        except (ProfileError, JsonError, FieldError) as error:
            raise ProfileError(f"{path} is damaged: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            raise ProfileError(f"{path} is damaged: its metadata and tensors do not fit together") from error
