"""Safetensors files that carry the SHA-256 of their own metadata and tensors, so that a damaged one is found out.

The hash tells what was written from what was not; it does not say that what was written makes sense. Who loads a file
checks names, shapes, dtypes and ranges before anything is done with them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from sparseattn.utils.files import naming, replacing
from sparseattn.utils.hashing import bytes_of, tensors_hash

HASH = "sha256"  # the metadata entry
TENSORS_HASH = "tensors"  # that of older versions, over the tensors alone
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFileError(ValueError):
    """A file that cannot be read or written, in one sentence."""


def content_hash(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of the metadata, all but the hash's own entry, and of the tensors."""
    said = json.dumps({name: text for name, text in metadata.items() if name != HASH}, sort_keys=True)
    return hashlib.sha256(f"{said}\n{tensors_hash(tensors)}".encode()).hexdigest()


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors, from whatever device, whole or not at all.

    Raises:
        TensorFileError: a file that cannot be written.
    """
    apart = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        with naming(path), replacing(path) as file:
            _write(file, apart, {**metadata, HASH: content_hash(apart, metadata)})
    except OSError as error:
        raise TensorFileError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write safetensors a tensor at a time: the package makes the bytes of all of them before it writes one.

    https://github.com/huggingface/safetensors#format. Wide numbers come first, so that all of them lie aligned.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0
    for name in order:
        tensor = tensors[name]
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(bytes_of(tensors[name]).data)


def load_tensors(
    path: str | os.PathLike[str], format: str, version: str, what: str, *, older: str | None = None
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a file of `save_tensors`.

    Args:
        path: the file.
        format, version: what its metadata must say.
        what: that in words, with an article, such as "an index of sparseattn".
        older: a version that is read as well, whose hash is of the tensors alone: its metadata may be anything.

    Raises:
        TensorFileError: missing, damaged, or of another format or version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != format:
                raise TensorFileError(f"{path} is a safetensors file, but not {what}")
            said = metadata.get("version")
            if said is None or said not in (version, older):
                reads = version if older is None else f"{older} and {version}"
                raise TensorFileError(f"{path} is {what}, but of version {said}; this sparseattn reads {reads}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise TensorFileError(f"{path} is damaged or not {what}: {error}") from error
    if said == older:
        if tensors_hash(tensors) != metadata.get(TENSORS_HASH):
            raise TensorFileError(f"{path} is damaged: its tensors are not those that were written")
    elif content_hash(tensors, metadata) != metadata.get(HASH):
        raise TensorFileError(f"{path} is damaged: its tensors or metadata are not those that were written")
    return metadata, tensors


def beginnings(path: str | os.PathLike[str], entries: int) -> dict[str, Tensor]:
    """Return the first `entries` numbers of every tensor of a safetensors file, the rest of which is not read.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    starts = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                part = file.get_slice(name)
                first, *others = part.get_shape() or [1]
                rows = min(first, -(-entries // max(math.prod(others), 1)))
                starts[name] = (part[:rows] if part.get_shape() else file.get_tensor(name)).flatten()[:entries]
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is no safetensors file: {error}") from error
    return starts
