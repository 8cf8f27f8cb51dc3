"""How well the rows that one layer chooses serve another layer, which layers to choose by that, and its file.

Kascade, https://arxiv.org/abs/2512.16391. Letters: L layers, H KV heads.

The file, format version 1 (any safetensors reader opens it):

    similarity  [L,L,H,H] float32; entry [a,b,i,j], a <= b: the weight that head i of layer b puts on the rows that head
                j of layer a chooses, over that on the rows it would choose itself. 0 where a > b

    metadata (strings, as safetensors requires):
    format    "sparseattn-similarity"
    version   "1"
    layers    JSON list of the model's layers that it is of, ascending
    meta      JSON object: model id, config hash, heads, group, prompts, what was chosen and compared, versions
    sha256    SHA-256 of metadata and tensors (`tensor_files`)
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.utils.json_fields import FieldError, Items, Number, Object
from sparseattn.utils.json_text import JsonError, parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

FORMAT, VERSION = "sparseattn-similarity", "1"
WHAT = "a similarity of layers (`sparseattn train --method kascade` makes one)"


class SimilarityError(ValueError):
    """A similarity that cannot be read, written or used, in one sentence."""


class Similarity:
    """Of the layers of one model, how well one's choice serves another.

    Args:
        layers: their numbers, ascending.
        heads: `[L,L,H,H]` float32, as in the file.
        meta: where it comes from.

    Raises:
        SimilarityError: numbers that are no shares, or that do not fit the layers.
    """

    def __init__(self, layers: Sequence[int], heads: Tensor, meta: Mapping[str, Any] | None = None) -> None:
        count = len(layers)
        if not count or list(layers) != sorted({*layers}) or layers[0] < 0:
            raise SimilarityError(f"a similarity is of one layer or more, by rising number, got {list(layers)}")
        if heads.ndim != 4 or heads.shape[:2] != (count, count) or heads.shape[2] != heads.shape[3]:
            raise SimilarityError(
                f"a similarity of {count} layers is [L,L,H,H] = [{count}, {count}, H, H], got {list(heads.shape)}"
            )
        if heads.dtype != torch.float32 or not bool(((heads >= 0) & (heads <= 1.001)).all()):
            raise SimilarityError(f"a similarity is float32 shares, 0 to 1, got {heads.dtype} with others")
        self.layers, self.heads, self.meta = tuple(layers), heads, dict(meta or {})
        self._anchors: dict[int, list[int]] = {}

    @functools.cached_property
    def between(self) -> Tensor:
        """`[L,L]` float64: how well the first layer's choice serves the second, each of whose heads reads the list of
        that head which serves it best, mean over its heads."""
        return self.heads.double().amax(-1).mean(-1)

    def anchors(self, count: int, importance: Sequence[float] | None = None) -> list[int]:
        """Return the `count` layers, the first among them, whose choices serve all layers best, each layer reading that
        of the nearest anchor before it: the paper's dynamic programme.

        Args:
            count: 1 to L.
            importance: of each layer, by default all alike. The paper's is 1 less the cosine between a layer's hidden
                state before and after attention, which traces do not hold.

        Raises:
            SimilarityError: another count of anchors or layers.
        """
        if importance is None and count in self._anchors:
            return self._anchors[count]
        number = len(self.layers)
        if not 1 <= count <= number:
            raise SimilarityError(f"of {number} layers 1 to {number} are anchors, got {count}")
        weight = torch.ones(number) if importance is None else torch.tensor(list(importance))
        if len(weight) != number:
            raise SimilarityError(f"importance is of {number} layers, got {len(weight)}")
        served = torch.nn.functional.pad((self.between * weight.double()).cumsum(1), (1, 0)).tolist()

        def run(first: int, end: int) -> float:  # what layers first to end - 1 have of layer first's choice
            return float(served[first][end] - served[first][first])

        best = [(run(0, end), [0]) if end else (0.0, [0]) for end in range(number + 1)]
        for taken in range(1, count):
            best = [
                max(((best[at][0] + run(at, end), [*best[at][1], at]) for at in range(taken, end)), default=(-1.0, []))
                for end in range(number + 1)
            ]
        layers = [self.layers[at] for at in best[number][1]]
        if importance is None:
            self._anchors[count] = layers
        return layers

    def score(self, anchors: Sequence[int]) -> float:
        """Return the mean over layers of how well they are served, with these anchors."""
        return sum(float(self.between[self._at(self.read_by(anchors, b)), self._at(b)]) for b in self.layers) / len(
            self.layers
        )

    def read_by(self, anchors: Sequence[int], layer: int) -> int:
        """Return the anchor whose choice a layer reads; itself where none is before it."""
        return max((anchor for anchor in anchors if anchor <= layer), default=layer)

    def map(self, anchor: int, layer: int) -> list[int]:
        """For each KV head of `layer`, the KV head of `anchor` whose rows serve it best; SimilarityError for a layer
        that it does not hold."""
        return [int(head) for head in self.heads[self._at(anchor), self._at(layer)].argmax(-1)]

    def _at(self, layer: int) -> int:
        if layer not in self.layers:
            raise SimilarityError(
                f"the similarity of {self.meta.get('model', 'a model')} is of layers "
                f"{', '.join(map(str, self.layers))}, layer {layer} is asked for: make it dense (dense_layers), leave "
                f"it out (of a comparison) or calibrate it too"
            )
        return self.layers.index(layer)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all; SimilarityError where it cannot."""
        try:
            meta = json.dumps(self.meta, sort_keys=True, allow_nan=False)
            metadata = {"format": FORMAT, "version": VERSION, "layers": json.dumps(self.layers), "meta": meta}
            save_tensors(path, {"similarity": self.heads}, metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise SimilarityError(f"{os.fspath(path)} is not written: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Similarity:
        """Read a file.

        Raises:
            SimilarityError: missing, damaged, no similarity, or of another version.
        """
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
        except TensorFileError as error:
            raise SimilarityError(str(error)) from error
        try:
            layers, meta = parse_entry(metadata, "layers"), parse_entry(metadata, "meta")
            Items(Number(0, whole=True), 1).check(layers, "layers")
            Object().check(meta, "meta")
            return cls(layers, tensors["similarity"], meta)
        except (SimilarityError, JsonError, FieldError) as error:
            raise SimilarityError(f"{path} is a damaged similarity: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SimilarityError(
                f"{path} is a damaged similarity: its metadata and tensors do not fit together"
            ) from error


def shared(path: str | os.PathLike[str]) -> Similarity:
    """`Similarity.load`, read once for all selectors of the process until the file changes."""
    place = Path(path)
    if not place.is_file():
        raise SimilarityError(f"{path} is no similarity file (`sparseattn train --method kascade` makes one)")
    return _loaded(place.resolve(), place.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Similarity:
    return Similarity.load(path)
