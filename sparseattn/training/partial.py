"""How far a run of training is: the folder `OUT.partial` that it is resumed from, and what it reports.

The folder holds a file for each finished head, the centroids and the last state of the heads at work, and whose run it
is. All ranks need to see it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparseattn.training.prompts import Prompts
from sparseattn.training.recipe import TrainingError
from sparseattn.utils.files import write_atomic
from sparseattn.utils.json_text import fields, parse_entry, parse_object
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = "sparseattn-saap-state"
VERSION = "2"


@dataclass(frozen=True)
class Progress:
    """Where a run is: a stage ("k-means", "targets", "classifier") of a layer, and what it last measured."""

    layer: int
    stage: str
    done: int
    total: int
    loss: float | None = None
    recovered: float | None = None


@dataclass(frozen=True)
class Partial:
    """The folder of a run that is not done: states, finished heads, and whose they are."""

    path: Path
    identity: str

    def open(self) -> None:
        """Make the folder, or accept one of the same run; raise TrainingError for another."""
        shutil.rmtree(self._gone, ignore_errors=True)
        stamp = self.path / "run.json"
        if self.path.exists():
            try:
                theirs = parse_object(stamp.read_bytes())["identity"]
            except FileNotFoundError:
                theirs = None if any(self.path.glob("*.safetensors")) or not self.path.is_dir() else self.identity
            except (OSError, ValueError, LookupError, TypeError):
                theirs = None
            if theirs != self.identity:
                raise TrainingError(
                    f"{self.path} is a run of other traces, options or versions that is not done; delete it, or go on "
                    "with it by the same command"
                )
        try:
            self.path.mkdir(exist_ok=True)
            write_atomic(stamp, json.dumps({"identity": self.identity}).encode())
        except OSError as error:
            with contextlib.suppress(OSError):  # not empty: of a run that goes on
                self.path.rmdir()
            raise TrainingError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def remove(self) -> None:
        """In one step: a run that is killed while its files go must not look like another one that is not done."""
        os.replace(self.path, self._gone)
        shutil.rmtree(self._gone, ignore_errors=True)

    @property
    def _gone(self) -> Path:
        return self.path.with_name(f"{self.path.name}.done")

    def remove_if_bare(self) -> None:
        """Remove the folder if nothing is done yet."""
        if not any(self.path.glob("*.safetensors")):
            self.remove()

    def finished(self, layer: int, head: int) -> Path:
        return self.path / f"layer-{layer}.head-{head}.safetensors"

    def layer(self, layer: int) -> Path:
        """Of a method whose heads are learned together."""
        return self.path / f"layer-{layer}.safetensors"

    def centroids(self, layer: int, head: int) -> Path:
        return self.path / f"layer-{layer}.head-{head}.centroids.safetensors"

    def state(self, layer: int, heads: Sequence[int]) -> Path:
        return self.path / f"layer-{layer}.heads-{'-'.join(map(str, heads))}.state.safetensors"

    @staticmethod
    def write(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a file; raise TrainingError where that fails, or for numbers that `read` would refuse as damaged."""
        for field, value in fields(facts):
            if isinstance(value, float) and not math.isfinite(value):
                raise TrainingError(f"{path} cannot be written: {field} is {value}, and a finite number is due")
        try:
            said = json.dumps(facts, allow_nan=False)
            save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "facts": said})
        except TensorFileError as error:
            raise TrainingError(str(error)) from error

    @staticmethod
    def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, "a state of training")
            return tensors, parse_entry(metadata, "facts")
        except (TensorFileError, LookupError, ValueError) as error:
            raise TrainingError(f"{path} is damaged; delete it, and the run goes on without it") from error


def identity(recipe: DataclassInstance, prompts: Prompts) -> str:
    """SHA-256 of all that decides the weights, but for rounding: recipe, prompts, layers and torch's version.

    And of the version of states: those of another one cannot be read.
    """
    known = {
        "states": VERSION,
        "recipe": asdict(recipe),
        "train": [prompt.sha256 for prompt in prompts.train],
        "held_out": [prompt.sha256 for prompt in prompts.held_out],
        "layers": list(prompts.shapes),
        "stored": [
            [str(prompt.trace.dtype), [prompt.trace.shapes[index].queries for index in prompts.shapes]]
            for prompt in (*prompts.train, *prompts.held_out)
        ],
        "config": prompts.config_hash,
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
