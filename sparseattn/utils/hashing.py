"""SHA-256 of tensors, and random streams seeded by one, so that no draw depends on how many were made elsewhere."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and contents."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        for part in torch.atleast_1d(tensor.detach().cpu()):  # a row at a time: views are copied
            digest.update(bytes_of(part))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> Any:
    """Return the contents of a tensor of the CPU as an array of bytes, in the order of its numbers."""
    # By strides, as a view of a single number counts as contiguous and keeps those that it had.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def file_hash(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, which is read once for each time that it changes."""
    return _read(Path(path), Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stream(*place: int | str) -> torch.Generator:
    """Return a generator on the CPU of its own for every place, such as (seed, layer, head, step)."""
    digest = hashlib.sha256(repr(place).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
