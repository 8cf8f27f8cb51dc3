"""Reads a trace file: its header, checked when it is opened, and the rows of a layer when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseattn.core.rope import Rope
from sparseattn.traces.trace_format import (
    AHEAD,
    CODES,
    FORMAT,
    NAMES,
    NATIVE,
    VERSION,
    LayerShape,
    TraceError,
    check_meta,
    check_pieces,
    each_once,
    hash_of,
    integers,
    is_whole,
    read_header,
)
from sparseattn.traces.trace_layer import TraceContents, TraceLayer
from sparseattn.utils.json_text import JsonError, parse_entry


@dataclass(frozen=True)
class TraceFile:
    """A trace file that was opened.

    Args:
        path: where it lies.
        contents: what its header says, and its positions and ropes.
    """

    path: Path
    contents: TraceContents

    @classmethod
    def open(cls, path: Path) -> TraceFile:
        """Read and check the header, positions and ropes.

        Raises:
            TraceError: missing, not a trace, truncated, of another version, or inconsistent.
        """
        tensors, metadata = read_header(path)
        if metadata.get("format") != FORMAT:
            raise TraceError(f"{path} is a safetensors file, but not a trace (`sparseattn capture` makes one)")
        if metadata.get("version") != str(VERSION):
            raise TraceError(
                f"{path} has trace format version {metadata.get('version')}, this sparseattn reads version {VERSION}"
            )
        from safetensors import SafetensorError

        file = _mapped(path)
        try:
            return cls(path, _contents(file, tensors, metadata))
        except (TraceError, JsonError) as error:
            raise TraceError(f"{path} is a damaged trace: {error}") from error
        except (LookupError, TypeError, ValueError, SafetensorError) as error:
            raise TraceError(f"{path} is a damaged trace: its metadata and tensors do not fit together") from error

    def layer(self, index: int) -> TraceLayer:
        """Read the rows of a layer that it holds."""
        shape = self.contents.shapes[index]
        # A mapping that stayed would keep every page read resident, layer after layer and prompt after prompt.
        rows = _mapped(self.path)
        read = {name: rows.get_tensor(f"layers.{index}.{name}") for name in shape.names}
        return TraceLayer(index, scale=shape.scale, rope=self.contents.ropes[index], window=shape.window, **read)

    def check(self, name: str) -> None:
        """TraceError where the tensor `name` is not the one that was written, by its hash."""
        try:
            _check_hash(_mapped(self.path), name, self.contents.hashes or {})
        except TraceError as error:
            raise TraceError(f"{self.path} is a damaged trace: {error}") from error


def _contents(file: Any, tensors: dict[str, Any], metadata: Mapping[str, str]) -> TraceContents:
    """Return what a mapped file holds, of which `read_header` says `tensors` and `metadata`."""
    positions = integers(file.get_tensor("positions"))
    ropes = [
        Rope(file.get_tensor(f"rope.{k}.inv_freq"), entry["scaling"], entry["interleaved"])
        for k, entry in enumerate(parse_entry(metadata, "ropes"))
    ]
    entries = parse_entry(metadata, "layers")
    each_once([entry["index"] for entry in entries])
    layers = {entry["index"]: _read_layer(entry, tensors, len(positions), ropes) for entry in entries}
    meta = parse_entry(metadata, "meta")
    check_meta(meta)
    pieces = check_pieces(parse_entry(metadata, "pieces", "null"), len(positions))
    dtype = _dtype(tensors, {index: shape for index, (shape, _) in layers.items()})
    hashes: dict[str, str] = parse_entry(metadata, "hashes", "{}")
    if "hashes" in metadata:
        if not isinstance(hashes, dict) or hashes.keys() != tensors.keys():
            raise TraceError("its hashes are not those of its tensors")
        for name in ("positions", *(f"rope.{k}.inv_freq" for k in range(len(ropes)))):
            _check_hash(file, name, hashes)
    shapes = {index: shape for index, (shape, _) in layers.items()}
    turns = {index: rope for index, (_, rope) in layers.items()}
    return TraceContents(positions, shapes, turns, dtype, meta, pieces, hashes or None)


def _dtype(tensors: dict[str, Any], shapes: Mapping[int, LayerShape]) -> torch.dtype:
    """Return the one dtype of the layers' tensors."""
    names = [f"layers.{index}.{name}" for index, shape in shapes.items() for name in shape.names]
    dtypes = {tensors[name]["dtype"] for name in names if not name.endswith(f".{NATIVE}")}
    if len(dtypes) != 1 or not dtypes <= set(CODES.values()):
        raise TraceError(f"its layers are of {' and '.join(sorted(dtypes))}")
    return next(dtype for dtype, code in CODES.items() if code in dtypes)


def _mapped(path: Path) -> Any:
    """Return the safetensors file `path`, mapped into memory until this and all its tensors are let go of."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _check_hash(file: Any, name: str, hashes: Mapping[str, str]) -> None:
    if hash_of(name, file.get_tensor(name)) != hashes[name]:
        raise TraceError(f"its {name} is not what was written")


def _read_layer(
    entry: dict[str, Any], tensors: dict[str, Any], tokens: int, ropes: Sequence[Rope]
) -> tuple[LayerShape, Rope | None]:
    """Return what the metadata's entry of a layer says, checked against the tensors' shapes."""
    index, k = entry["index"], entry["rope"]
    missing = [name for name in NAMES if f"layers.{index}.{name}" not in tensors]
    if missing:
        raise TraceError(f"layer {index} lacks its {' and '.join(missing)}")
    heads, group, queries, size = tensors[f"layers.{index}.query"]["shape"]
    ahead, chosen = f"layers.{index}.{AHEAD}" in tensors, tensors.get(f"layers.{index}.{NATIVE}")
    if chosen is not None and (chosen["dtype"] != "I32" or len(chosen["shape"]) != 3):
        raise TraceError(f"layer {index} has native {chosen['dtype']} {chosen['shape']}, which is I32 [Hs,Q,S]")
    native = None if chosen is None else (chosen["shape"][0], chosen["shape"][2])
    shape = LayerShape(index, heads, group, size, entry["scale"], entry["window"], queries, ahead, native)
    shape.check(tokens, [tensors[f"layers.{index}.{name}"]["shape"] for name in shape.names])
    if k is not None and not (is_whole(k, 0) and k < len(ropes)):
        raise TraceError(f"layer {index} names rope {k}, the file has {len(ropes)}")
    return shape, None if k is None else ropes[k]
