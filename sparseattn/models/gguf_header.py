"""The header of a GGUF file, read and held against the file's own tensors before anything is built by its counts.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Magic, version, number of tensors and of entries;
each entry a key, a type and a value; each tensor a name, its dimensions, a type and where its data begin.
"""

from __future__ import annotations

import math
import os
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sparseattn.models.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMENSIONS = 4  # of a tensor at most, as in ggml
TEXT, LIST = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SHORTEST = 8 + 4 + 1  # bytes of an entry without a key: length, type, a value of one byte
LEAST = 8 + 4 + 4 + 8  # bytes of a tensor's line without name and dimensions
POSITIONS = 2**31 - 1  # that a model has at most
# Entries of an architecture that say how large parts of the model are. None is larger than the largest dimension that
# a tensor of the file has: a part is a dimension of its weights.
SIZES = (
    *("embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_count", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("rope.dimension_count",),
)


@dataclass(frozen=True)
class Header:
    """What a file says of itself.

    Args:
        entries: key -> number or text; of a list its first value and its length alone.
        tensors: name -> dimensions.
    """

    entries: Mapping[str, Any]
    tensors: Mapping[str, tuple[int, ...]]


def check_header(path: Path) -> Header:
    """Return the header of the GGUF file `path`, whose counts its own tensors back.

    Raises:
        ModelError: no GGUF file, a version that is not read, counts, lengths or offsets beyond the file, or an
            architecture of more blocks or larger parts than there are tensors for; names the file and the field.
    """
    try:
        with path.open("rb") as file:
            made = _Reader(file, os.fstat(file.fileno()).st_size).header()
        _check_architecture(made)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except _Wrong as error:
        raise ModelError(f"{path} is no GGUF file that can be used: {error}") from None
    return made


class _Wrong(Exception):
    """What is wrong with a header, in a sentence without the file's name."""


class _Reader:
    """Reads a header from the beginning, never beyond the file's `size`."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size, self._at = file, size, 0

    def header(self) -> Header:
        magic = self._file.read(len(MAGIC))
        self._at = len(magic)
        if magic != MAGIC:
            raise _Wrong(f"it begins with {magic!r}, such files with {MAGIC!r}")
        version = self._number("I", "the version")
        if version not in VERSIONS:
            raise _Wrong(f"its version is {version}, and {' and '.join(map(str, VERSIONS))} are read")
        tensors = self._count("the number of tensors", LEAST)
        count = self._count("the number of entries", SHORTEST)
        entries: dict[str, Any] = {}
        for i in range(count):
            key = self._text(f"the key of entry {i}")
            if key in entries:
                raise _Wrong(f"{_shown(key)} comes twice")
            entries[key] = self._value(self._number("I", f"the type of {_shown(key)}"), _shown(key))
        shapes: dict[str, tuple[int, ...]] = {}
        offsets: dict[str, int] = {}
        for i in range(tensors):
            name = self._text(f"the name of tensor {i}")
            rank = self._number("I", f"the dimensions of {_shown(name)}")
            if not 1 <= rank <= DIMENSIONS:
                raise _Wrong(f"{_shown(name)} has 1 to {DIMENSIONS} dimensions, got {rank}")
            if name in shapes:
                raise _Wrong(f"{_shown(name)} comes twice")
            shapes[name] = tuple(self._number("Q", f"the dimensions of {_shown(name)}") for _ in range(rank))
            # no type has less than an 1/8 bit
            if min(shapes[name]) < 1 or math.prod(shapes[name]) > 8 * 8 * self._size:
                raise _Wrong(f"{_shown(name)} has dimensions {list(shapes[name])}, which the file has no room for")
            self._number("I", f"the type of {_shown(name)}")
            offsets[name] = self._number("Q", f"the offset of {_shown(name)}")
        for name, offset in offsets.items():
            if offset > self._size - self._at:
                raise _Wrong(f"{_shown(name)} begins at byte {offset:,} of the data, behind the file's end")
        return Header(entries, shapes)

    def _value(self, kind: int, key: str, deep: int = 0) -> Any:
        if kind in NUMBERS:
            return self._number(NUMBERS[kind], key)
        if kind == TEXT:
            return self._text(key)
        if kind != LIST or deep > 1:
            raise _Wrong(
                f"{key} is of type {kind}, which is not known" if kind != LIST else f"{key} is a list of lists"
            )
        inner = self._number("I", f"the type of {key}")
        if inner in NUMBERS:
            size = struct.calcsize(f"<{NUMBERS[inner]}")
            count = self._count(f"the length of {key}", size)
            code = f"<{count}{NUMBERS[inner]}"
            return list(struct.unpack(code, self._bytes(size * count, key)))
        count = self._count(f"the length of {key}", 8)
        for _ in range(count):
            self._value(inner, key, deep + 1)
        return [None] * count

    def _count(self, what: str, each: int) -> int:
        """Return a number of things of `each` bytes at least, for which the rest of the file has room."""
        count: int = self._number("Q", what)
        if count > (self._size - self._at) // each:
            raise _Wrong(f"{what} is {count:,}, and the file has {self._size - self._at:,} more bytes")
        return count

    def _text(self, what: str) -> str:
        data = self._bytes(self._count(f"the length of {what}", 1), what)
        return data.decode(errors="replace")  # as gguf's own tools, which show such tokens

    def _number(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        data = self._file.read(count)
        self._at += len(data)
        if len(data) < count:
            raise _Wrong(f"it ends within {what}, at byte {self._at:,}")
        return data


def _check_architecture(made: Header) -> None:
    name = made.entries.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise _Wrong(f"general.architecture is text, got {reprlib.repr(name)}")
    blocks = [key.split(".")[1] for key in made.tensors if key.startswith("blk.") and key.count(".") > 1]
    indices = {int(text) for text in blocks if text.isascii() and text.isdecimal() and len(text) < 10}
    key = f"{name}.block_count"
    count = made.entries.get(key)
    if type(count) is not int or not 1 <= count <= len(indices) or indices != set(range(len(indices))):
        raise _Wrong(f"{key} is {reprlib.repr(count)}, and the file has tensors of {len(indices)} blocks")
    largest = max((max(shape) for shape in made.tensors.values()), default=0)
    for part in SIZES:
        key = f"{name}.{part}"
        given = made.entries.get(key, 1)
        for value in given if isinstance(given, list) else [given]:
            if type(value) is not int or not 0 <= value <= largest:
                raise _Wrong(f"{key} is {reprlib.repr(value)}, and the largest dimension of a tensor is {largest:,}")
        if isinstance(given, list) and len(given) > max(len(indices), 1):
            raise _Wrong(f"{key} has {len(given):,} values, and the file has tensors of {len(indices)} blocks")
    key = f"{name}.context_length"
    positions = made.entries.get(key, 1)
    if type(positions) is not int or not 1 <= positions <= POSITIONS:
        raise _Wrong(f"{key} is a number of tokens up to {POSITIONS:,}, got {reprlib.repr(positions)}")


def _shown(text: str) -> str:
    return reprlib.repr(text)[1:-1]
