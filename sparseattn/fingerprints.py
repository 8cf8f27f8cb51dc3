"""What tells the weights of a model from others: a hash of the beginning of every parameter, whatever their dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sparseattn.hashes import tensors_hash

BEGINNING = 64  # entries of each parameter


def fingerprint(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Of names and parameters. In bfloat16, so that a model loaded in 32 bits and in 16 has one fingerprint."""
    parts = {name: value.detach().flatten()[:BEGINNING].to(torch.bfloat16) for name, value in parameters}
    return tensors_hash(parts)[:16]
