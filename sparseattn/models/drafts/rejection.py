"""Accept drafts so that what comes out is distributed as the target's own tokens: https://arxiv.org/abs/2211.17192."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_sampled(drafts: Tensor, proposed: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Accept each draft with probability min(1, p/q), up to the first that is not, and draw the token behind those.

    That one is drawn from max(p - q, 0) at the draft that was not accepted, and from p where all were.

    Args:
        drafts: `[B,k]` int64, drawn from `proposed`.
        proposed: `[B,k,V]` float, q: the probabilities that the drafts were drawn from.
        target: `[B,k+1,V]` float, p: those of the model behind each of them.

    Returns:
        `[B]` int64, drafts accepted; `[B,k+1]` int64, the tokens to go on with: of sequence b the first
        `accepted[b] + 1`.
    """
    batch, count = drafts.shape
    p = target[:, :count].gather(2, drafts[..., None])[..., 0]
    q = proposed.gather(2, drafts[..., None])[..., 0]
    kept = torch.rand(p.shape, dtype=p.dtype, device=p.device) * q < p
    accepted = kept.cumprod(1).sum(1)
    which = torch.arange(batch, device=drafts.device)
    wanted = target[which, accepted]  # [B,V]
    if count:
        at = accepted.clamp(max=count - 1)
        rest = (wanted - proposed[which, at]).clamp(min=0)
        rejected = (accepted < count)[:, None] & (rest.sum(-1, keepdim=True) > 0)
        wanted = torch.where(rejected, rest, wanted)
    following = torch.multinomial(wanted, 1)
    tokens = torch.cat([drafts, following], 1).scatter(1, accepted[:, None], following)
    return accepted, tokens


def accept_greedy(drafts: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafts up to the first that is not the target's best token.

    Args:
        drafts: `[B,k]` int64.
        best: `[B,k+1]` int64, the target's best token behind each of them.

    Returns:
        As `accept_sampled`.
    """
    accepted = (drafts == best[:, :-1]).cumprod(1).sum(1)
    return accepted, best
