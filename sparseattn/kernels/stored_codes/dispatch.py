"""Codes of sequences' rows, and what these miss, from a shared store, by the implementation that fits."""

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


def gather_missed(store: Tensor, table: Tensor, width: int, unit: int, impl: str | None = None) -> Tensor:
    """Return the records of rows that codes miss (`product_codes.missed_rows`) of sequences' entries.

    Args:
        store: `[entries,H,X*W]` uint8, whose records name rows of their own entry; a head's bytes of an entry are
            adjacent.
        table, impl: as of `gather`.
        width: W.
        unit: rows of an entry.

    Returns:
        `[B,H,E*X,W]` uint8, which name rows of the sequences; none of entries that are none.
    """
    kernel = STORED.pick(impl, store.device, torch.float32)
    found: Tensor = kernel.gather_missed(store, table, width, unit)
    return found
