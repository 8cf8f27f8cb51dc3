"""Quest's scores of pages as fused Triton kernels: bound and group vote in one pass over the page metadata.

The bound `sum_i max(q_i M_i, q_i m_i)` is two matrix products, as in `sparseattn.selectors.pages.quest`. "sum", "max"
and "each" are one launch, which reads each page's bounds once and writes one number for each selection head. "softmax"
needs every page of a head before the first vote: the first launch then writes what "each" would and the logarithm of
each tile's sum, the second reads these, 4G bytes a page where the bounds were `2 D` elements. With a table the bounds
of all sequences lie in one store and are read where they lie, as the rows of vLLM's blocks are.
https://arxiv.org/abs/2406.10774
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
def _places(real, table, at, page, here):
    """Where the entries of pages lie, int64, and which of them there are: by a table, or in order."""
    if table is not None:
        place = tl.load(table + at, mask=here, other=-1).to(tl.int64)
        known = place >= 0
    else:
        place = page.to(tl.int64)
        known = tl.load(real + at, mask=here, other=0) != 0
    return place, known


# Specialised are strides alone: a page more must not compile a new kernel.
@triton.jit(do_not_specialize=["pages", "known_step_b"])
def score_pages(
    query,  # [B,H,G,D]
    low,  # [B,H,P,D], any strides but the last; with a table [B,H,pages of the store,D]
    high,  # likewise
    step,  # [B,H,D] float32, or None: what 1 of low and high stands for
    real,  # [B,P]; None with a table
    table,  # [B,P] int32, which page of the store is a sequence's, negative: none; or None: they lie in order
    out,  # [B,H,P] or, for "each" and "softmax", [B,H,G,P] float32
    tile_lse,  # [B,H,G,tiles] float32; None but for "softmax"
    pages,
    known_step_b,  # of `real`, or of the table
    scale,
    low_step_b,
    low_step_h,
    low_step_p,
    high_step_b,
    high_step_h,
    high_step_p,
    VOTE: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = b.to(tl.int64) * tl.num_programs(1) + h  # of B*H
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    page = tile * BLOCK + tl.arange(0, BLOCK)
    here = page < pages
    place, known = _places(real, table, b.to(tl.int64) * known_step_b + page, page, here)
    place = place[:, None]
    # Bounds of pages that are not real are not read: they may be NaN, and spare capacity costs nothing.
    mask = known[:, None] & (d < D)
    high += b.to(tl.int64) * high_step_b + h.to(tl.int64) * high_step_h
    low += b.to(tl.int64) * low_step_b + h.to(tl.int64) * low_step_h
    most = tl.load(high + place * high_step_p + d, mask=mask, other=0.0)  # [BLOCK,BLOCK_D]
    least = tl.load(low + place * low_step_p + d, mask=mask, other=0.0)
    asked = (g < G)[:, None] & (d < D)
    q = tl.load(query + (head * G + g)[:, None] * D + d, mask=asked, other=0.0)  # [BLOCK_G,BLOCK_D]
    if step is not None:  # integers of 8 bits are exact in 16-bit floats
        q = (q.to(tl.float32) * tl.load(step + head * D + d, mask=d < D, other=0.0)[None, :]).to(q.dtype)
        most, least = most.to(q.dtype), least.to(q.dtype)
    none = tl.zeros_like(q)
    scores = tl.dot(tl.where(q > 0, q, none), tl.trans(most), input_precision="ieee")
    scores = tl.dot(tl.where(q < 0, q, none), tl.trans(least), scores, input_precision="ieee") * scale
    scores = tl.where(known[None, :], scores, float("-inf"))  # [BLOCK_G,BLOCK]
    if VOTE == "sum" or VOTE == "max":
        served = (g < G)[:, None]
        if VOTE == "sum":
            voted = tl.sum(tl.where(served, scores, 0.0), 0)
        else:
            voted = tl.max(tl.where(served, scores, float("-inf")), 0)
        tl.store(out + head * pages + page, voted, mask=here)
    else:
        row = head * G + g
        tl.store(out + row[:, None] * pages + page[None, :], scores, mask=(g < G)[:, None] & here[None, :])
        if VOTE == "softmax":
            tl.store(tile_lse + row * tl.num_programs(0) + tile, _lse(scores), mask=g < G)


@triton.jit
def _lse(scores):
    """Logarithm of the sum of exponentials of each row `[M,N]`; -inf where all are."""
    peak = tl.max(scores, 1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    return anchor + _log(tl.sum(tl.exp(scores - anchor[:, None]), 1))


@triton.jit
def _log(total):
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
    """The logarithm of the sum of the query heads' probabilities; -inf where no page is real."""
    head = tl.program_id(1).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    row = head * G + g
    total = tl.full([BLOCK_G], float("-inf"), tl.float32)
    for first in range(0, tiles, 64):
        tile = first + tl.arange(0, 64)
        mask = (g < G)[:, None] & (tile < tiles)[None, :]
        part = _lse(tl.load(tile_lse + row[:, None] * tiles + tile[None, :], mask=mask, other=float("-inf")))
        peak = tl.maximum(total, part)
        anchor = tl.where(peak == float("-inf"), 0.0, peak)
        total = anchor + _log(tl.exp(total - anchor) + tl.exp(part - anchor))
    total = tl.where(total == float("-inf"), 0.0, total)
    page = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (g < G)[:, None] & (page < pages)[None, :]
    held = tl.load(scores + row[:, None] * pages + page[None, :], mask=mask, other=float("-inf"))
    tl.store(out + head * pages + page, _lse(tl.trans(held - total[:, None])), mask=page < pages)


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


# Pages of a tile and warps, by (bytes of an element, padded head size). NOT MEASURED on a GPU yet: from the compiler's
# reports, without spills (docs/kernels.md). A program reads one tile: what hides its latency is other programs.
TILES = {
    (2, 16): (128, 4),
    (2, 32): (128, 4),
    (2, 64): (128, 4),
    (2, 128): (64, 4),
    (2, 256): (32, 4),
    (4, 16): (64, 4),
    (4, 32): (64, 4),
    (4, 64): (32, 4),
    (4, 128): (16, 4),
    (4, 256): (16, 4),
}
VOTE_BLOCK = 128  # pages that one program of `vote_softmax` votes on
NAME_BLOCK = 1024
NAME_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def launch(itemsize: int, size: int, group: int, vote: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile-time constants and options of `score_pages`, for a launch and for compiling ahead alike."""
    block_d = max(16, triton.next_power_of_2(size))  # 16: the least that tl.dot multiplies
    block, warps = TILES[itemsize, block_d]
    constants = {
        "VOTE": vote,
        "G": group,
        "D": size,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "BLOCK_D": block_d,
        "BLOCK": block,
    }
    return constants, {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}


def launch_vote(group: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """As `launch`, for `vote_softmax`."""
    constants = {"G": group, "BLOCK_G": triton.next_power_of_2(group), "BLOCK": VOTE_BLOCK}
    return constants, {"num_warps": 4, "enable_fp_fusion": True}


def scores(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    real: Tensor,
    group: str,
    step: Tensor | None = None,
    temperature: float | None = None,
) -> Tensor:
    """`[B,Hs,P]` float32: each page's bound of the logit `q.k / temperature`, voted on; -inf where `real` is False.

    Args:
        query: `[B,H,G,D]` float32, float16 or bfloat16.
        low, high: `[B,H,P,D]` of that dtype, or int8 with a `step`, the pages' channelwise bounds; any strides but the
            last. Pages that are not real may hold anything.
        real: `[B,P]` bool.
        group: "sum", "max", "softmax" or "each", as `sparseattn.selectors.base.vote` defines them.
        step: `[B,H,D]` float32, what 1 of a channel of int8 bounds stands for.
        temperature: None is `sqrt(D)`.

    Raises:
        ValueError: dtypes that differ, or bounds whose last stride is not 1.
    """
    real = real if real.stride(-1) == 1 else real.contiguous()
    return _scores(query, low, high, group, temperature, real=real, step=step)


def scores_at(
    query: Tensor, low: Tensor, high: Tensor, table: Tensor, group: str, temperature: float | None = None
) -> Tensor:
    """`scores` where the bounds of all sequences' pages lie in one store: `[B,Hs,P]` float32, -inf where there is none.

    Its launches depend on shapes alone, so that a CUDA graph may capture them.

    Args:
        query: `[B,H,G,D]` float32, float16 or bfloat16.
        low, high: `[pages,H,D]` of that dtype, any strides but the last. Pages that nobody names may hold anything.
        table: `[B,P]` int32, which page of the store is a sequence's; negative: none.
        group, temperature: see `scores`.

    Raises:
        ValueError: dtypes that differ, or bounds whose last stride is not 1.
    """
    if table.dtype != torch.int32:
        raise ValueError(f"a table of pages is int32 [B,P], got {table.dtype} {list(table.shape)}")
    low, high = (held.transpose(0, 1)[None].expand(len(query), -1, -1, -1) for held in (low, high))
    return _scores(query, low, high, group, temperature, table=table if table.stride(-1) == 1 else table.contiguous())


def _scores(
    query: Tensor,
    low: Tensor,
    high: Tensor,
    group: str,
    temperature: float | None,
    *,
    real: Tensor | None = None,
    table: Tensor | None = None,
    step: Tensor | None = None,
) -> Tensor:
    """The launches, with one of `real` and `table`."""
    kind = query.dtype if step is None else torch.int8
    if not kind == low.dtype == high.dtype or low.stride(-1) != 1 or high.stride(-1) != 1:
        raise ValueError(
            f"page bounds are of the query's {query.dtype}, or torch.int8 with a step, with adjacent elements, got "
            f"{low.dtype} and {high.dtype} with last strides {low.stride(-1)} and {high.stride(-1)}"
        )
    known = real if table is None else table
    assert known is not None
    batch, heads, group_size, size = query.shape
    pages = known.shape[1]
    constants, options = launch(query.element_size(), size, group_size, group)
    tiles = triton.cdiv(pages, constants["BLOCK"])
    each = (
        query.new_empty(batch, heads, group_size, pages, dtype=torch.float32) if group in ("each", "softmax") else None
    )
    voted = None if group == "each" else query.new_empty(batch, heads, pages, dtype=torch.float32)
    first = voted if each is None else each
    assert first is not None
    tile_lse = None
    if group == "softmax":
        tile_lse = query.new_empty(batch, heads, group_size, tiles, dtype=torch.float32)
    if pages and batch:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            score_pages[tiles, heads, batch](
                query.contiguous(),
                low,
                high,
                None if step is None else step.contiguous(),
                real,
                table,
                first,
                tile_lse,
                pages,
                known.stride(0),
                1 / (temperature or size**0.5),
                *low.stride()[:3],
                *high.stride()[:3],
                **constants,
                **options,
            )
            if tile_lse is not None:
                constants, options = launch_vote(group_size)
                grid = triton.cdiv(pages, VOTE_BLOCK), batch * heads
                vote_softmax[grid](each, tile_lse, voted, pages, tiles, **constants, **options)
    return first.flatten(1, 2) if voted is None else voted


def best(scores: Tensor, count: int, page: int) -> tuple[Tensor, Tensor]:
    """Start and length `[B,Hs,S]` int32 of the `count` best pages of scores `[B,Hs,P]`, in no order: torch's top-k and
    one launch more. Length 0 in place of a score of -inf; S = min(count, P)."""
    top = scores.topk(min(count, scores.shape[-1]), dim=-1, sorted=False)
    start, length = (torch.empty(top.indices.shape, dtype=torch.int32, device=scores.device) for _ in range(2))
    slots = start.numel()
    if slots:
        with torch.cuda.device_of(scores):
            name_pages[triton.cdiv(slots, NAME_BLOCK),](
                top.values, top.indices, start, length, slots, page, BLOCK=NAME_BLOCK, **NAME_OPTIONS
            )
    return start, length
