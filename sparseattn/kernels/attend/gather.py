"""`attend` by gathering the named rows: runs on any device, at a cost proportional to the rows read.

The sink and the recent rows are read in place, as slices; only selected rows are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import block_table as paged


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `dispatch.attend`, accumulated in float32 (float64 for float64). On a GPU it synchronises."""
    if block_table is not None:
        keys, values, selection, bounds = paged.compact(keys, values, selection, bounds, block_table)
    batch, heads, group, size = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.to(wide) * scale
    chosen = selection.start.shape[1]
    served = heads * group // chosen  # query heads that share one choice

    row = selection.rows  # [B,Hs,R]
    if not keys.shape[2]:
        row = row[..., :0]  # nothing is stored, so nothing can be re-read either
    reads = (row >= 0) & (row < (bounds.sealed - bounds.base)[:, None, None])
    # An unused place re-reads the head's highest used row: its weight is 0, and 0 times a real row is 0.
    spare = torch.where(reads, row, -1).amax(-1, keepdim=True) if row.shape[-1] else row
    row = (torch.where(reads, row, spare).clamp(min=0) + bounds.base).clamp(max=keys.shape[2] - 1)
    k, v = take(keys, row).to(wide), take(values, row).to(wide)  # [B,Hs,R,D]
    if bool((spare < 0).any()):  # a head with no used place has no real row to re-read
        v = v.masked_fill((spare < 0)[..., None], 0.0)
    far = q.reshape(batch, chosen, served, size) @ k.mT  # [B,Hs,served,R]
    if selection.bias is not None:
        far = far + selection.bias.repeat_interleave(selection.span, -1)[:, :, None, : row.shape[-1]]
    logits = [far.masked_fill(~reads[:, :, None], -torch.inf).reshape(batch, heads, group, row.shape[-1])]
    parts = []
    for low, high, lows, highs in (
        (0, int(bounds.sink.max()), None, bounds.sink),
        (int(bounds.sealed.min()), int(bounds.rows.max()), bounds.sealed, bounds.rows),
    ):
        if high <= low:
            continue
        at = torch.arange(low, high, device=keys.device)
        real = at < highs[:, None]
        if lows is not None:
            real &= at >= lows[:, None]
        zone_k, zone_v = keys[:, :, low:high].to(wide), values[:, :, low:high].to(wide)
        zone_logits = q @ zone_k.mT
        if not bool(real.all()):
            zone_logits = zone_logits.masked_fill(~real[:, None, None], -torch.inf)
            zone_v = zone_v.masked_fill(~real[:, None, :, None], 0.0)
        logits.append(zone_logits)
        parts.append(zone_v)

    joined = torch.cat(logits, -1)
    lse = joined.logsumexp(-1)  # [B,H,G]
    empty = lse.isneginf()[..., None]
    weights = joined.softmax(-1).masked_fill(empty, 0.0)
    first, *rest = weights.split([part.shape[-1] for part in logits], -1)
    out = (first.reshape(batch, chosen, served, row.shape[-1]) @ v).reshape(batch, heads, group, size)
    for weight, zone_v in zip(rest, parts, strict=True):
        out = out + weight @ zone_v
    return out.to(query.dtype), lse


def take(rows: Tensor, index: Tensor) -> Tensor:
    """`[B,Hs,R,D]`: the rows `index` `[B,Hs,R]` of `[B,H,N,D]`, Hs a multiple of H; other rows are not touched."""
    if index.numel() == 0:
        return rows.new_empty(*index.shape, rows.shape[3])
    batch, heads = rows.shape[:2]
    b = torch.arange(batch, device=index.device)[:, None, None]
    h = (torch.arange(index.shape[1], device=index.device) // (index.shape[1] // heads))[None, :, None]
    step_b, step_h, step_n, step_d = rows.stride()
    if step_d == 1 and step_n > 0 and step_b % step_n == 0 and step_h % step_n == 0:
        # One index_select over the storage seen as a list of rows: several times faster than advanced indexing.
        flat = (b * (step_b // step_n) + h * (step_h // step_n) + index).flatten()
        last = (batch - 1) * step_b // step_n + (heads - 1) * step_h // step_n + rows.shape[2]
        every = rows.as_strided((max(last, 1), rows.shape[3]), (step_n, 1))
        return every.index_select(0, flat).view(*index.shape, rows.shape[3])
    return rows[b, h, index]
