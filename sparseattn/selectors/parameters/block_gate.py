"""The gate of SeerAttention-R: what it makes of a block's keys and of a group's queries.

Letters: H KV heads, G query heads per KV head, D head size, P blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

POOLS = 3  # of a block's keys: maximum, minimum, mean


def first_maps(heads: int, group: int, size: int) -> dict[str, Tensor]:
    """Return the maps of a gate that has learned nothing: keys `[H,D,3,D]` and queries `[H,G,D,D]`, their means."""
    identity = torch.eye(size)
    keys = torch.zeros(heads, size, POOLS, size)
    keys[:, :, POOLS - 1] = identity
    return {"keys": keys, "queries": (identity / group).expand(heads, group, size, size).contiguous()}


def pooled(keys: Tensor, page: int) -> Tensor:
    """Return `[..,P,D,3]` of keys `[..,P*page,D]` before RoPE."""
    blocks = keys.unflatten(-2, (-1, page))
    return torch.stack([blocks.amax(-2), blocks.amin(-2), blocks.mean(-2)], -1)


def gate_keys(keys: Tensor, maps: Tensor, page: int) -> Tensor:
    """Return gate keys `[..,H,P,D]` before RoPE, of keys `[..,H,P*page,D]` by maps `[..,H,D,3,D]`."""
    return pooled(keys, page).flatten(-2) @ maps.flatten(-3, -2)


def gate_query(query: Tensor, maps: Tensor) -> Tensor:
    """Return the gate's queries `[..,H,D]` before RoPE, of queries `[..,H,G,D]` by maps `[..,H,G or 1,D,D]`."""
    return (query[..., None, :] @ maps)[..., 0, :].sum(-2)
