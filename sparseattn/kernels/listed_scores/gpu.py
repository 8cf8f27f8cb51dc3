"""QueryBridge's scores of listed keys as one Triton kernel, which reads them where they lie.

In torch every listed key is copied in float32 first: for 4,096 keys of D = 128 a head, 1 MiB of bfloat16 read and 2 MiB
written and read again. The union itself is torch's sort: Triton's compiled for more than five minutes at 4,096 ids.
https://arxiv.org/abs/2409.10516
"""

# Kernels are compiled by Triton and take its types, for which Python has no annotations.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys that one program of `score_listed` scores
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit(do_not_specialize=["listed"])  # of the strides it must know that they are multiples of 16
def score_listed(
    query,  # [B,H,G,D]
    keys,  # [B,H,N,D], any strides but the last
    ids,  # [B,Hs,n] int32, rising
    out,  # [B,Hs,n] float32
    listed,
    step_b,
    step_h,
    step_n,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chosen, b = tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + chosen
    d = tl.arange(0, BLOCK_D)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids += head * listed
    row = tl.load(ids + place, mask=place < listed, other=-1)
    before = tl.load(ids + place - 1, mask=(place > 0) & (place < listed), other=-1)
    new = (row >= 0) & (row != before)  # a key that several lists name is scored once
    keys += b.to(tl.int64) * step_b + (chosen // G).to(tl.int64) * step_h
    mask = new[:, None] & (d < D)
    k = tl.load(keys + row.to(tl.int64)[:, None] * step_n + d, mask=mask, other=0.0).to(tl.float32)
    q = tl.load(query + head * D + d, mask=d < D, other=0.0).to(tl.float32)
    scores = tl.where(new, tl.sum(k * q[None, :], 1), float("-inf"))
    tl.store(out + head * listed + place, scores, mask=place < listed)


def scores(query: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """`[B,Hs,n]` float32: the inner product of each query head with its listed keys, each key once.

    Args:
        query: `[B,H,G,D]`.
        keys: `[B,H,N,D]` of any strides but the last; rows that nobody lists may hold anything.
        ids: `[B,Hs,n]` int32, Hs = H*G, rising: rows of `keys`, -1 for none.

    Returns:
        -inf for -1 and for all but the first of equal ids.
    """
    batch, _, group, size = query.shape
    chosen, listed = ids.shape[1:]
    out = torch.empty(ids.shape, dtype=torch.float32, device=query.device)
    if ids.numel():
        with torch.cuda.device_of(query):  # Triton launches on the current device
            score_listed[triton.cdiv(listed, BLOCK), chosen, batch](
                query.contiguous(),
                keys,
                ids.contiguous(),
                out,
                listed,
                *keys.stride()[:3],
                G=group,
                D=size,
                BLOCK_D=triton.next_power_of_2(size),
                BLOCK=BLOCK,
                **OPTIONS,
            )
    return out
