"""What tells the weights of a model from others: a hash of the beginning of every parameter, whatever their dtype."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from sparseattn.utils.hashing import tensors_hash
from sparseattn.utils.tensor_files import beginnings

BEGINNING = 64  # entries of each parameter


def fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Of names and parameters. In bfloat16, so that a model in float32 and in bfloat16 has one fingerprint."""
    parts = {name: _whole(value.detach()).flatten()[:BEGINNING].to(torch.bfloat16) for name, value in parameters}
    return tensors_hash(parts)[:16]


def _whole(value: Tensor) -> Tensor:
    """Return a parameter of which processes may have a part each, one at a time: all of them come here together.

    Raises:
        ValueError: it is offloaded, so that nothing of it lies anywhere now.
    """
    if value.is_meta:
        raise ValueError("this model's weights are offloaded, so they have no fingerprint: load it without offloading")
    gathered: Callable[[], Tensor] | None = getattr(value, "full_tensor", None)
    return value if gathered is None else gathered()


def of_folder(folder: str | os.PathLike[str]) -> list[str]:
    """Those that the model whose weights lie in a folder may have: its output layer may be its embedding, or not.

    Raises:
        ValueError: the folder holds no safetensors files.
        OSError: it cannot be read.
    """
    parts: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        parts |= beginnings(path, BEGINNING)
    if not parts:
        raise ValueError(f"{os.fspath(folder)} holds no .safetensors files, by which a plan knows its model")
    untied = {name: part for name, part in parts.items() if name != "lm_head.weight"}
    return list(dict.fromkeys(fingerprint(each.items()) for each in (parts, untied)))
