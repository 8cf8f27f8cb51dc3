"""Rows of sequences that differ in length: written to places of their own, and moved when some of them are sealed.

The buffers are those of `StoredRows` whose rows lie alike: keys and values `[B,H,N,D]`, positions `[B,N]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from sparseattn.cache.layout import Zones
from sparseattn.core.row_buffer import RowBuffer

Buffers: TypeAlias = "tuple[RowBuffer, RowBuffer, RowBuffer]"


def write_apart(buffers: Buffers, new: tuple[Tensor, Tensor, Tensor], place: Tensor, end: int) -> None:
    """Store `new` rows, keys, values and positions, which end at row `end`, at rows `place` `[B,n]`; those of negative
    positions not."""
    keys, values, at = new
    parts = [(buffers[0].resize(end, keys), keys), (buffers[1].resize(end, values), values)]
    positions = buffers[2].resize(end)
    for b in range(len(at)):
        real = (at[b] >= 0).nonzero()[:, 0]
        target = place[b][real]
        positions[b].index_copy_(0, target, at[b][real])
        target, real = target.to(keys.device), real.to(keys.device)
        for storage, rows in parts:
            storage[b].index_copy_(1, target, rows[b].index_select(1, real))


def make_room(buffers: Buffers, zones: Zones, each: Sequence[int]) -> None:
    """Where sequence b seals `each[b]` rows and others more, move its later rows behind the zone and zero the gap."""
    low, most = zones.start, max(each)
    later_rows = [recent - sealed for recent, sealed in zip(zones.recent, each, strict=True)]
    end = low + most + max(later_rows)
    for buffer in buffers:
        buffer.resize(end)
    for b, (sealed, left) in enumerate(zip(each, later_rows, strict=True)):
        if sealed == most:
            continue
        for buffer in buffers:
            rows = buffer.full[b].movedim(buffer.dim - 1, 0)  # [N,...]
            later = rows[low + sealed : low + sealed + left].clone()
            rows[low + sealed : low + most] = 0
            rows[low + most : low + most + left] = later


def keep_recent(buffers: Buffers, zones: Zones, each: Sequence[int]) -> None:
    """Where `each` rows of the sequences have been taken apart, keep the rest in new storage."""
    low = zones.start
    later_rows = [recent - sealed for recent, sealed in zip(zones.recent, each, strict=True)]
    end = low + max(later_rows)
    for buffer in buffers:
        stored = buffer.full
        buffer.reset()
        buffer.resize(end, stored)
        for b, (rows, left) in enumerate(zip(each, later_rows, strict=True)):
            source, target = (x[b].movedim(buffer.dim - 1, 0) for x in (stored, buffer.full))  # [N,...]
            target[:low] = source[:low]
            target[low : low + left] = source[low + rows : low + rows + left]
