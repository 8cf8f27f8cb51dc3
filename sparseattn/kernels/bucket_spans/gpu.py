"""SAAP's probing as one Triton kernel: the visited buckets' runs, cut into spans and stopped at the budget.

What `Selection.runs` does with cumulative sums, a search and gathers, each a launch or several on a GPU.
https://arxiv.org/abs/2502.08246
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128  # runs looked at at once
TILE = 32  # slots of a program
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["probes", "segments", "budget", "slots"])
def cut_runs(
    ids,  # [B,Hs,P] int64
    edges,  # [B,H,R,C+2] int32, any strides but the last
    start,  # [B,Hs,S] int32
    length,  # [B,Hs,S] int32
    probes,
    segments,
    budget,
    slots,
    step_b,
    step_h,
    step_r,
    EACH: tl.constexpr,  # selection heads of a KV head
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    tile, chosen, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + chosen  # of B*Hs
    ids += head * probes
    edges += b.to(tl.int64) * step_b + (chosen // EACH).to(tl.int64) * step_h
    slot = tile * TILE + tl.arange(0, TILE)
    first_row = tl.zeros([TILE], tl.int32)
    runs_before = tl.zeros([TILE], tl.int32)
    rows, spans = 0, 0  # of the runs of the chunks before
    for first in range(0, probes * segments, CHUNK):
        run = first + tl.arange(0, CHUNK)  # best bucket first, its oldest segment first
        live = run < probes * segments
        bucket = tl.load(ids + run // segments, mask=live, other=0)
        edge = edges + (run % segments).to(tl.int64) * step_r + bucket
        low = tl.load(edge, mask=live, other=0)
        size = tl.load(edge + 1, mask=live, other=0) - low
        before = rows + tl.cumsum(size, 0) - size
        rows += tl.sum(size, 0)
        size = tl.minimum(size, tl.maximum(budget - before, 0))
        number = (size + SPAN - 1) // SPAN
        begin = spans + tl.cumsum(number, 0) - number
        spans += tl.sum(number, 0)
        offset = slot[:, None] - begin[None, :]  # [TILE,CHUNK] spans into the run
        mine = (offset >= 0) & (offset < number[None, :])
        first_row += tl.sum(tl.where(mine, low[None, :] + offset * SPAN, 0), 1)
        runs_before += tl.sum(tl.where(mine, tl.minimum(size[None, :] - offset * SPAN, SPAN), 0), 1)
    place = head * slots + slot
    tl.store(start + place, first_row, mask=slot < slots)
    tl.store(length + place, runs_before, mask=slot < slots)


def spans(ids: Tensor, edges: Tensor, span: int, budget: int, slots: int) -> tuple[Tensor, Tensor]:
    """Start and length `[B,Hs,S]` int32 of the rows of the buckets `ids`, best first, in S = `slots` slots.

    Args:
        ids: `[B,Hs,P]` int64, different buckets, Hs a multiple of H.
        edges: `[B,H,R,C+2]` int32: the rows of bucket c in segment r are `edges[c]` to `edges[c + 1]`.
        span: longest span, a power of two.
        budget: rows per selection head. What does not fit in `slots` is left out.

    Returns:
        As `Selection.runs` of these runs, cut to `slots` slots; the start of an unused slot is 0.
    """
    batch, chosen, probes = ids.shape
    start, length = (torch.empty(batch, chosen, slots, dtype=torch.int32, device=ids.device) for _ in range(2))
    if start.numel():
        with torch.cuda.device_of(ids):  # Triton launches on the current device
            cut_runs[triton.cdiv(slots, TILE), chosen, batch](
                ids.contiguous(),
                edges,
                start,
                length,
                probes,
                edges.shape[2],
                budget,
                slots,
                *edges.stride()[:3],
                EACH=chosen // edges.shape[1],
                SPAN=span,
                CHUNK=CHUNK,
                TILE=TILE,
                **OPTIONS,
            )
    return start, length
