"""The specification of `attend`, in plain torch: a mask of the rows named, then a softmax over them.

Cost grows with the context; it is what the fast kernels are tested against, also in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import block_table as paged


def named(selection: Selection, bounds: Bounds, heads: int, rows: int) -> Tensor:
    """`[B,H,Hs/H,rows]` bool: the rows a selection and its bounds name, for each selection head."""
    row = torch.arange(rows, device=bounds.rows.device)
    chosen = torch.zeros(*selection.start.shape[:2], rows, dtype=torch.bool, device=row.device)
    chosen[..., bounds.base :] = selection.mask(rows - bounds.base)
    chosen &= (row < bounds.sealed[:, None])[:, None]
    return (chosen | bounds.dense(rows)[:, None]).unflatten(1, (heads, -1))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend`; float64 inputs are computed and returned in float64, all others in float32."""
    if block_table is not None:
        keys, values = (paged.flatten(store, block_table) for store in (keys, values))
    weights, lse, reads = _softmax(query, keys, selection, bounds, scale)
    # A row nobody reads may hold anything (unfilled storage, NaN included), and 0 * NaN is NaN.
    unread = ~reads.any(2)[..., None]  # [B,H,N,1]
    out = weights @ values.to(weights.dtype).masked_fill(unread, 0.0)
    return out.to(query.dtype), lse


def weights(
    query: Tensor,
    keys: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
) -> Tensor:
    """`[B,H*G,S,span]` float32: the softmax weights of the selected rows, 0 in places that are unused."""
    if block_table is not None:
        keys = paged.flatten(keys, block_table)
    batch, heads, group, _ = query.shape
    of_rows, _, _ = _softmax(query, keys, selection, bounds, scale)  # [B,H,G,N]
    row = selection.rows  # [B,Hs,R]
    reads = (row >= 0) & (row < (bounds.sealed - bounds.base)[:, None, None])
    row = torch.where(reads, row + bounds.base, keys.shape[2])  # a place behind the last row stands for none
    row = row.unflatten(1, (heads, -1)).expand(-1, -1, group, -1)  # [B,H,G,R]
    listed = torch.nn.functional.pad(of_rows, (0, 1)).gather(-1, row)
    return listed.float().reshape(batch, heads * group, -1, selection.span)


def _softmax(
    query: Tensor, keys: Tensor, selection: Selection, bounds: Bounds, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights `[B,H,G,N]` of every row, their lse `[B,H,G]`, and which rows are read, `[B,H,Hs/H,N]`
    bool."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    reads = named(selection, bounds, keys.shape[1], keys.shape[2])  # [B,H,Hs/H,N]
    logits = query.to(wide) @ keys.to(wide).mT * scale  # [B,H,G,N]
    if selection.bias is not None:
        base = bounds.base
        bias = torch.zeros(*selection.start.shape[:2], keys.shape[2], dtype=wide, device=keys.device)
        bias[..., base:] = selection.row_bias(keys.shape[2] - base)
        recent = torch.arange(keys.shape[2], device=keys.device) >= bounds.sealed[:, None]  # not the selection's
        bias = bias.masked_fill(recent[:, None], 0.0)
        logits = logits + bias.unflatten(1, (keys.shape[1], -1))
    logits = logits.masked_fill(~reads, -torch.inf)
    lse = logits.logsumexp(-1)  # [B,H,G]
    weights = logits.softmax(-1).masked_fill(lse.isneginf()[..., None], 0.0)  # exp(logits - lse) sums to 1 only roughly
    return weights, lse, reads
