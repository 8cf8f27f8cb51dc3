"""The specification of `attend`, in plain torch: a mask of the rows named, then a softmax over them.

Cost grows with the context; it is what the fast kernels are tested against, also in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import paged
from sparseattn.selection import Bounds, Selection


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
    """As `sparseattn.kernels.attend`; float64 inputs are computed and returned in float64, all others in float32."""
    if block_table is not None:
        keys, values = (paged.flatten(store, block_table) for store in (keys, values))
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
    # A row nobody reads may hold anything (unfilled storage, NaN included), and 0 * NaN is NaN.
    unread = ~reads.any(2)[..., None]  # [B,H,N,1]
    out = weights @ values.to(wide).masked_fill(unread, 0.0)
    return out.to(query.dtype), lse
