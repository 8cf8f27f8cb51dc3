"""What methods learn from traces beforehand: the channels' statistics, and the file that keeps parameters by layer.

Loki, https://arxiv.org/abs/2406.02542; Double Sparsity, https://arxiv.org/abs/2408.07092. Letters: H KV heads, G query
heads per KV head, D head size, S subspaces of d channels, K centroids. Keys and queries are as attention sees them,
after RoPE, but for "loki" keys may be those before it, and for "a2ats", "locret" and "seer" they are.

The file, format version 1 (any safetensors reader opens it):

    layers.{i}.{name}        float32, the parameters of layer i; for "loki" basis [H,D,D] (a column is a principal
                             direction, that of the largest variance first) and variance [H,D], for "doublesparsity"
                             importance [H,D], the mean of |q_i k_i|, for "querypq" centre [H,D], turn [H,D,D], back
                             [H,D,D] and centroids [H,S,K,d], see `query_metric.codes_of`, and where keys are coded
                             without their mean before RoPE root [H,D], that mean, for "a2ats" factor [H,D,D]
                             and centroids [H,S,K,d], S = 1, see `window_codes`, for "hata" directions [H,D,b], for
                             "indexer" keys [H,D,r], queries [H,G,D,r], low and step [H,r], for "hashattention" what
                             `hash_networks` names, for "seer" keys [H,D,3,D] and queries [H,G,D,D], see `block_gate`,
                             for "locret" keys and values [H,D,W], queries [H,G,D,W] and out [H,W], see
                             `retaining_heads`
    layers.{i}.inv_freq      [R/2] f32, the frequencies of the layer's RoPE, where it is known

    metadata (strings, as safetensors requires):
    format    "sparseattn-calibration"
    version   "1"
    method    "loki", "doublesparsity", "querypq", "a2ats", "hata", "hashattention", "indexer", "seer" or "locret"
    roped     "true": keys after RoPE; "false": before it
    ropes     JSON object: layer -> {"scaling", "interleaved"}
    meta      JSON object: model id, config hash, heads, group, size, prompts, tokens, versions
    sha256    SHA-256 of metadata and tensors (`tensor_files`)
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.selectors.parameters.saap_artefact import rope_in_words, same_rope
from sparseattn.utils.json_fields import FieldError, Flag, Object
from sparseattn.utils.json_text import JsonError, parse_entry
from sparseattn.utils.tensor_files import TensorFileError, load_tensors, save_tensors

FORMAT = "sparseattn-calibration"
VERSION = "1"
MAKE = "`sparseattn train --method METHOD` makes one"
WHAT = f"a calibration ({MAKE})"
CHUNK = 8192  # rows summed at a time


class CalibrationError(ValueError):
    """A calibration that cannot be read, written or used for a layer, in one sentence."""


@dataclass(frozen=True)
class Statistic:
    """What a method's parameters are made of: sums over tokens, which add up over prompts.

    Args:
        names: the parameters' names.
        sums: of keys `[H,n,D]` and the queries `[H,G,n,D]` of the same tokens (None where it takes none).
        solved: from the sums to the parameters, float32.
        queries: whether it takes queries.
    """

    names: tuple[str, ...]
    sums: Callable[[Tensor, Tensor | None], dict[str, Tensor]]
    solved: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    queries: bool

    def of(self, keys: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Return the parameters of one prompt's keys and queries, on the keys' device."""
        return {name: part.to(keys.device) for name, part in self.solved(self.sums(keys, queries)).items()}


def _key_moments(keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
    """Count, sum `[H,D]` and sum of outer products `[H,D,D]`, float64 on the CPU."""
    heads, tokens, size = keys.shape
    total = keys.new_zeros(heads, size, dtype=torch.float64)
    for part in keys.float().split(CHUNK, 1):
        total += part.sum(1)
    return {"count": torch.tensor(tokens, dtype=torch.float64), "sum": total.cpu(), "outer": outer(keys).cpu()}


def outer(rows: Tensor) -> Tensor:
    """Return the sum of outer products of rows `[H,n,D]` with themselves: `[H,D,D]` float64, without a second copy of
    them."""
    made = rows.new_zeros(len(rows), rows.shape[2], rows.shape[2], dtype=torch.float64)
    for part in rows.split(CHUNK, 1):
        made += part.float().mT @ part.float()
    return made


def _principal(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    mean = sums["sum"] / sums["count"]  # [H,D]
    covariance = sums["outer"] / sums["count"] - mean[:, :, None] * mean[:, None]
    variance, basis = torch.linalg.eigh(covariance)
    return {"basis": basis.flip(-1).float(), "variance": variance.flip(-1).clamp(min=0).float()}


def _products(keys: Tensor, queries: Tensor | None) -> dict[str, Tensor]:
    """Count, and sum of `|q_i k_i|` over tokens and the group's query heads `[H,D]`, float64 on the CPU."""
    assert queries is not None
    heads, group, tokens, size = queries.shape
    total = keys.new_zeros(heads, size, dtype=torch.float64)
    for query, part in zip(queries.split(CHUNK, 2), keys.split(CHUNK, 1), strict=True):
        total += (query.float().abs().sum(1) * part.float().abs()).sum(1)
    return {"count": torch.tensor(group * tokens, dtype=torch.float64), "product": total.cpu()}


def _importance(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"importance": (sums["product"] / sums["count"]).float()}


METHODS = {
    "loki": Statistic(("basis", "variance"), _key_moments, _principal, False),
    "doublesparsity": Statistic(("importance",), _products, _importance, True),
}
BEFORE = ("a2ats", "locret", "seer")  # of keys before RoPE in any case
# Method -> its parameters and their sizes, by letters; all but H and D are the file's own.
PARAMETERS = {
    "loki": {"basis": "HDD", "variance": "HD"},
    "doublesparsity": {"importance": "HD"},
    "querypq": {"centre": "HD", "turn": "HDD", "back": "HDD", "centroids": "HSKd"},
    "a2ats": {"factor": "HDD", "centroids": "HSKd"},
    "hata": {"directions": "HDb"},
    "indexer": {"keys": "HDr", "queries": "HGDr", "low": "Hr", "step": "Hr"},
    "seer": {"keys": "HDcD", "queries": "HGDD"},
    "hashattention": {
        "keys1": "HDW",
        "keys1_bias": "HW",
        "keys2": "HWW",
        "keys2_bias": "HW",
        "keys3": "HWb",
        "keys3_bias": "Hb",
        "queries1": "HGDW",
        "queries1_bias": "HGW",
        "queries2": "HGWW",
        "queries2_bias": "HGW",
        "queries3": "HGWb",
        "queries3_bias": "HGb",
    },
    "locret": {"keys": "HDW", "queries": "HGDW", "values": "HDW", "out": "HW"},
}
OPTIONAL = {"querypq": {"root": "HD"}}  # likewise, what all layers of a file have or none


class Calibration:
    """Parameters of some layers of one model.

    Attributes:
        method: one of `PARAMETERS`.
        layers: layer -> its parameters by name (see the module).
        roped: whether it is of keys after RoPE.
        ropes: layer -> its RoPE, where it is known.
        meta: where it comes from.

    Raises:
        CalibrationError: another method, keys before RoPE for one that takes none, no layer, or parameters of other
            names or shapes.
    """

    def __init__(
        self,
        method: str,
        layers: Mapping[int, Mapping[str, Tensor]],
        *,
        roped: bool = True,
        ropes: Mapping[int, Rope] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        if method not in PARAMETERS:
            raise CalibrationError(f"a calibration is of one of {', '.join(PARAMETERS)}, got {method!r}")
        if not roped and method not in BEFORE and (method not in METHODS or METHODS[method].queries):
            raise CalibrationError(f"{method} takes keys and queries after RoPE, not before it")
        if not layers:
            raise CalibrationError("a calibration holds at least one layer")
        self.method, self.roped, self.meta = method, roped, dict(meta or {})
        self.layers = {index: dict(layers[index]) for index in sorted(layers)}
        self.ropes = dict(ropes or {})
        shapes = PARAMETERS[method]
        for name, letters in OPTIONAL.get(method, {}).items():
            if self.has(name):
                shapes = shapes | {name: letters}
        for index, parameters in self.layers.items():
            _check_parameters(method, shapes, index, parameters)

    def has(self, name: str) -> bool:
        """Whether the layers have a parameter of this name."""
        return name in next(iter(self.layers.values()))

    def check(self, layer: int, heads: int, size: int, rope: Rope | None) -> dict[str, Tensor]:
        """Return the parameters of a model's layer of so many KV heads of a size; CalibrationError, with both sides,
        where they are of another one."""
        model = self.meta.get("model", "a model")
        parameters = self.holds(layer)
        mine = parameters[next(iter(PARAMETERS[self.method]))].shape  # [H,D,..]
        if (mine[0], mine[1]) != (heads, size):
            raise CalibrationError(
                f"the calibration of {model} is for {mine[0]} KV heads of size {mine[1]}, layer {layer} here has "
                f"{heads} of size {size}"
            )
        ours = self.ropes.get(layer)
        if not same_rope(ours, rope):
            raise CalibrationError(
                f"the calibration of {model} was made with {rope_in_words(ours)}, layer {layer} here applies "
                f"{rope_in_words(rope)}"
            )
        return parameters

    def holds(self, layer: int) -> dict[str, Tensor]:
        """Return the parameters of a layer; CalibrationError where it has none."""
        if layer not in self.layers:
            raise CalibrationError(
                f"the calibration of {self.meta.get('model', 'a model')} holds layers "
                f"{', '.join(map(str, self.layers))}, layer {layer} is asked for: leave it out (of a comparison), make "
                f"it dense (dense_layers) or calibrate it too"
            )
        return self.layers[layer]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            CalibrationError: `meta` that JSON cannot hold, or a file that cannot be written.
        """
        tensors = {
            f"layers.{i}.{name}": part for i, parameters in self.layers.items() for name, part in parameters.items()
        }
        tensors |= {f"layers.{i}.inv_freq": rope.inv_freq for i, rope in self.ropes.items()}
        ropes = {i: {"scaling": rope.scaling, "interleaved": rope.interleaved} for i, rope in self.ropes.items()}
        try:
            meta = json.dumps(self.meta, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise CalibrationError(f"a calibration's meta is what JSON can hold: {error}") from error
        metadata = {"format": FORMAT, "version": VERSION, "method": self.method, "roped": json.dumps(self.roped)}
        try:
            save_tensors(path, tensors, metadata | {"ropes": json.dumps(ropes), "meta": meta})
        except TensorFileError as error:
            raise CalibrationError(str(error)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read a calibration file.

        Raises:
            CalibrationError: missing, damaged, no calibration, of another version, or with numbers that are not finite.
        """
        try:
            metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
        except TensorFileError as error:
            raise CalibrationError(str(error)) from error
        try:
            ropes = {
                int(i): Rope(tensors.pop(f"layers.{i}.inv_freq"), entry["scaling"], entry["interleaved"])
                for i, entry in parse_entry(metadata, "ropes").items()
            }
            layers: dict[int, dict[str, Tensor]] = {}
            for full, part in tensors.items():
                _, index, name = full.split(".")
                layers.setdefault(int(index), {})[name] = part
            meta, roped = parse_entry(metadata, "meta"), parse_entry(metadata, "roped")
            Object().check(meta, "meta")
            Flag().check(roped, "roped")
            return cls(metadata["method"], layers, roped=roped, ropes=ropes, meta=meta)
        except (CalibrationError, JsonError, FieldError) as error:
            raise CalibrationError(f"{path} is a damaged calibration: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CalibrationError(
                f"{path} is a damaged calibration: its metadata and tensors do not fit together"
            ) from error


def shared(path: str | os.PathLike[str]) -> Calibration:
    """`Calibration.load`, read once for all selectors of the process until the file changes."""
    place = Path(path)
    if not place.is_file():
        raise CalibrationError(f"{path} is no calibration file ({MAKE})")
    return _loaded(place.resolve(), place.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _loaded(path: Path, changed: int) -> Calibration:
    return Calibration.load(path)


def _check_parameters(method: str, shapes: Mapping[str, str], index: int, parameters: Mapping[str, Tensor]) -> None:
    if set(parameters) != set(shapes):
        raise CalibrationError(
            f"layer {index} has {', '.join(sorted(parameters)) or 'nothing'}, {method} has {[*shapes]}"
        )
    sizes: dict[str, int] = {}
    for name, letters in shapes.items():
        part = parameters[name]
        if part.ndim == len(letters):
            sizes = dict(zip(letters, part.shape, strict=True)) | sizes  # those of the first one count
        shape = [sizes.get(letter, 0) for letter in letters]
        if list(part.shape) != shape or part.dtype != torch.float32 or not bool(part.isfinite().all()):
            raise CalibrationError(
                f"{name} of layer {index} is finite float32 {shape}, got {part.dtype} {list(part.shape)}"
            )
    if "S" in sizes and sizes["S"] * sizes["d"] != sizes["D"]:
        raise CalibrationError(
            f"centroids of layer {index} are of S * d = {sizes['D']} channels, got {sizes['S']} of {sizes['d']}"
        )
