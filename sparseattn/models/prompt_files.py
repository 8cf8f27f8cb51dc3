"""Prompt caches of a model: every layer of a `SparseCache` in one file, see `cache.prompt_files`.

The metadata's `said` holds the model's fingerprint and name, and of each layer its RoPE and what it is: "sparse" with
what is said of the cache of each part of its heads, "native" where the model's own index chooses, "dense" and
"sliding", whose rows transformers keeps, or "keyless", which reads another layer's rows or none and has no tensors.
Tensors of layer i begin with `layers.i/`, those of its part p with `layers.i/p/`, and with `layers.i/kept/` what layers
of a model with an index of its own hold beside: the keys of that index, rows or latents.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparseattn.cache import prompt_files
from sparseattn.cache.prompt_files import FORMAT, VERSION, WHAT, PromptFileError
from sparseattn.cache.rope_facts import ROPE, check_rope, rope_said
from sparseattn.core.rope import Rope
from sparseattn.models.attention_routing import name_of
from sparseattn.models.index_keys import KeepsIndex
from sparseattn.models.input_device import input_device
from sparseattn.models.native_layer import NativeLayer
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import KEEPS_NOTHING, DynamicLayer, DynamicSlidingWindowLayer
from sparseattn.roles.fingerprint import fingerprint
from sparseattn.utils.json_text import parse_entry
from sparseattn.utils.tensor_files import load_tensors, save_tensors

KEYLESS = "keyless"
KINDS: dict[type | None, str] = {DynamicLayer: "dense", DynamicSlidingWindowLayer: "sliding", KEEPS_NOTHING: KEYLESS}
KEPT = "kept"
REAL = "real"  # which tokens are no padding, `[B,T]` bool


class SavedModel(Protocol):
    """What is looked at of a `SparseCache`."""

    model: Any
    layers: list[Any]
    prepared: Any

    @property
    def real(self) -> Tensor | None: ...

    def reset(self) -> None: ...


def save(cache: SavedModel, path: str | os.PathLike[str]) -> None:
    """Write what all layers hold, see `SparseCache.save`."""
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        try:
            parts, said = _written(layer)
        except ValueError as error:
            raise PromptFileError(f"layer {index}: {error}") from error
        tensors |= {f"layers.{index}/{name}": part for name, part in parts.items()}
        layers.append({**said, ROPE: rope_said(_rope(cache, index))})
    if cache.real is not None:
        tensors[REAL] = cache.real
    said = {**_model(cache.model), "layers": layers}
    save_tensors(path, tensors, {"format": FORMAT, "version": VERSION, "said": json.dumps(said)})


def load(cache: SavedModel, path: str | os.PathLike[str]) -> Tensor | None:
    """Fill the layers of an empty cache, see `SparseCache.load`.

    Returns:
        `[B,T]` bool, which tokens are no padding; None: all.
    """
    metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
    try:
        said = parse_entry(metadata, "said")
        _check_model(said, cache)
        for index, (layer, entry) in enumerate(zip(cache.layers, said["layers"], strict=True)):
            check_rope(entry, _rope(cache, index), index)
            _check(layer, entry)
        real = tensors.pop(REAL, None)
        by_layer = _by_layer(tensors, len(cache.layers))
        known, others = cache.prepared.layers, input_device(cache.model)
        for index, (layer, entry, parts) in enumerate(zip(cache.layers, said["layers"], by_layer, strict=True)):
            _fill(layer, entry, parts, known[index].device if index in known else others)
        return real
    except (ValueError, KeyError, TypeError) as error:
        cache.reset()
        why = str(error) if isinstance(error, ValueError) else f"it lacks {error}"
        raise PromptFileError(f"{os.fspath(path)}: {why}") from error


def _rope(cache: SavedModel, index: int) -> Rope | None:
    """Return what a layer was seen to apply; None where it is no softmax attention, or nothing fixed."""
    known = cache.prepared.layers
    return known[index].rope if index in known else None


def _model(model: Any) -> dict[str, str]:
    return {"model": name_of(model), "fingerprint": fingerprint(model.named_parameters()), "dtype": str(model.dtype)}


def _check_model(said: Any, cache: SavedModel) -> None:
    """Refuse what is of another model, dtype or number of layers: ValueError."""
    if not isinstance(said, dict) or not isinstance(said.get("layers"), list):
        raise ValueError("holds one cache and no model's layers: KVCache.load reads it")
    mine = _model(cache.model)
    if said.get("fingerprint") != mine["fingerprint"]:
        raise ValueError(
            f"it was written with other weights, {said.get('model')} of fingerprint {said.get('fingerprint')}; here "
            f"are {mine['model']} of {mine['fingerprint']}"
        )
    if said.get("dtype") != mine["dtype"]:
        raise ValueError(f"it was written by a model in {said.get('dtype')}, and this one is in {mine['dtype']}")
    if len(said["layers"]) != len(cache.layers):
        raise ValueError(f"it has {len(said['layers'])} layers, and the model has {len(cache.layers)}")


def _by_layer(tensors: Mapping[str, Tensor], layers: int) -> list[dict[str, Tensor]]:
    by_layer: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    for name, tensor in tensors.items():
        layer, _, inner = name.partition("/")
        number = layer.removeprefix("layers.")
        if not number.isdecimal() or int(number) >= layers:
            raise ValueError(f"it holds {name}, which is of no layer")
        by_layer[int(number)][inner] = tensor
    return by_layer


# -- one layer ---------------------------------------------------------------------------------------------------------


def _written(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a layer's tensors, and what is said of it."""
    kind = _kind(layer)
    if kind == KEYLESS:
        return {}, {"kind": kind}
    if not isinstance(layer, SparseLayer):
        length = getattr(layer, "cumulative_length", None)
        return {"keys": layer.keys, "values": layer.values}, {"kind": kind, "columns": length}
    if not layer.columns:
        raise RuntimeError("the cache is empty: prefill a prompt first")
    tensors: dict[str, Tensor] = {}
    parts = []
    for number, part in enumerate(layer.parts):
        tensors_of_part, said = prompt_files.written(part.rows)
        tensors |= {f"{number}/{name}": tensor for name, tensor in tensors_of_part.items()}
        parts.append({**said, "heads": _heads(part)})
    if isinstance(layer, KeepsIndex):
        tensors |= {f"{KEPT}/{name}": tensor for name, tensor in layer.kept().items()}
    return tensors, {"kind": kind, "columns": layer.columns, "parts": parts}


def _kind(layer: Any) -> str:
    """Return what kind of layer it is, as files name it; ValueError where none of it is written."""
    if isinstance(layer, SparseLayer):
        return "native" if isinstance(layer, NativeLayer) else "sparse"
    if type(layer) not in KINDS:
        raise ValueError(f"a prompt cache holds keys and values, and this layer keeps a {type(layer).__name__}")
    return KINDS[type(layer)]


def _heads(part: Any) -> Sequence[int] | None:
    return None if part.share.heads is None else list(part.share.heads.which)


def _check(layer: Any, said: Mapping[str, Any]) -> None:
    """Refuse what was written of another kind of layer, or of a cache with other settings: ValueError."""
    kind = _kind(layer)
    if said["kind"] != kind:
        raise ValueError(f"a layer was {said['kind']} when it was written, and is {kind} here")
    if not isinstance(layer, SparseLayer):
        return
    mine, theirs = [_heads(part) for part in layer.parts], [part["heads"] for part in said["parts"]]
    if mine != theirs:
        raise ValueError(f"a layer's KV heads were split as {theirs} when it was written, and are {mine} here")
    for part, entry in zip(layer.parts, said["parts"], strict=True):
        prompt_files.check(part.rows, entry)


def _fill(layer: Any, said: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> None:
    if said["kind"] == KEYLESS:
        return
    if not isinstance(layer, SparseLayer):
        keys, values = tensors["keys"].to(device), tensors["values"].to(device)
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if said["columns"] is not None:
            layer.cumulative_length = int(said["columns"])
        return
    for number, (part, entry) in enumerate(zip(layer.parts, said["parts"], strict=True)):
        prompt_files.fill(part.rows, entry, _under(str(number), tensors), device)
    if isinstance(layer, KeepsIndex):
        layer.keep(_under(KEPT, tensors), int(said["columns"]), device)
    if layer.parts:
        layer.lazy_initialization(layer.parts[0].rows.keys, layer.parts[0].rows.values)
    layer.columns = int(said["columns"])


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}/")
    }
