"""Attention of one query per head over listed latents, whose values are a part of their keys (MLA).

Multi-head latent attention (https://arxiv.org/abs/2405.04434) keeps one latent for all heads. With the projection to
keys multiplied into the query and the one to values behind the sum, every head attends to the same rows, and what it
sums is the first part of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_latents(
    query: Tensor, latents: Tensor, rows: Tensor, value_size: int, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return attention over exactly the rows named.

    Args:
        query: `[B,G,D]`, G heads that read the same rows.
        latents: `[B,N,D]`, the query's dtype and device; the first `value_size` channels are the values.
        rows: `[B,S]` integers, distinct; a negative one is unused.
        value_size: channels of a value, 1 to D.
        scale: factor of the logits.
        sinks: `[G]`, a logit of each head that nothing is read for; None: none.

    Returns:
        `[B,G,value_size]` in the query's dtype; 0 where no row is named.
    """
    used = rows >= 0  # [B,S]
    at = rows.clamp(min=0).long()[..., None].expand(-1, -1, latents.shape[2])
    read = latents.gather(1, at)  # [B,S,D]
    logits = ((query @ read.mT).float() * scale).masked_fill(~used[:, None], -torch.inf)  # [B,G,S]
    if sinks is None:
        weights = logits.softmax(-1).nan_to_num()  # NaN: no row at all
    else:
        with_sink = torch.cat([logits, sinks.float()[None, :, None].expand(len(logits), -1, 1)], -1)
        weights = with_sink.softmax(-1)[..., :-1]
    return weights.to(query.dtype) @ read[..., :value_size]
