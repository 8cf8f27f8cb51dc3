"""Locret's retaining heads: a network that foresees by a token's query, key and value how much it is attended to.

https://arxiv.org/abs/2410.01805. Letters: H KV heads, G query heads per KV head, D head size, W hidden numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sparseattn.utils.hashing import stream

CHUNK = 4096  # rows whose hidden numbers are held at a time


def random_heads(heads: int, group: int, size: int, hidden: int, seed: int, layer: int) -> dict[str, Tensor]:
    """Return weights that are not trained, float32: queries `[H,G,D,W]`, keys and values `[H,D,W]`, out `[H,W]`."""
    draws = stream(seed, "retaining heads", layer)
    shapes = {"queries": (heads, group, size, hidden), "keys": (heads, size, hidden), "values": (heads, size, hidden)}
    inputs, bound = (group + 2) * heads * size, hidden**-0.5
    made = {name: (torch.rand(shape, generator=draws) * 2 - 1) * inputs**-0.5 for name, shape in shapes.items()}
    return made | {"out": (torch.rand(heads, hidden, generator=draws) * 2 - 1) * bound}


def foreseen(weights: Mapping[str, Tensor], queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return `[B,H,n]` float32, the largest logit that a later query is expected to have with each row.

    Args:
        weights: of `random_heads`, or trained.
        queries: `[B,H,G,n,D]` before RoPE, those of the rows' own tokens.
        keys, values: `[B,H,n,D]`, keys before RoPE.
    """
    scores = []
    for query, key, kept in zip(queries.split(CHUNK, 3), keys.split(CHUNK, 2), values.split(CHUNK, 2), strict=True):
        hidden = torch.einsum("bhgnd,hgdw->bnw", query, weights["queries"])
        hidden = hidden + torch.einsum("bhnd,hdw->bnw", key, weights["keys"])
        hidden = hidden + torch.einsum("bhnd,hdw->bnw", kept, weights["values"])
        scores.append(torch.nn.functional.silu(hidden) @ weights["out"].T)  # [B,n,H]
    return torch.cat(scores, 1).mT
