"""The cache of vLLM's CPU backend, blocks of keys and values packed for its instructions: unpacked, and attention over
chosen pages of it. In torch, which is the specification, and compiled (`cpu.py`, which says what the packings are).

PagedAttention, https://arxiv.org/abs/2309.06180
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import scoring

PACKINGS = ("columns", "pairs")


def split(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache `[blocks,H,block,2*D]`, as flat packed halves `[blocks,H,block*D]`."""
    blocks, heads, block, double = cache.shape
    halves = cache.view(blocks, heads, 2, block * double // 2)
    return halves[:, :, 0], halves[:, :, 1]


def keys(cache: Tensor, packing: str, places: Tensor, rows: int) -> Tensor:
    """`[n,H,rows,D]`: the keys of stretches of so many rows, `places` `[n]` counted over all blocks; 16 divides `rows`,
    which divides a block."""
    block, size = cache.shape[2], cache.shape[3] // 2
    per, held = block // rows, split(cache)[0]
    which, part = places // per, places % per
    if packing == "columns":
        return held.unflatten(2, (size, per, rows))[which, :, :, part].transpose(2, 3)
    tiles = held.unflatten(2, (per, rows // 16, size // 2, 16, 2))[which, :, part]  # [n,H,rows/16,D/2,16,2]
    return tiles.transpose(3, 4).flatten(4).flatten(2, 3)


def values(cache: Tensor, packing: str, places: Tensor, rows: int) -> Tensor:
    """As `keys`, of values."""
    block, size = cache.shape[2], cache.shape[3] // 2
    per, held = block // rows, split(cache)[1]
    which, part = places // per, places % per
    if packing == "columns":
        return held.unflatten(2, (per, rows, size))[which, :, part]
    tiles = held.unflatten(2, (size // 16, per, rows // 2, 16, 2))[which, :, :, part]  # [n,H,D/16,rows/2,16,2]
    return tiles.permute(0, 1, 3, 5, 2, 4).flatten(4).flatten(2, 3)


def attend(
    query: Tensor,
    out: Tensor,
    cache: Tensor,
    packing: str,
    page: int,
    unit: int,
    always: Tensor,
    tails: Tensor,
    table: Tensor,
    scores: Tensor,
    count: int,
    tokens: Tensor,
    scale: float,
    impl: str | None = None,
) -> None:
    """Attention of R tokens over their pages, written into their rows of `out`.

    Args:
        query, out: `[T,H*G,D]`, the heads of a token one after the other; R of its T tokens are served here.
        cache: `[blocks,H,block,2*D]`, of the query's dtype.
        packing: one of `PACKINGS`.
        page, unit: rows of a page, and of an entry of `table`; 16 divides the page, that the unit, that a block.
        always: `[R,F]` int32, pages that are read, counted over all blocks; -1: none. The last one that is given is the
            sequence's last.
        tails: `[R]` int32, how many rows of that there are.
        table: `[R,E]` int32, entries to choose from, counted likewise; -1: none.
        scores: `[R,Hs,E*unit/page]` float32 of their pages, -inf for what must not be chosen.
        count: pages chosen for each selection head.
        tokens: `[R]` int64, rows of `query`.
        scale: factor of the logits.
        impl: see `scoring`, "torch" or "numba".
    """
    if scoring.chosen(impl, query.device, query.dtype, ("torch", "numba")) == "numba":
        from sparseattn.kernels.attend_vllm_blocks import cpu as attend_vllm_blocks_cpu

        attend_vllm_blocks_cpu.attend(
            query, out, cache, packing, page, unit, always, tails, table, scores, count, tokens, scale
        )  # fmt: skip
        return
    per, heads, chosen = unit // page, cache.shape[1], scores.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    share, each = query.shape[1] // chosen, chosen // heads
    best = scoring.best(scores, count)  # [R,Hs,S]
    for r, token in enumerate(tokens.tolist()):
        near = always[r][always[r] >= 0].long()
        for s in range(chosen):
            ids = best[r, s][best[r, s] >= 0]
            places = torch.cat([table[r].long()[ids // per] * per + ids % per, near])
            k, v = (part(cache, packing, places, page)[:, s // each].flatten(0, 1) for part in (keys, values))
            rows = len(k) - page + int(tails[r])
            asked = query[token, s * share : (s + 1) * share].to(wide)
            weights = torch.softmax(asked @ k[:rows].to(wide).mT * scale, -1)
            out[token, s * share : (s + 1) * share] = (weights @ v[:rows].to(wide)).to(out.dtype)
