"""What the files of traces are made of: the constants of the format, the shape of a layer, hashes, the header.

`trace.py` documents the format, `trace_file.py` reads it, `trace_writer.py` writes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparseattn.utils.json_text import parse

FORMAT = "sparseattn-trace"
VERSION = 1
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NAMES = ("query", "keys", "values")
AHEAD, NATIVE = "ahead", "native"  # names of tensors that a layer may hold besides
CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of safetensors
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}  # bytes of an element of each dtype that a trace may hold
HEADER_LIMIT = 100_000_000  # bytes; safetensors itself reads no longer header
REASONS = ("rope_absent", "attention_differs")  # entries of `meta` that say something of layers: "index" -> sentence


class TraceError(ValueError):
    """A trace cannot be read or written; the message is one sentence."""


@dataclass(frozen=True)
class LayerShape:
    """A layer of a trace yet to be written: its number, H, G, D, scale, window and queries (None: one per token),
    whether it holds as many queries foreseen by the layer before, and of what its own index chose for each of them, how
    many lists of how many rows (None: it holds none).

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
    ahead: bool = False
    native: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.index, 0):
            raise TraceError(f"a layer's index is 0 or more, got {self.index!r}")
        for name in ("heads", "group", "size", "queries"):
            number = getattr(self, name)
            if not is_whole(number, 1) and (name, number) != ("queries", None):
                raise TraceError(f"layer {self.index} has {name} {number!r}, at least 1 is needed")
        if not isinstance(self.scale, (int, float)) or not 0 < self.scale < math.inf:
            raise TraceError(f"layer {self.index} has scale {self.scale!r}, which is not positive and finite")
        if self.window is not None and not is_whole(self.window, 1):
            raise TraceError(f"layer {self.index} has window {self.window!r}, which is neither None nor 1 or more")
        if self.native is not None and not all(is_whole(number, 1) for number in self.native):
            raise TraceError(f"layer {self.index} has native {self.native!r}, at least 1 list of 1 row is needed")

    @property
    def names(self) -> tuple[str, ...]:
        """Of the layer's tensors."""
        return (*NAMES, *([AHEAD] if self.ahead else []), *([NATIVE] if self.native else []))

    def code(self, name: str, dtype: torch.dtype) -> str:
        """Return what safetensors calls the dtype of one of the tensors, in a trace of `dtype`."""
        return "I32" if name == NATIVE else CODES[dtype]

    def of(self, name: str, tokens: int) -> list[int]:
        """Return the shape of one of the layer's tensors."""
        if name in ("query", AHEAD):
            return [self.heads, self.group, self.queries or tokens, self.size]
        if name == NATIVE and self.native is not None:
            return [self.native[0], self.queries or tokens, self.native[1]]
        return [self.heads, tokens, self.size]

    def check(self, tokens: int, shapes: Sequence[list[int]] | None = None) -> None:
        """Raise TraceError where the layer does not fit `tokens`, or `shapes` of its tensors are not its own."""
        if self.queries is not None and self.queries > tokens:
            raise TraceError(f"layer {self.index} has queries of {self.queries} tokens for keys of {tokens}")
        ours = [self.of(name, tokens) for name in self.names]
        if shapes is not None and shapes != ours:
            *first, last = self.names
            raise TraceError(
                f"layer {self.index} has {', '.join(first)} and {last} {', '.join(map(str, shapes))}, of {tokens} "
                f"tokens they are {', '.join(map(str, ours))}"
            )


class TensorHash:
    """SHA-256 of a tensor whose rows come a few at a time, head by head; how many at a time makes no difference.

    It is of the tensor's name, dtype, shape and the SHA-256 of each head's rows, so that a writer which gets the rows
    of all heads together need not hold them. A tensor of one dimension is one head.

    Args:
        name: in the file.
        code: its dtype as safetensors calls it.
        shape: of the whole tensor.
    """

    def __init__(self, name: str, code: str, shape: Sequence[int]) -> None:
        self._what = f"{name} {code} {list(shape)}"
        self._heads = [hashlib.sha256() for _ in range(math.prod(shape[:-2]))]

    def add(self, head: int, rows: Tensor) -> None:
        """Return the next rows of a head, contiguous on the CPU."""
        self._heads[head].update(memory(rows))

    def value(self) -> str:
        whole = hashlib.sha256(self._what.encode())
        for head in self._heads:
            whole.update(head.digest())
        return whole.hexdigest()


def hash_of(name: str, tensor: Tensor) -> str:
    """Return the `TensorHash` of a whole tensor, contiguous on the CPU."""
    made = TensorHash(name, code_of(tensor), list(tensor.shape))
    heads = tensor.flatten(0, -3) if tensor.ndim > 2 else tensor[None]
    for i, rows in enumerate(heads):
        made.add(i, rows)
    return made.value()


def code_of(tensor: Tensor) -> str:
    """Return safetensors' name of a tensor's dtype."""
    return "I32" if tensor.dtype == torch.int32 else CODES.get(tensor.dtype, "I64")


def read_header(path: Path, what: str = "a trace") -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors' entries and the metadata of a safetensors file, whose size must agree with its header.

    Raises:
        TraceError: there is no such file, or it is none, or not whole; `what` it should have been.
    """
    try:
        if path.is_dir():
            raise TraceError(f"{path} is a folder, not {what} file")
        if path.is_fifo():  # which would be waited for
            raise TraceError(f"{path} is a pipe, not {what} file, which is read in any order")
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
        raise TraceError(f"{path} is not a safetensors file, so not {what}")
    if len(text) < length:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes and its header alone takes {8 + length:,}")
    try:
        tensors = parse(text)
        metadata = dict(tensors.pop("__metadata__", {}))
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is not a safetensors file, so not {what}") from error
    if size < end:
        raise TraceError(f"{path} is truncated: it has {size:,} bytes of {end:,}")
    if size > end:
        raise TraceError(f"{path} has {size:,} bytes, {size - end:,} more than its header says")
    return tensors, metadata


def is_whole(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def each_once(indices: Sequence[int]) -> None:
    if not indices or len(set(indices)) != len(indices):
        raise TraceError(f"a trace holds at least one layer and each once, got {indices}")


def integers(positions: Tensor) -> Tensor:
    """Return `positions` as `[T]` int64 on the CPU."""
    if positions.ndim != 1 or not len(positions) or positions.dtype not in INTEGERS:
        raise TraceError(f"a trace's positions are integers [T], got {positions.dtype} {list(positions.shape)}")
    return positions.to("cpu", torch.int64).contiguous()


def check_pieces(pieces: object, tokens: int) -> tuple[str, ...] | None:
    """Return the text of a trace, a piece a token, as it is kept; None stays None. TraceError for anything else."""
    if pieces is None:
        return None
    if not isinstance(pieces, (list, tuple)) or not all(isinstance(piece, str) for piece in pieces):
        raise TraceError(f"a trace's pieces are texts, one a token, got {pieces!r:.60}")
    if len(pieces) != tokens:
        raise TraceError(f"a trace of {tokens} tokens has as many pieces of text, got {len(pieces)}")
    for piece in pieces:
        _check_whole(piece, "pieces")
    return tuple(pieces)


def _check_whole(text: str, where: str) -> None:
    """Refuse half characters, as of a file's name that is no UTF-8: no reader of JSON takes them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TraceError(f"a trace's {where} are whole Unicode characters, got {text!r:.60}") from error


def json_of(meta: Mapping[str, Any]) -> str:
    """`meta` as a file holds it."""
    check_meta(meta)
    try:
        text = json.dumps(meta, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(f"a trace's meta is what JSON can hold: {error}") from error
    _check_whole(json.dumps(meta, ensure_ascii=False), "texts")
    return text


def check_meta(meta: object) -> None:
    """Raise TraceError where `meta` is no object, or what it says of layers is not "index" -> sentence."""
    if not isinstance(meta, Mapping):
        raise TraceError("its meta is no JSON object")
    if not isinstance(meta.get("text", {}), Mapping):
        raise TraceError(f"text in its meta is an object, got {meta['text']!r:.60}")
    for name in REASONS:
        reasons = meta.get(name, {})
        if not isinstance(reasons, Mapping) or not all(isinstance(text, str) for text in reasons.values()):
            raise TraceError(f"{name} in its meta is an object of layer numbers and sentences, got {reasons!r:.60}")


def memory(tensor: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Return a contiguous CPU tensor's memory as a buffer, without a copy (`Tensor.numpy` knows no bfloat16)."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
