"""Codes of sequences' rows from a shared store in torch, which is the specification."""

from __future__ import annotations

from torch import Tensor


def gather(store: Tensor, table: Tensor) -> Tensor:
    """As `dispatch.gather`."""
    return store[table.long().clamp(min=0)].permute(0, 2, 3, 1, 4).flatten(3)  # of [B,E,H,M,unit]
