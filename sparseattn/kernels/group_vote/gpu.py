"""The vote of a query group by "softmax" as a Triton kernel: the second launch of kernels that score.

The first launch writes each query head's scores and the logarithm of each tile's sum of exponentials.
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def log_sum(scores):
    """Logarithm of the sum of exponentials of each row `[M,N]`; -inf where all are."""
    peak = tl.max(scores, 1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    return anchor + log_or_inf(tl.sum(tl.exp(scores - anchor[:, None]), 1))


@triton.jit
def log_or_inf(total):
    none = total == 0.0  # the interpreter warns of the logarithm of zero
    return tl.where(none, float("-inf"), tl.log(tl.where(none, 1.0, total)))


@triton.jit(do_not_specialize=["pages", "tiles"])
def vote_softmax(
    scores,  # [B,H,G,P] float32
    tile_lse,  # [B,H,G,tiles] float32
    out,  # [B,H,P] float32
    pages,
    tiles,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the logarithm of the sum of the query heads' probabilities; -inf where no page is real."""
    head = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    row = head * G + g
    total = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for first in range(0, tiles, 64):
        tile = first + tl.arange(0, 64)
        mask = (g < G)[:, None] & (tile < tiles)[None, :]
        part = log_sum(tl.load(tile_lse + row[:, None] * tiles + tile[None, :], mask=mask, other=float("-inf")))
        peak = tl.maximum(total, part)
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        total = anchor + log_or_inf(tl.exp(total - anchor) + tl.exp(part - anchor))
    total = tl.where(total == float("-inf"), 0.0, total)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (g < G)[:, None] & (page < pages)[None, :]
    given = tl.load(scores + row[:, None] * pages + page[None, :], mask=mask, other=float("-inf"))
    tl.store(out + head * pages + page, log_sum(tl.trans(given - total[:, None])), mask=page < pages)


def launch(group: int, block: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the compile-time constants and options of `vote_softmax`, for a launch and for compiling ahead alike.

    `block`: rows or pages that one program votes on.
    """
    constants = {"G": group, "BLOCK_G": triton.next_power_of_2(group), "BLOCK": block}
    return constants, {"num_warps": 4, "enable_fp_fusion": True}


def vote_tiles(scores: Tensor, tile_lse: Tensor, block: int) -> Tensor:
    """Return the votes `[B,H,P]` float32 of scores `[B,H,G,P]`, whose tiles' log-sum-exps are `[B,H,G,tiles]`."""
    batch, heads, group, pages = scores.shape
    out = scores.new_empty(batch, heads, pages)
    if out.numel():
        constants, options = launch(group, block)
        with torch.cuda.device_of(scores):  # Triton launches on the current device
            vote_softmax[triton.cdiv(pages, block), batch * heads](
                scores, tile_lse, out, pages, tile_lse.shape[3], **constants, **options
            )
    return out
