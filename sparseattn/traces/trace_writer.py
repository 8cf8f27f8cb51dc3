"""Writes a trace a few rows at a time; `trace.py` says what the file holds."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.traces.trace_format import (
    CODES,
    FORMAT,
    SIZES,
    VERSION,
    LayerShape,
    TensorHash,
    TraceError,
    check_pieces,
    code_of,
    each_once,
    hash_of,
    integers,
    json_of,
    memory,
)
from sparseattn.utils.files import replacing


@dataclass
class _Place:
    """Where a tensor lies in the file, how many of its rows have been written, and their hash."""

    offset: int
    shape: list[int]
    hash: TensorHash
    code: str
    done: int = 0


@dataclass
class TraceWriter:
    """Writes a trace a few rows at a time, so that memory does not grow with its length.

    Use it as a context manager: the file replaces `path` when the block ends, and nothing is left if it raises. Its
    space is reserved at once, so a full disk fails before a model runs.

    Args:
        path: the file to make or to replace.
        layers: shapes of all layers.
        positions: `[T]`, any integer dtype.
        dtype: float32, float16 or bfloat16, for every layer.
        meta: the trace's origin, anything JSON can hold; may be added to until the block ends.
        pieces: the text of each token, T of them; None: the trace holds no text.

    Raises:
        TraceError: no such folder, not enough space, rows missing at the end, given out of order or not finite.
    """

    path: str | os.PathLike[str]
    layers: Sequence[LayerShape]
    positions: Tensor
    dtype: torch.dtype
    meta: Mapping[str, Any] = field(default_factory=dict)
    pieces: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            raise TraceError(f"a trace is float32, float16 or bfloat16, got {self.dtype}")
        self.meta = dict(self.meta)
        self.positions = integers(self.positions)
        each_once([layer.index for layer in self.layers])
        self._tokens = len(self.positions)
        self.pieces = check_pieces(self.pieces, self._tokens)
        self._ropes: dict[int, Rope | None] = {}
        self._places: dict[str, _Place] = {}
        end = 0
        for layer in self.layers:
            layer.check(self._tokens)
            for name in layer.names:
                shape, whole = layer.of(name, self._tokens), f"layers.{layer.index}.{name}"
                code = layer.code(name, self.dtype)
                self._places[whole] = _Place(end, shape, TensorHash(whole, code, shape), code)
                end += math.prod(shape) * SIZES[code]
        self._end = end
        # The header is written last, into room kept for it: what a capture learns on its way (ropes, what could not
        # be verified) is part of it. A sentence per layer and 64 KiB for `meta` are plenty.
        self._data = 65536 + 2048 * len(self.layers) + len(json_of(self.meta))
        self._data += len(json.dumps(json.dumps(self.pieces)))
        self._data += -self._data % 4096
        # With positions and room for ropes; what is exact here is the sentence about a full disk.
        self._needed = self._data + self._end + 8 * self._tokens + 65536

    def __enter__(self) -> TraceWriter:
        with self._failures(), contextlib.ExitStack() as stack:
            if Path(self.path).is_dir():
                raise TraceError(f"{os.fspath(self.path)} is a folder, not a place for a trace file")
            self._file = stack.enter_context(replacing(self.path))  # first: what a killed run left makes room
            folder, free = self._free()
            if free < self._needed:
                raise self._no_space(folder, free)
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
        """Write the rows of tokens `start` and up: `[H,G,n,D]` for "query" and "ahead", `[H,n,D]` for
        "keys" and "values", integers `[Hs,n,S]` for "native".

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
        dtype = torch.int32 if place.code == "I32" else self.dtype
        stored = rows.detach().to("cpu", dtype).contiguous().view(-1, count, size)
        if not stored.isfinite().all():
            raise TraceError(_not_finite(f"layer {layer}'s {name}", start, rows.detach(), self.dtype))
        row = size * dtype.itemsize
        with self._failures():
            for head, part in enumerate(stored):
                self._file.seek(self._data + place.offset + (head * tokens + start) * row)
                self._file.write(memory(part))
                place.hash.add(head, part)
        place.done += count

    def rope(self, layer: int, rope: Rope | None) -> None:
        """Record which RoPE the layer applied; a layer without a record has none. The last call counts."""
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
        tensors = {name: self._entry(place.code, place.shape, place.offset) for name, place in self._places.items()}
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
            tensors[name] = self._entry(code_of(tensor), list(tensor.shape), end)
            end += tensor.nbytes
            self._file.write(memory(tensor))
        hashes = {name: place.hash.value() for name, place in self._places.items()}
        hashes |= {name: hash_of(name, tensor) for name, tensor in small.items()}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "layers": json.dumps(listed),
            "ropes": json.dumps([{"scaling": rope.scaling, "interleaved": rope.interleaved} for rope in distinct]),
            "meta": json_of(self.meta),
            "hashes": json.dumps(hashes),
        }
        if self.pieces is not None:
            metadata["pieces"] = json.dumps(self.pieces)
        return json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()

    @staticmethod
    def _entry(dtype: str, shape: list[int], offset: int) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + math.prod(shape) * SIZES[dtype]]}

    def _free(self) -> tuple[Path, int]:
        """Return the folder that the file goes to (symbolic links are followed) and its free bytes."""
        folder = Path(os.path.realpath(self.path)).parent
        return folder, shutil.disk_usage(folder).free

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Return an OSError of the block as a TraceError."""
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
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
