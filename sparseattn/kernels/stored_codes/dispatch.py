"""Codes of sequences' rows from a shared store, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation

STORED = Operation(__package__, "torch", "numba")


def gather(store: Tensor, table: Tensor, impl: str | None = None) -> Tensor:
    """Return the codes of sequences' rows, each byte of all rows together, as kernels read them.

    Args:
        store: `[entries,H,M,unit]` uint8, M bytes of each of an entry's rows; a head's bytes of an entry are adjacent.
        table: `[B,E]` int32, which entry is a sequence's; negative: none, whose codes may be anything.
        impl: see `implementations`.

    Returns:
        `[B,H,M,E*unit]` uint8.
    """
    return STORED.pick(impl, store.device, torch.float32).gather(store, table)  # of bytes alone
