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

Synthetic traces may hold queries for the last Q tokens alone (`layers.{i}.query` is `[H,G,Q,D]`, Q <= T). Tensors of a
layer share one dtype, float32, float16 or bfloat16.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sparseattn.rope import Rope

FORMAT = "sparseattn-trace"
VERSION = 1
NAMES = ("query", "keys", "values")
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
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
        TraceError: shapes or dtypes that do not fit together.
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
        if q.ndim != 4 or k.ndim != 3 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[2]):
            raise TraceError(
                f"a layer's query is [H,G,T,D] and its keys and values are [H,T,D], layer {self.index} has "
                f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        if not 1 <= q.shape[2] <= k.shape[1]:
            raise TraceError(f"layer {self.index} has queries of {q.shape[2]} tokens for keys of {k.shape[1]}")
        if k.dtype != v.dtype or q.dtype != k.dtype or k.dtype not in DTYPES:
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
    """A layer of a trace yet to be written: its number, H, G, D, scale, window and queries (None: one per token)."""

    index: int
    heads: int
    group: int
    size: int
    scale: float
    window: int | None = None
    queries: int | None = None

    def of(self, name: str, tokens: int) -> list[int]:
        """The shape of one of the layer's tensors."""
        if name == "query":
            return [self.heads, self.group, self.queries or tokens, self.size]
        return [self.heads, tokens, self.size]


class Trace:
    """Layers of queries, keys and values of one text, in memory or in a file that is read a layer at a time.

    Attributes:
        name: a short label, the file's stem.
        positions: `[T]` int64.
        layers: numbers of the layers that it holds, ascending.
        meta: where it comes from (see the module).
    """

    def __init__(
        self,
        name: str,
        positions: Tensor,
        layers: Sequence[int],
        meta: Mapping[str, Any],
        load: Callable[[int], TraceLayer],
    ) -> None:
        self.name = name
        self.positions = positions
        self.layers = tuple(layers)
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
            TraceError: no layer, the same layer twice, or layers of another number of tokens.
        """
        held = {layer.index: layer for layer in sorted(layers, key=lambda layer: layer.index)}
        if not layers or len(held) != len(layers):
            raise TraceError(f"a trace holds at least one layer and each once, got {[x.index for x in layers]}")
        if positions.ndim != 1:
            raise TraceError(f"a trace's positions are [T], got {list(positions.shape)}")
        for layer in layers:
            if layer.keys.shape[1] != len(positions):
                raise TraceError(f"layer {layer.index} has {layer.keys.shape[1]} tokens for {len(positions)} positions")
        return cls(name, positions.to("cpu", torch.int64), tuple(held), meta or {}, held.__getitem__)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace, one layer in memory at a time; the file appears whole or not at all.

        Raises:
            TraceError: no such folder, or not enough space.
        """
        first = self.layer(self.layers[0])
        shapes = [self.layer(index).shape for index in self.layers]
        with TraceWriter(path, shapes, self.positions, first.keys.dtype, self.meta) as writer:
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
        try:
            entries = {int(entry["index"]): entry for entry in json.loads(metadata["layers"])}
            ropes = json.loads(metadata["ropes"])
            meta = json.loads(metadata["meta"])
            (tokens,) = tensors["positions"]["shape"]
            for index, entry in entries.items():
                _check_layer(index, entry, tensors, tokens, len(ropes))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error}" if isinstance(error, TraceError) else "its metadata and tensors do not fit together"
            raise TraceError(f"{path} is a damaged trace: {reason}") from error
        if not entries:
            raise TraceError(f"{path} is a damaged trace: it holds no layer")

        from safetensors import SafetensorError, safe_open

        try:
            file = safe_open(path, framework="pt")
            positions = file.get_tensor("positions")
        except (SafetensorError, OSError) as error:
            raise TraceError(f"{path} cannot be read: {error}") from error

        def rope(k: int) -> Rope:
            return Rope(file.get_tensor(f"rope.{k}.inv_freq"), ropes[k]["scaling"], ropes[k]["interleaved"])

        def load(index: int) -> TraceLayer:
            entry = entries[index]
            query, keys, values = (file.get_tensor(f"layers.{index}.{name}") for name in NAMES)
            turned = None if entry["rope"] is None else rope(entry["rope"])
            return TraceLayer(index, query, keys, values, entry["scale"], turned, entry["window"])

        return cls(path.stem, positions, sorted(entries), meta, load)


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors' entries and the metadata of a safetensors file whose size agrees with its header."""
    if not path.exists():
        raise TraceError(f"{path} does not exist")
    if path.is_dir():
        raise TraceError(f"{path} is a folder, not a trace file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            plausible = size >= 8 and 2 <= length <= HEADER_LIMIT
            start = file.read(min(length, 2)) if plausible else b""
            text = start + file.read(length - 2) if start.startswith(b"{") else b""
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not text:
        raise TraceError(f"{path} is not a safetensors file, so not a trace")
    if len(text) < length:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes and its header alone takes {8 + length:,}")
    try:
        tensors = json.loads(text)
        metadata = tensors.pop("__metadata__", {})
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TraceError(f"{path} is not a safetensors file, so not a trace") from error
    if size < end:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes of {end:,}")
    if size > end:
        raise TraceError(f"{path} has {size:,} bytes, {size - end:,} more than its header says")
    return tensors, metadata


def _check_layer(index: int, entry: dict[str, Any], tensors: dict[str, Any], tokens: int, ropes: int) -> None:
    missing = [name for name in NAMES if f"layers.{index}.{name}" not in tensors]
    if missing:
        raise TraceError(f"layer {index} lacks its {' and '.join(missing)}")
    query, keys, values = (tensors[f"layers.{index}.{name}"]["shape"] for name in NAMES)
    dtypes = {tensors[f"layers.{index}.{name}"]["dtype"] for name in NAMES}
    heads, _, queries, size = query
    if keys != [heads, tokens, size] or values != keys or not 1 <= queries <= tokens:
        raise TraceError(f"layer {index} has query {query}, keys {keys} and values {values} for {tokens} tokens")
    if len(dtypes) != 1 or not dtypes <= set(DTYPES.values()):
        raise TraceError(f"layer {index} has tensors of {' and '.join(sorted(dtypes))}")
    if entry["rope"] is not None and not (0 <= entry["rope"] < ropes and f"rope.{entry['rope']}.inv_freq" in tensors):
        raise TraceError(f"layer {index} names rope {entry['rope']}, the file has {ropes}")
    if not (entry["scale"] > 0 and (entry["window"] is None or entry["window"] > 0)):
        raise TraceError(f"layer {index} has scale {entry['scale']} and window {entry['window']}")


@dataclass
class _Place:
    """Where a tensor lies in the file, and how many of its rows have been written."""

    offset: int
    shape: list[int]
    done: int = 0


@dataclass
class TraceWriter:
    """Writes a trace a few rows at a time; memory does not grow with its length.

    A context manager: the file is written under a temporary name beside `path`, all of its space taken at once so that
    a full disk fails before a model runs, and renamed when the block ends. When the block raises, nothing is left.

    Args:
        path: the file to make or to replace.
        layers: shapes of all layers.
        positions: `[T]`, any integer dtype.
        dtype: float32, float16 or bfloat16, for every layer.
        meta: the trace's origin, anything JSON can hold; may be added to until the block ends.

    Raises:
        TraceError: no such folder, not enough space, rows missing at the end or given out of order.
    """

    path: str | os.PathLike[str]
    layers: Sequence[LayerShape]
    positions: Tensor
    dtype: torch.dtype
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise TraceError(f"a trace is float32, float16 or bfloat16, got {self.dtype}")
        self.meta = dict(self.meta)
        self._tokens = len(self.positions)
        self._ropes: dict[int, Rope | None] = {}
        self._places: dict[str, _Place] = {}
        end = 0
        for layer in self.layers:
            for name in NAMES:
                shape = layer.of(name, self._tokens)
                self._places[f"layers.{layer.index}.{name}"] = _Place(end, shape)
                end += math.prod(shape) * self.dtype.itemsize
        self._end = end
        # The header is written last, into room kept for it: what a capture learns on its way (ropes, what could not
        # be verified) is part of it. A sentence per layer and 64 KiB for `meta` are plenty.
        self._data = 65536 + 2048 * len(self.layers) + len(json.dumps(self.meta))
        self._data += -self._data % 4096

    def __enter__(self) -> TraceWriter:
        target = Path(self.path)
        if target.is_dir():
            raise TraceError(f"{target} is a folder, not a place for a trace file")
        # Symbolic links are followed, so that the rename replaces the file and not the link.
        target = target.resolve()
        self._target = target
        self._temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
        # Ropes, positions and the header's room; what is exact here is the sentence about a full disk.
        needed = self._data + self._end + 8 * self._tokens + 65536
        try:
            free = shutil.disk_usage(target.parent).free
            if free < needed:
                raise TraceError(_no_space(target, needed, free))
            self._file: BinaryIO = open(self._temporary, "xb")
        except OSError as error:
            raise TraceError(f"{target} cannot be written: {error.strerror or error}") from error
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, self._data + self._end)
        except OSError as error:
            # File systems that cannot reserve space say EINVAL or EOPNOTSUPP; there a full disk is met on the way.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                self._discard()
                raise self._failure(error) from error
        except BaseException:
            self._discard()
            raise
        return self

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
        rows = rows.detach().to("cpu", self.dtype).contiguous().view(-1, count, size)
        row = size * self.dtype.itemsize
        try:
            for head, part in enumerate(rows):
                self._file.seek(self._data + place.offset + (head * tokens + start) * row)
                self._file.write(_bytes(part))
        except OSError as error:
            raise self._failure(error) from error
        place.done += count

    def rope(self, layer: int, rope: Rope | None) -> None:
        """Say which RoPE the layer applied; layers without a word have none. The last word counts."""
        self._ropes[layer] = rope

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as problem:
            raise self._failure(problem) from problem
        finally:
            self._discard()

    def _finish(self) -> None:
        for name, place in self._places.items():
            if place.done != place.shape[-2]:
                raise TraceError(f"{self.path} was not written: {name} has {place.done} of {place.shape[-2]} rows")
        header = self._append_small()
        if 8 + len(header) > self._data:
            raise TraceError(f"a trace's metadata takes at most {self._data:,} bytes, got {8 + len(header):,}")
        self._file.seek(0)
        self._file.write((self._data - 8).to_bytes(8, "little") + header.ljust(self._data - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._target)
        if hasattr(os, "O_DIRECTORY"):  # make the rename itself last; Windows neither can nor need
            folder = os.open(self._target.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _append_small(self) -> bytes:
        """Write positions and ropes behind the layers; return the header."""
        tensors = {
            name: self._entry(DTYPES[self.dtype], place.shape, place.offset) for name, place in self._places.items()
        }
        distinct: list[Rope] = []
        listed = []
        for layer in self.layers:
            rope = self._ropes.get(layer.index)
            known = next((k for k, other in enumerate(distinct) if rope is not None and _same(rope, other)), None)
            if rope is not None and known is None:
                known = len(distinct)
                distinct.append(rope)
            listed.append({"index": layer.index, "scale": layer.scale, "window": layer.window, "rope": known})
        small = {"positions": self.positions.to("cpu", torch.int64).contiguous()}
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
            "meta": json.dumps(self.meta, sort_keys=True),
        }
        return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()

    @staticmethod
    def _entry(dtype: str, shape: list[int], offset: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + math.prod(shape) * SIZES[dtype]]}

    def _failure(self, error: OSError) -> TraceError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return TraceError(f"{self._target} cannot be written: {error.strerror or error}")
        needed = self._data + self._end + 8 * self._tokens
        return TraceError(_no_space(self._target, needed, shutil.disk_usage(self._target.parent).free))

    def _discard(self) -> None:
        """Close and remove the temporary file; after the rename there is none."""
        with contextlib.suppress(OSError):  # a full disk fails once more when buffered rows are flushed
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def _no_space(target: Path, needed: int, free: int) -> str:
    return f"{target} needs {needed:,} bytes, {target.parent} has {free:,} free"


def _bytes(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """A contiguous CPU tensor's memory as a buffer, without a copy (`Tensor.numpy` knows no bfloat16)."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _same(a: Rope, b: Rope) -> bool:
    return (a.scaling, a.interleaved) == (b.scaling, b.interleaved) and torch.equal(a.inv_freq, b.inv_freq)
