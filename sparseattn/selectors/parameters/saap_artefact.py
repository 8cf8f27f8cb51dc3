"""SAAP's artefact: what is trained once per model, k-means centroids of keys and classifiers of queries.

Saap, https://arxiv.org/abs/2502.08246. Letters: H KV heads, G query heads per KV head, D head size, C buckets, F hidden
width, A classifiers (H, or H*G where every query head has its own).

The file, format version 2 (any safetensors reader opens it):

    layers.{i}.centroids                            [H,C,D]   unit length
    layers.{i}.classifier.w1, .b1, .w2, .b2         [A,F,D] [A,F] [A,C,F] [A,C]; BatchNorm is folded into w1 and b1
    layers.{i}.classifier.skip                      [A,C,D]   the residual variant alone
    rope.{k}.inv_freq                               [R/2] f32 frequencies of the k-th distinct RoPE

    metadata (strings, as safetensors requires):
    format    "sparseattn-saap"
    version   "2"
    roped     "true": keys and queries as attention sees them; "false": de-roped
    layers    JSON list of {"index", "rope"}; `rope` is a k or null
    ropes     JSON list of {"scaling", "interleaved"}, one for each k
    meta      JSON object: model id, config hash, heads, group, size, recipe, prompts, validation figures, versions
    sha256    SHA-256 of metadata and tensors (`tensor_files`)

Tensors may be stored in half precision and are float32 in memory, centroids of unit length again. Version 1 is the same
with a hash of the tensors alone. It is read with a warning: nothing tells whether its metadata is what was written.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_partition import ArtefactError, Classifier, Partition
from sparseattn.utils.json_text import JsonError, parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors
from sparseattn.utils.tensors import STORED

FORMAT = "sparseattn-saap"
VERSION = "2"
OLDER = "1"
WHAT = "an artefact (`sparseattn train` makes one)"
SHIPPED = ("reference", "smollm2")  # each called as the model that it is for
AUTO = "auto"  # stands for the one that ships for a layer's RoPE


class Artefact:
    """Partitions of some layers of one model.

    Attributes:
        layers: layer -> Partition.
        roped: whether keys and queries are taken as attention sees them; else de-roped.
        ropes: layer -> the RoPE that it was trained with; a layer without one is not in it.
        meta: where it comes from (see the module).

    Raises:
        ArtefactError: no layer, or a layer to be de-roped whose RoPE is not given.
    """

    def __init__(
        self,
        layers: Mapping[int, Partition],
        *,
        roped: bool = False,
        ropes: Mapping[int, Rope] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = dict(sorted(layers.items()))
        self.roped = roped
        self.ropes = dict(sorted((ropes or {}).items()))
        self.meta = dict(meta or {})
        if not self.layers:
            raise ArtefactError("an artefact holds at least one layer")
        lacking = [index for index in self.layers if index not in self.ropes]
        if lacking and not roped:
            raise ArtefactError(f"layer {lacking[0]} is de-roped, so the artefact needs its RoPE")
        if not set(self.ropes) <= set(self.layers):
            raise ArtefactError(f"the artefact has RoPEs of layers {list(self.ropes)} and layers {list(self.layers)}")

    def __repr__(self) -> str:
        return f"Artefact(model={self.meta.get('model')!r}, layers={tuple(self.layers)}, roped={self.roped})"

    def holds(self, layer: int) -> Partition:
        """Return the partition of a layer; ArtefactError where it has none, saying what to do with such a layer."""
        if layer not in self.layers:
            raise ArtefactError(
                f"the artefact of {self.meta.get('model', 'a model')} holds layers "
                f"{', '.join(map(str, self.layers))}, layer {layer} is asked for: leave it out (of a comparison), make "
                f"it dense (dense_layers) or give it another method (selector by layer)"
            )
        return self.layers[layer]

    def check(self, layer: int, heads: int, group: int | None, size: int, rope: Rope | None) -> Partition:
        """Return the partition of a model's layer; ArtefactError, with both sides, where it was not trained for that.

        The error names the artefact that ships for such a layer, where there is one.

        Args:
            layer: number of the layer.
            heads, group, size: the model's H, G (None: not known yet) and D.
            rope: the RoPE that the layer applies, or None.
        """
        model = self.meta.get("model", "a model")
        partition = self.holds(layer)
        own_heads, _, own_size = partition.centroids.shape
        own_group = self.meta.get("group", group)
        if (own_heads, own_group, own_size) != (heads, group or own_group, size):
            here = f"{heads}" if group is None else f"{heads} with {group}"
            raise ArtefactError(
                f"the artefact of {model} is for {own_heads} KV heads with {own_group} query heads each of size "
                f"{own_size}, layer {layer} here has {here} of size {size}{_better(heads, group, size, rope)}"
            )
        classifier, each = partition.classifier, group or own_group or 1
        if classifier is not None and len(classifier.w1) not in (heads, heads * each):
            raise ArtefactError(
                f"the artefact of {model} has {len(classifier.w1)} classifiers in layer {layer}, "
                f"{heads} or {heads * each} are needed"
            )
        ours = self.ropes.get(layer)
        if not same_rope(ours, rope):
            raise ArtefactError(
                f"the artefact of {model} was trained with {rope_in_words(ours)}, layer {layer} here applies "
                f"{rope_in_words(rope)}{_better(heads, group, size, rope)}"
            )
        return partition

    def save(self, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32) -> None:
        """Write the file, whole or not at all, with its tensors in `dtype` (float32, float16 or bfloat16).

        Raises:
            ArtefactError: another dtype, numbers beyond it, `meta` that JSON cannot hold, or a file that cannot be
                written.
        """
        if dtype not in STORED.values():
            raise ArtefactError(f"an artefact is stored as float32, float16 or bfloat16, got {dtype}")
        tensors: dict[str, Tensor] = {}
        distinct: list[Rope] = []
        listed = []
        for index, partition in self.layers.items():
            tensors[f"layers.{index}.centroids"] = partition.centroids
            if partition.classifier is not None:
                for name, tensor in partition.classifier.tensors().items():
                    tensors[f"layers.{index}.classifier.{name}"] = tensor
            rope = self.ropes.get(index)
            known = next((k for k, other in enumerate(distinct) if rope is not None and rope.equals(other)), None)
            if rope is not None and known is None:
                known = len(distinct)
                distinct.append(rope)
            listed.append({"index": index, "rope": known})
        tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in tensors.items()}
        _check_numbers(tensors)
        for k, rope in enumerate(distinct):
            tensors[f"rope.{k}.inv_freq"] = rope.inv_freq
        try:
            meta = json.dumps(self.meta, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArtefactError(f"an artefact's meta is what JSON can hold: {error}") from error
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "roped": json.dumps(self.roped),
            "layers": json.dumps(listed),
            "ropes": json.dumps([{"scaling": rope.scaling, "interleaved": rope.interleaved} for rope in distinct]),
            "meta": meta,
        }
        try:
            save_tensors(path, tensors, metadata)
        except TensorFileError as error:
            raise ArtefactError(str(error)) from error

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Artefact:
        """Read an artefact file, or one that ships by its name ("reference", "smollm2": the models that they are for).

        Raises:
            ArtefactError: missing, damaged, not an artefact, of another version, or with numbers that are not finite.
        """
        path = locate(path_or_name)
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT, older=OLDER)
        except TensorFileError as error:
            raise ArtefactError(str(error)) from error
        try:
            _check_numbers(tensors)
            ropes = [
                Rope(tensors.pop(f"rope.{k}.inv_freq"), entry["scaling"], entry["interleaved"])
                for k, entry in enumerate(parse_entry(metadata, "ropes"))
            ]
            layers: dict[int, Partition] = {}
            of_layer: dict[int, Rope] = {}
            for entry in parse_entry(metadata, "layers"):
                index = int(entry["index"])
                layers[index] = _partition(tensors, f"layers.{index}.")
                if entry["rope"] is not None:
                    of_layer[index] = ropes[entry["rope"]]
            meta, roped = parse_entry(metadata, "meta"), parse_entry(metadata, "roped")
            if tensors or not isinstance(meta, dict) or not isinstance(roped, bool):
                raise ArtefactError("it holds what no artefact has")
            artefact = cls(layers, roped=roped, ropes=of_layer, meta=meta)
        except (ArtefactError, JsonError) as error:
            raise ArtefactError(f"{path} is a damaged artefact: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(
                f"{path} is a damaged artefact: its metadata and tensors do not fit together"
            ) from error
        if metadata["version"] == OLDER:
            warnings.warn(
                f"{path} is an artefact of version {OLDER}, whose hash leaves out its metadata (model, RoPE, layers, "
                f"recipe); if you trust it, `Artefact.load(path).save(path, dtype)` makes it one of version {VERSION}",
                stacklevel=2,
            )
        return artefact


def shared(path_or_name: str | os.PathLike[str]) -> Artefact:
    """Return `Artefact.load`, read once for all layers and selectors of the process until the file changes."""
    path = locate(path_or_name)
    stat = path.stat()
    return _loaded(path.resolve(), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, changed: int, size: int) -> Artefact:
    return Artefact.load(path)


def locate(path_or_name: str | os.PathLike[str]) -> Path:
    """Return the file that a path, or the name of one that ships, means; ArtefactError where there is none."""
    path = Path(path_or_name)
    if os.fspath(path_or_name) in SHIPPED:
        path = Path(str(importlib.resources.files("sparseattn") / "data" / "saap" / f"{path_or_name}.safetensors"))
    if not path.is_file():
        names = ", ".join(SHIPPED)
        raise ArtefactError(f"{path} is no artefact file (`sparseattn train` makes one), nor one that ships ({names})")
    return path


def shipped_for(rope: Rope | None) -> str:
    """Return the name of the artefact that ships for layers of this RoPE; ArtefactError where none does.

    A RoPE is what a layer is known by before its keys come; `Artefact.check` sees to the shapes then.
    """
    for name in SHIPPED:
        if rope is not None and any(same_rope(rope, theirs) for theirs in _facts(name)[1]):
            return name
    raise ArtefactError(
        f"no artefact that ships ({', '.join(SHIPPED)}) is for a layer with {rope_in_words(rope)}: train one "
        f"(`sparseattn train`) and name it, artefact=FILE"
    )


@functools.cache
def _facts(name: str) -> tuple[tuple[int, int, int], tuple[Rope, ...]]:
    """Return KV heads, query heads each and head_dim of the artefact that ships as `name`, and its RoPEs."""
    artefact = Artefact.load(name)
    distinct: list[Rope] = []
    for rope in artefact.ropes.values():
        if not any(rope.equals(other) for other in distinct):
            distinct.append(rope)
    return (artefact.meta["heads"], artefact.meta["group"], artefact.meta["size"]), tuple(distinct)


def _better(heads: int, group: int | None, size: int, rope: Rope | None) -> str:
    """Return half a sentence that names the artefact that ships for such a layer, or nothing."""
    for name in SHIPPED:
        shape, ropes = _facts(name)
        if shape == (heads, group or shape[1], size) and any(same_rope(rope, theirs) for theirs in ropes):
            return f"; artefact={name}, which ships, is for such a layer"
    return ""


def _check_numbers(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED.values():
            raise ArtefactError(f"tensors are float32, float16 or bfloat16, {name} is {tensor.dtype}")
        if not tensor.isfinite().all():
            raise ArtefactError(f"{name} has numbers that are not finite in {tensor.dtype}")


def _partition(tensors: dict[str, Tensor], prefix: str) -> Partition:
    """Return a layer's partition, whose tensors are taken out of `tensors`."""
    centroids = F.normalize(tensors.pop(f"{prefix}centroids").float(), dim=-1)
    names = [field.name for field in fields(Classifier) if f"{prefix}classifier.{field.name}" in tensors]
    parts = {name: tensors.pop(f"{prefix}classifier.{name}").float() for name in names}
    return Partition(centroids, Classifier(**parts) if parts else None)


def same_rope(a: Rope | None, b: Rope | None) -> bool:
    """Say whether both are one rotation, or none at all, but for the rounding of frequencies that were computed
    elsewhere."""
    if a is None or b is None:
        return a is b
    if a.interleaved != b.interleaved or a.rotated != b.rotated or abs(a.scaling - b.scaling) > 1e-5 * a.scaling:
        return False
    return torch.allclose(a.inv_freq.cpu(), b.inv_freq.cpu(), rtol=1e-5, atol=0)


def rope_in_words(rope: Rope | None) -> str:
    """Return a RoPE as a sentence names it."""
    if rope is None:
        return "no RoPE"
    slow, layout = rope.inv_freq.min().item(), "interleaved" if rope.interleaved else "halves"
    return f"a RoPE of {rope.rotated} dimensions ({layout}, slowest {slow:.4g} radians, scaling {rope.scaling:.4g})"
