"""Rows of an engine's cache that lie plainly, as vLLM's on CUDA: those of entries, and which entries a step finishes.

An entry is computed from its rows as they are stored, so that computing it again changes nothing: recycled blocks,
preempted requests and blocks that requests share need no care. It says something from its last row on; before, it holds
what the rows of the block's last owner say, and nobody may name it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_at(store: Tensor, places: Tensor, unit: int) -> Tensor:
    """`[n,H,unit,D]`: copies of the rows of entries. Shapes are those of the arguments: a CUDA graph may hold it.

    Args:
        store: `[blocks,H,block,D]`, any strides; entry p is of the rows in places `p * unit` to `(p + 1) * unit`.
        places: `[n]` int64, entries; one may be named more than once.
        unit: rows of an entry, which divide a block's.
    """
    each = store.shape[2] // unit
    return store.unflatten(2, (each, unit))[places // each, :, places % each]


def finished(slots: Tensor, unit: int, most: int) -> Tensor:
    """`[most]` int64: the entries whose last rows are among the places `slots` `[T]` of a step's new rows, then zeros.

    Which are finished is found on the device, how many at most the host knows: nothing waits. Place 0 is in vLLM's null
    block, which no request is given.
    """
    last = (slots >= 0) & (slots % unit == unit - 1)
    at = last.to(torch.uint8).topk(min(most, len(slots)), sorted=False).indices
    return torch.where(last[at], slots[at] // unit, 0).long()
