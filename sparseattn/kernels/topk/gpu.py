"""The best pages by their scores, named as rows in one Triton launch after torch's top-k."""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NAME_BLOCK = 1024
NAME_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["slots", "page"])
def name_pages(
    top,  # [B*Hs*S] float32
    ids,  # [B*Hs*S] int64
    start,  # [B*Hs*S] int32
    length,  # [B*Hs*S] int32
    slots,
    page,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = slot < slots
    used = tl.load(top + slot, mask=mask, other=float("-inf")) > float("-inf")
    tl.store(start + slot, (tl.load(ids + slot, mask=mask, other=0) * page).to(tl.int32), mask=mask)
    tl.store(length + slot, tl.where(used, page, 0), mask=mask)


def best_pages(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_pages`: torch's top-k and one launch more."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    start, length = (torch.empty(top.indices.shape, dtype=torch.int32, device=scores.device) for _ in range(2))
    slots = start.numel()
    if slots:
        with torch.cuda.device_of(scores):
            name_pages[triton.cdiv(slots, NAME_BLOCK),](
                top.values, top.indices, start, length, slots, page, BLOCK=NAME_BLOCK, **NAME_OPTIONS
            )
    return start, length
