"""What each selected row weighs in the softmax, from the rows' logits and the log-sum-exp of all that is attended.

For implementations of `attend` that keep no weights: those never leave the registers of a fused kernel. The rows' keys
are read once more, which only who asks for the weights pays for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.core.selection import Bounds, Selection
from sparseattn.kernels.attend import block_table as paged
from sparseattn.kernels.attend import gather


def weights(
    query: Tensor,
    keys: Tensor,
    selection: Selection,
    bounds: Bounds,
    scale: float,
    block_table: Tensor | None,
    lse: Tensor,
) -> Tensor:
    """`[B,H*G,S,span]` float32: the softmax weights of the selected rows, 0 in places that are unused.

    Nothing waits for the device and every shape is that of the arguments, so a CUDA graph may capture it. Logits are
    summed anew, so a weight is right to the rounding of its logit.

    Args:
        lse: `[B,H,G]`, what `attend` gave: the denominator's logarithm.
    """
    batch, heads, group, size = query.shape
    chosen, slots = selection.start.shape[1:]
    shape = (batch, heads * group, slots, selection.span)
    if not keys.shape[2] or not slots:
        return torch.zeros(shape, device=query.device)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    row = selection.rows  # [B,Hs,R]
    reads = (row >= 0) & (row < (bounds.sealed - bounds.base)[:, None, None])
    row = torch.where(reads, row + bounds.base, 0)
    if block_table is None:
        k = gather.take(keys, row.clamp(max=keys.shape[2] - 1))  # [B,Hs,R,D]
    else:
        k = paged.take(keys, block_table, row.view(batch, heads, -1)).view(batch, chosen, -1, size)
    q = query.to(wide).reshape(batch, chosen, -1, size) * scale
    logits = q @ k.to(wide).mT  # [B,Hs,G or 1,R]
    if selection.bias is not None:
        logits = logits + selection.bias.repeat_interleave(selection.span, -1)[:, :, None]
    total = lse.to(wide).reshape(batch, chosen, -1, 1)
    logits = (logits - torch.where(total.isneginf(), 0.0, total)).masked_fill(~reads[:, :, None], -torch.inf)
    return logits.clamp(max=0.0).exp().float().reshape(shape)
