"""Attention over chosen pages of vLLM's CPU cache in torch, which is the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, StepPages
from sparseattn.kernels.topk.dispatch import best


def attend(
    query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, scores: Tensor, count: int, scale: float
) -> None:
    """As `dispatch.attend_blocks`."""
    page, per, heads, chosen = pages.page, pages.unit // pages.page, cache.packed.shape[1], scores.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    share, each = query.shape[1] // chosen, chosen // heads
    top = best(scores, count)  # [R,Hs,S]
    for r, token in enumerate(pages.tokens.tolist()):
        always = pages.always[r][pages.always[r] >= 0].long()
        for s in range(chosen):
            ids = top[r, s][top[r, s] >= 0]
            places = torch.cat([pages.table[r].long()[ids // per] * per + ids % per, always])
            k, v = (read(places, page)[:, s // each].flatten(0, 1) for read in (cache.keys, cache.values))
            rows = len(k) - page + int(pages.tails[r])
            own = slice(s * share, (s + 1) * share)
            weights = torch.softmax(query[token, own].to(wide) @ k[:rows].to(wide).mT * scale, -1)
            out[token, own] = (weights @ v[:rows].to(wide)).to(out.dtype)
