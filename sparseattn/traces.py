"""Traces: the queries, keys and values that a model's attention layers saw, in one safetensors file.

Letters: H KV heads, G query heads per KV head, T tokens, D head size.

The file, format version 1 (any safetensors reader opens it):

    layers.{i}.query    [H,G,T,D]   after RoPE, exactly as attention received it
    layers.{i}.keys     [H,T,D]     after RoPE; a row per token, also in sliding-window layers
    layers.{i}.values   [H,T,D]
    positions           [T] int64   the position of each token
    rope.{k}.inv_freq   [R/2] f32   frequencies of the k-th distinct RoPE

    metadata (strings, as safetensors requires):
    format    "sparseattn-trace"
    version   "1"
    layers    JSON list of {"index", "scale", "window", "rope"}: logits are `scale * q.k`; `window` is the width of a
              sliding window (row t sees rows t-window+1 .. t) or null; `rope` is a k or null
    ropes     JSON list of {"scaling", "interleaved"}, one for each k
    meta      JSON object: model id, config hash, source of the text, versions, what could not be recorded and why

Synthetic traces may hold queries for the last Q tokens alone (`layers.{i}.query` is `[H,G,Q,D]`, Q <= T). Queries, keys
and values of all layers share one dtype, float32, float16 or bfloat16, and are finite.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sparseattn.files import replacing
from sparseattn.rope import Rope

FORMAT = "sparseattn-trace"
VERSION = 1
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NAMES = ("query", "keys", "values")
CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of safetensors
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}  # bytes of an element of each dtype that a trace may hold
HEADER_LIMIT = 100_000_000  # bytes; safetensors itself reads no longer header


class TraceError(ValueError):
    """A trace that cannot be read or written, in one sentence."""


@dataclass(frozen=True, eq=False)
class TraceLayer:
    """What one attention layer saw.

    Args:
        index: the layer's number in the model.
        query: `[H,G,Q,D]` after RoPE, of the last Q tokens; Q = T in a captured trace.
        keys: `[H,T,D]` after RoPE.
        values: `[H,T,D]`.
        scale: logits are `scale * q.k`.
        rope: the RoPE that the layer applied, or None: it applies none, or none that could be verified.
        window: width of the layer's sliding window (row t sees rows `t-window+1 .. t`), or None.

    Raises:
        TraceError: shapes or dtypes that do not fit together, or what `LayerShape` refuses.
    """

    index: int
    query: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    rope: Rope | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        q, k, v = self.query, self.keys, self.values
        if q.ndim != 4 or k.ndim != 3:
            raise TraceError(
                f"a layer's query is [H,G,T,D] and its keys and values are [H,T,D], layer {self.index} has "
                f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        self.shape.check(k.shape[1], [list(x.shape) for x in (q, k, v)])
        if k.dtype != v.dtype or q.dtype != k.dtype or k.dtype not in CODES:
            raise TraceError(
                f"a layer's tensors share one dtype of float32, float16 and bfloat16, layer {self.index} has "
                f"{q.dtype}, {k.dtype} and {v.dtype}"
            )

    @property
    def shape(self) -> LayerShape:
        """What a writer must know of this layer beforehand."""
        heads, group, queries, size = self.query.shape
        return LayerShape(self.index, heads, group, size, self.scale, self.window, queries)


@dataclass(frozen=True)
class LayerShape:
    """A layer of a trace yet to be written: its number, H, G, D, scale, window and queries (None: one per token).

    Raises:
        TraceError: a number that no layer has.
    """

    index: int
    heads: int
    group: int
    size: int
    scale: float
    window: int | None = None
    queries: int | None = None

    def __post_init__(self) -> None:
        if not _is_whole(self.index, 0):
            raise TraceError(f"a layer's index is 0 or more, got {self.index!r}")
        for name in ("heads", "group", "size", "queries"):
            number = getattr(self, name)
            if not _is_whole(number, 1) and (name, number) != ("queries", None):
                raise TraceError(f"layer {self.index} has {name} {number!r}, at least 1 is needed")
        if not isinstance(self.scale, (int, float)) or not 0 < self.scale < math.inf:
            raise TraceError(f"layer {self.index} has scale {self.scale!r}, which is not positive and finite")
        if self.window is not None and not _is_whole(self.window, 1):
            raise TraceError(f"layer {self.index} has window {self.window!r}, which is neither None nor 1 or more")

    def of(self, name: str, tokens: int) -> list[int]:
        """The shape of one of the layer's tensors."""
        if name == "query":
            return [self.heads, self.group, self.queries or tokens, self.size]
        return [self.heads, tokens, self.size]

    def check(self, tokens: int, shapes: Sequence[list[int]] | None = None) -> None:
        """Raise TraceError where the layer does not fit `tokens`, or `shapes` of its tensors are not its own."""
        if self.queries is not None and self.queries > tokens:
            raise TraceError(f"layer {self.index} has queries of {self.queries} tokens for keys of {tokens}")
        ours = [self.of(name, tokens) for name in NAMES]
        if shapes is not None and shapes != ours:
            raise TraceError(
                f"layer {self.index} has query, keys and values {', '.join(map(str, shapes))}, of {tokens} tokens they "
                f"are {', '.join(map(str, ours))}"
            )


class Trace:
    """Layers of queries, keys and values of one text, in memory or in a file that is read a layer at a time.

    Attributes:
        name: a short label, the file's stem.
        positions: `[T]` int64.
        layers: numbers of the layers that it holds, ascending.
        shapes: layer -> its `LayerShape`, known without loading the layer.
        ropes: layer -> its RoPE or None, known without loading the layer.
        dtype: of every tensor of its layers.
        meta: where it comes from (see the module).
    """

    def __init__(
        self,
        name: str,
        positions: Tensor,
        shapes: Mapping[int, LayerShape],
        ropes: Mapping[int, Rope | None],
        dtype: torch.dtype,
        meta: Mapping[str, Any],
        load: Callable[[int], TraceLayer],
    ) -> None:
        self.name = name
        self.positions = positions
        self.shapes = dict(sorted(shapes.items()))
        self.layers = tuple(self.shapes)
        self.ropes = {index: ropes[index] for index in self.layers}
        self.dtype = dtype
        self.meta = dict(meta)
        self._load = load

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, tokens={self.tokens}, layers={self.layers})"

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.positions)

    def layer(self, index: int) -> TraceLayer:
        """Load one layer, and no other.

        Raises:
            TraceError: the trace has no such layer.
        """
        if index not in self.layers:
            raise TraceError(f"{self.name} has no layer {index}, it holds {', '.join(map(str, self.layers))}")
        return self._load(index)

    @classmethod
    def build(
        cls,
        layers: Sequence[TraceLayer],
        positions: Tensor,
        meta: Mapping[str, Any] | None = None,
        name: str = "trace",
    ) -> Trace:
        """A trace in memory; `positions` `[T]` of any integer dtype.

        Raises:
            TraceError: no layer, the same layer twice, layers of another number of tokens or of different dtypes,
                positions that are no integers, or `meta` that JSON cannot hold.
        """
        held = {layer.index: layer for layer in layers}
        _each_once([layer.index for layer in layers])
        positions = _integers(positions)
        _json(meta or {})
        for layer in layers:
            if layer.keys.shape[1] != len(positions):
                raise TraceError(f"layer {layer.index} has {layer.keys.shape[1]} tokens for {len(positions)} positions")
            if layer.keys.dtype != layers[0].keys.dtype:
                raise TraceError(
                    f"the tensors of a trace share one dtype, layer {layers[0].index} has {layers[0].keys.dtype} and "
                    f"layer {layer.index} {layer.keys.dtype}"
                )
        shapes = {index: layer.shape for index, layer in held.items()}
        ropes = {index: layer.rope for index, layer in held.items()}
        return cls(name, positions, shapes, ropes, layers[0].keys.dtype, meta or {}, held.__getitem__)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, one layer in memory at a time; the file appears whole or not at all.

        Raises:
            TraceError: no such folder, not enough space, or numbers that are not finite.
        """
        with TraceWriter(path, list(self.shapes.values()), self.positions, self.dtype, self.meta) as writer:
            for index in self.layers:
                layer = self.layer(index)
                writer.rope(index, layer.rope)
                for name in NAMES:
                    writer.write(index, name, 0, getattr(layer, name))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Trace:
        """Open a trace file: its header is read and checked, rows are read when a layer is asked for.

        Raises:
            TraceError: missing, not a trace, truncated, of another version, or inconsistent.
        """
        path = Path(path)
        tensors, metadata = _header(path)
        if metadata.get("format") != FORMAT:
            raise TraceError(f"{path} is a safetensors file, but not a trace (`sparseattn capture` makes one)")
        if metadata.get("version") != str(VERSION):
            raise TraceError(
                f"{path} has trace format version {metadata.get('version')}, this sparseattn reads version {VERSION}"
            )
        from safetensors import SafetensorError

        file = _mapped(path)
        try:
            positions = _integers(file.get_tensor("positions"))
            ropes = [
                Rope(file.get_tensor(f"rope.{k}.inv_freq"), entry["scaling"], entry["interleaved"])
                for k, entry in enumerate(json.loads(metadata["ropes"]))
            ]
            entries = json.loads(metadata["layers"])
            _each_once([entry["index"] for entry in entries])
            layers = {entry["index"]: _read_layer(entry, tensors, len(positions), ropes) for entry in entries}
            meta = json.loads(metadata["meta"])
            if not isinstance(meta, dict):
                raise TraceError("its meta is no JSON object")
            dtypes = {tensors[f"layers.{index}.{name}"]["dtype"] for index in layers for name in NAMES}
            if len(dtypes) != 1 or not dtypes <= set(CODES.values()):
                raise TraceError(f"its layers are of {' and '.join(sorted(dtypes))}")
        except TraceError as error:
            raise TraceError(f"{path} is a damaged trace: {error}") from error
        except (LookupError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            raise TraceError(f"{path} is a damaged trace: its metadata and tensors do not fit together") from error

        def load(index: int) -> TraceLayer:
            shape, rope = layers[index]
            # A mapping that stayed would keep every page read resident, layer after layer and prompt after prompt.
            rows = _mapped(path)
            query, keys, values = (rows.get_tensor(f"layers.{index}.{name}") for name in NAMES)
            return TraceLayer(index, query, keys, values, shape.scale, rope, shape.window)

        dtype = next(dtype for dtype, code in CODES.items() if code in dtypes)
        known = {index: shape for index, (shape, _) in layers.items()}
        turns = {index: rope for index, (_, rope) in layers.items()}
        return cls(path.stem, positions, known, turns, dtype, meta, load)


def _mapped(path: Path) -> Any:
    """The safetensors file `path`, mapped into memory until this and all its tensors are let go of."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors' entries and the metadata of a safetensors file whose size agrees with its header."""
    try:
        if path.is_dir():
            raise TraceError(f"{path} is a folder, not a trace file")
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            plausible = size >= 8 and 2 <= length <= HEADER_LIMIT
            start = file.read(min(length, 2)) if plausible else b""
            text = start + file.read(length - 2) if start.startswith(b"{") else b""
    except FileNotFoundError as error:
        raise TraceError(f"{path} does not exist") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not text:
        raise TraceError(f"{path} is not a safetensors file, so not a trace")
    if len(text) < length:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes and its header alone takes {8 + length:,}")
    try:
        tensors = json.loads(text)
        metadata = dict(tensors.pop("__metadata__", {}))
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TraceError(f"{path} is not a safetensors file, so not a trace") from error
    if size < end:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes of {end:,}")
    if size > end:
        raise TraceError(f"{path} has {size:,} bytes, {size - end:,} more than its header says")
    return tensors, metadata


def _read_layer(
    entry: dict[str, Any], tensors: dict[str, Any], tokens: int, ropes: Sequence[Rope]
) -> tuple[LayerShape, Rope | None]:
    """What the metadata's entry of a layer says, checked against the tensors' shapes."""
    index, k = entry["index"], entry["rope"]
    missing = [name for name in NAMES if f"layers.{index}.{name}" not in tensors]
    if missing:
        raise TraceError(f"layer {index} lacks its {' and '.join(missing)}")
    shapes = [tensors[f"layers.{index}.{name}"]["shape"] for name in NAMES]
    heads, group, queries, size = shapes[0]
    shape = LayerShape(index, heads, group, size, entry["scale"], entry["window"], queries)
    shape.check(tokens, shapes)
    if k is not None and not (_is_whole(k, 0) and k < len(ropes)):
        raise TraceError(f"layer {index} names rope {k}, the file has {len(ropes)}")
    return shape, None if k is None else ropes[k]


def _is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _each_once(indices: Sequence[int]) -> None:
    if not indices or len(set(indices)) != len(indices):
        raise TraceError(f"a trace holds at least one layer and each once, got {indices}")


def _integers(positions: Tensor) -> Tensor:
    """`positions` `[T]` int64 on the CPU."""
    if positions.ndim != 1 or not len(positions) or positions.dtype not in INTEGERS:
        raise TraceError(f"a trace's positions are integers [T], got {positions.dtype} {list(positions.shape)}")
    return positions.to("cpu", torch.int64).contiguous()


def _json(meta: Mapping[str, Any]) -> str:
    try:
        return json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"a trace's meta is what JSON can hold: {error}") from error


@dataclass
class _Place:
    """Where a tensor lies in the file, and how many of its rows have been written."""

    offset: int
    shape: list[int]
    done: int = 0


@dataclass
class TraceWriter:
    """Writes a trace a few rows at a time; memory does not grow with its length.

    A context manager: the file takes the place of `path` when the block ends, and nothing is left when it raises. Its
    space is taken at once, so that a full disk fails before a model runs.

    Args:
        path: the file to make or to replace.
        layers: shapes of all layers.
        positions: `[T]`, any integer dtype.
        dtype: float32, float16 or bfloat16, for every layer.
        meta: the trace's origin, anything JSON can hold; may be added to until the block ends.

    Raises:
        TraceError: no such folder, not enough space, rows missing at the end, given out of order or not finite.
    """

    path: str | os.PathLike[str]
    layers: Sequence[LayerShape]
    positions: Tensor
    dtype: torch.dtype
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            raise TraceError(f"a trace is float32, float16 or bfloat16, got {self.dtype}")
        self.meta = dict(self.meta)
        self.positions = _integers(self.positions)
        _each_once([layer.index for layer in self.layers])
        self._tokens = len(self.positions)
        self._ropes: dict[int, Rope | None] = {}
        self._places: dict[str, _Place] = {}
        end = 0
        for layer in self.layers:
            layer.check(self._tokens)
            for name in NAMES:
                shape = layer.of(name, self._tokens)
                self._places[f"layers.{layer.index}.{name}"] = _Place(end, shape)
                end += math.prod(shape) * self.dtype.itemsize
        self._end = end
        # The header is written last, into room kept for it: what a capture learns on its way (ropes, what could not
        # be verified) is part of it. A sentence per layer and 64 KiB for `meta` are plenty.
        self._data = 65536 + 2048 * len(self.layers) + len(_json(self.meta))
        self._data += -self._data % 4096
        # With positions and room for ropes; what is exact here is the sentence about a full disk.
        self._needed = self._data + self._end + 8 * self._tokens + 65536

    def __enter__(self) -> TraceWriter:
        with self._failures(), contextlib.ExitStack() as stack:
            if Path(self.path).is_dir():
                raise TraceError(f"{os.fspath(self.path)} is a folder, not a place for a trace file")
            folder, free = self._free()
            if free < self._needed:
                raise self._no_space(folder, free)
            self._file = stack.enter_context(replacing(self.path))
            self._reserve()
            self._open = stack.pop_all()
        return self

    def _reserve(self) -> None:
        """Take the file's space, where the file system can."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file.fileno(), 0, self._data + self._end)
            except OSError as error:
                # File systems that cannot reserve space say so; there a full disk is met on the way.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise

    def write(self, layer: int, name: str, start: int, rows: Tensor) -> None:
        """Write the rows of tokens `start` and up: `[H,G,n,D]` for "query", `[H,n,D]` for "keys" and "values".

        Rows of each tensor come in order, without gaps.
        """
        place = self._places[f"layers.{layer}.{name}"]
        *heads, tokens, size = place.shape
        count = rows.shape[-2]
        if list(rows.shape) != [*heads, count, size] or start != place.done or start + count > tokens:
            raise TraceError(
                f"layer {layer}'s {name} takes rows {place.done} and up of {place.shape}, got {list(rows.shape)} at "
                f"row {start}"
            )
        stored = rows.detach().to("cpu", self.dtype).contiguous().view(-1, count, size)
        if not stored.isfinite().all():
            raise TraceError(_not_finite(f"layer {layer}'s {name}", start, rows.detach(), self.dtype))
        row = size * self.dtype.itemsize
        with self._failures():
            for head, part in enumerate(stored):
                self._file.seek(self._data + place.offset + (head * tokens + start) * row)
                self._file.write(_bytes(part))
        place.done += count

    def rope(self, layer: int, rope: Rope | None) -> None:
        """Say which RoPE the layer applied; layers without a word have none. The last word counts."""
        self._ropes[layer] = rope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:  # an OSError of the block is the caller's own
            self._open.__exit__(kind, error, traceback)
            return
        with self._failures(), self._open:
            self._finish()

    def _finish(self) -> None:
        for name, place in self._places.items():
            if place.done != place.shape[-2]:
                raise TraceError(f"{self.path} was not written: {name} has {place.done} of {place.shape[-2]} rows")
        header = self._append_small()
        if 8 + len(header) > self._data:
            raise TraceError(f"a trace's metadata takes at most {self._data:,} bytes, got {8 + len(header):,}")
        self._file.seek(0)
        self._file.write((self._data - 8).to_bytes(8, "little") + header.ljust(self._data - 8))

    def _append_small(self) -> bytes:
        """Write positions and ropes behind the layers; return the header."""
        tensors = {
            name: self._entry(CODES[self.dtype], place.shape, place.offset) for name, place in self._places.items()
        }
        distinct: list[Rope] = []
        listed = []
        for layer in self.layers:
            rope = self._ropes.get(layer.index)
            known = next((k for k, other in enumerate(distinct) if rope is not None and rope.equals(other)), None)
            if rope is not None and known is None:
                known = len(distinct)
                distinct.append(rope)
            listed.append({"index": layer.index, "scale": layer.scale, "window": layer.window, "rope": known})
        small = {"positions": self.positions}
        small |= {f"rope.{k}.inv_freq": rope.inv_freq.cpu().contiguous() for k, rope in enumerate(distinct)}
        end = self._end
        self._file.seek(self._data + end)
        for name, tensor in small.items():
            tensors[name] = self._entry("I64" if tensor.dtype == torch.int64 else "F32", list(tensor.shape), end)
            end += tensor.nbytes
            self._file.write(_bytes(tensor))
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "layers": json.dumps(listed),
            "ropes": json.dumps([{"scaling": rope.scaling, "interleaved": rope.interleaved} for rope in distinct]),
            "meta": _json(self.meta),
        }
        return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()

    @staticmethod
    def _entry(dtype: str, shape: list[int], offset: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + math.prod(shape) * SIZES[dtype]]}

    def _free(self) -> tuple[Path, int]:
        """The folder that the file goes to (symbolic links are followed) and its free bytes."""
        folder = Path(os.path.realpath(self.path)).parent
        return folder, shutil.disk_usage(folder).free

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """An OSError of the block as a TraceError."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise TraceError(f"{os.fspath(self.path)} cannot be written: {error.strerror or error}") from error
            raise self._no_space(*self._free()) from error

    def _no_space(self, folder: Path, free: int) -> TraceError:
        return TraceError(f"{os.fspath(self.path)} needs {self._needed:,} bytes, {folder} has {free:,} free")


def _not_finite(what: str, start: int, rows: Tensor, dtype: torch.dtype) -> str:
    """Why `rows` `[...,n,D]` of tokens `start` and up cannot be stored: the token with the largest magnitude."""
    largest, token = rows.abs().movedim(-2, 0).flatten(1).amax(1).max(0)  # a NaN counts as the largest
    where, magnitude = f"{what} at token {start + int(token)}", float(largest)
    if not math.isfinite(magnitude):
        number = "NaN" if math.isnan(magnitude) else "infinity"
        remedy = "; load it in bfloat16 or float32 (--dtype)" if rows.dtype == torch.float16 else ""
        return f"the model produced {number} in {where}{remedy}"
    return (
        f"{magnitude:.3g} in {where} is beyond {str(dtype).removeprefix('torch.')}, which ends at "
        f"{torch.finfo(dtype).max:.3g}: store bfloat16 or float32 (dtype; on the command line --dtype)"
    )


def _bytes(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """A contiguous CPU tensor's memory as a buffer, without a copy (`Tensor.numpy` knows no bfloat16)."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
