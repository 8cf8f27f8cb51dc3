"""K and V in a paged store, as serving engines keep them: blocks of rows, strung together by a table per sequence.

PagedAttention, https://arxiv.org/abs/2309.06180
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection


def check(store: Tensor, batch: int, bounds: Bounds | None, table: Tensor) -> None:
    """Check that a block table `[B,M]` fits the store `[blocks,H,block_size,D]`; else ValueError. Entries on the CPU
    only."""
    if table.ndim != 2 or table.shape[0] != batch or table.dtype != torch.int32 or table.device != store.device:
        raise ValueError(
            f"a block table is int32 [B,blocks of a sequence] with B = {batch} on {store.device}, got {table.dtype} "
            f"{list(table.shape)} on {table.device}"
        )
    blocks, size = store.shape[0], store.shape[2]
    if not blocks or not size:
        raise ValueError(f"a paged store [blocks,H,block_size,D] has blocks and rows in them, got {list(store.shape)}")
    if table.device.type == "cpu":
        end = torch.full((batch,), table.shape[1] * size) if bounds is None else bounds.rows
        needed = torch.arange(table.shape[1]) * size < end[:, None]
        if bool((needed & ((table < 0) | (table >= blocks))).any()):
            b, i = (needed & ((table < 0) | (table >= blocks))).nonzero()[0].tolist()
            raise ValueError(
                f"the block table names blocks 0 to {blocks - 1} for the rows that are stored, got {int(table[b, i])} "
                f"at [{b},{i}]"
            )


def flatten(store: Tensor, table: Tensor) -> Tensor:
    """`[B,H,N,D]`: every row of every sequence in order, copied; the meaning of a paged store `[blocks,H,size,D]`."""
    blocks = table.long().clamp(0, store.shape[0] - 1)  # entries behind a sequence's rows may be anything
    return store[blocks].transpose(1, 2).flatten(2, 3)


def take(store: Tensor, table: Tensor, row: Tensor) -> Tensor:
    """`[B,H,R,D]`: the rows `row` `[B,H,R]` of a paged store; no other is touched."""
    size = store.shape[2]
    entry = (row // size).clamp(max=table.shape[1] - 1)
    block = table.long().gather(1, entry.flatten(1)).view_as(entry).clamp(0, store.shape[0] - 1)
    head = torch.arange(store.shape[1], device=row.device)[None, :, None]
    return store[block, head, row % size]


def compact(
    keys: Tensor, values: Tensor, selection: Selection, bounds: Bounds, table: Tensor
) -> tuple[Tensor, Tensor, Selection, Bounds]:
    """Copy the rows that are named, and no others, out of a paged store: the same attention over rows in place.

    Returns:
        keys, values `[B,H,N',D]` as `sink | selected, a span a slot | recent`, and the selection and bounds of them.
        Places of a span that are not used may hold anything. On a GPU the host waits for the widest zones.
    """
    batch, chosen, slots = selection.start.shape
    heads, span = keys.shape[1], selection.span
    row = selection.rows + bounds.base  # [B,Hs,S*span]; below base where unused
    used = (row >= bounds.base) & (row < bounds.sealed[:, None, None])
    row = torch.where(used, row, 0).view(batch, heads, -1)
    sink, recent = int(bounds.sink.max()), int((bounds.rows - bounds.sealed).clamp(min=0).max())
    first_rows = torch.arange(sink, device=row.device).expand(batch, -1)
    late = bounds.sealed.long()[:, None] + torch.arange(recent, device=row.device)
    row = torch.cat(
        [first_rows[:, None].expand(-1, heads, -1), row, late[:, None].expand(-1, heads, -1)], 2
    )  # [B,H,N']

    parts = [take(store, table, row) for store in (keys, values)]
    each = chosen // heads
    place = torch.arange(each * slots * span, dtype=torch.int32, device=row.device)[::span].view(each, slots)
    start = place.repeat(heads, 1).expand(batch, -1, -1)
    length = used.view(batch, chosen, slots, span).sum(-1, dtype=torch.int32)
    sealed = torch.full_like(bounds.sealed, sink + each * slots * span)
    zones = Bounds(bounds.sink, sink, sealed, sealed + (bounds.rows - bounds.sealed).clamp(min=0))
    return parts[0], parts[1], Selection(start, length, span, bias=selection.bias), zones
