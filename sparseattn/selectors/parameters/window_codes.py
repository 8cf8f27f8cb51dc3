"""What A2ATS codes keys by: a factor of the queries' second moment, and one codebook of keys before RoPE.

https://arxiv.org/abs/2502.12665. Letters: H KV heads, G query heads per KV head, D head size, K centroids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.rope import Rope
from sparseattn.kernels.product_kmeans.dispatch import product_codebooks

RIDGE = 1e-6  # added to the moment, whose numbers have the root mean square 1


def window_codes(keys: Tensor, queries: Tensor, bits: int, seed: int) -> dict[str, Tensor]:
    """Return factor `[H,D,D]` and centroids `[H,1,2^bits,D]`, float32, of keys times the factor.

    With the lower factor L of `C = L L'`, an error e of a key changes the logits of the queries of second moment C by
    `e'Ce = |e L|^2` on average, so that plain distances of `k L` are errors of logits.

    Args:
        keys: `[H,n,D]` float32 before RoPE (`before_rope`).
        queries: `[H,G,m,D]` all at one position (`at_distance`).
        bits: of a name.
        seed: of the first centroids.
    """
    factor = factor_of(queries)
    return {"factor": factor, "centroids": product_codebooks(keys @ factor, 1, bits, seed)}


def factor_of(queries: Tensor) -> Tensor:
    """Return `[H,D,D]` float32, the lower Cholesky factor of the second moment of queries `[H,G,m,D]`, as long as one
    whose numbers have the root mean square 1."""
    flat = queries.double().flatten(1, 2)
    moment = flat.mT @ flat
    length = moment.square().mean((1, 2), keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    ridge = RIDGE * torch.eye(moment.shape[2], dtype=moment.dtype, device=moment.device)
    return torch.linalg.cholesky(moment / length + ridge).float()


def before_rope(keys: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Return keys `[...,n,D]` at positions `[n]` as they are at position 0. YaRN's factor stays, as logits have it."""
    return rope.turn(keys, -positions)


def at_distance(queries: Tensor, positions: Tensor, rope: Rope, distance: int) -> Tensor:
    """Return queries as they are `distance` tokens behind a key at position 0.

    Args:
        queries: `[...,m,D]` after RoPE.
        positions: of them, any shape that broadcasts to `[...,m]`.
    """
    return rope.turn(queries, distance - positions)
