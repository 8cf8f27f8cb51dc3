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

from sparseattn.kernels.group_vote.gpu import log_sum, vote_tiles
from sparseattn.kernels.page_bounds.bounds import PageBounds


@triton.jit
def places(real, table, at, page, here):
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
    place, known = places(real, table, b.to(tl.int64) * known_step_b + page, page, here)
    place = place[:, None]
    # Bounds of pages that are not real are not read: they may be NaN, and spare capacity costs nothing.
    mask = known[:, None] & (d < D)
    high += b.to(tl.int64) * high_step_b + h.to(tl.int64) * high_step_h
    low += b.to(tl.int64) * low_step_b + h.to(tl.int64) * low_step_h
    most = tl.load(high + place * high_step_p + d, mask=mask, other=0.0)  # [BLOCK,BLOCK_D]
    least = tl.load(low + place * low_step_p + d, mask=mask, other=0.0)
    query_mask = (g < G)[:, None] & (d < D)
    q = tl.load(query + (head * G + g)[:, None] * D + d, mask=query_mask, other=0.0)  # [BLOCK_G,BLOCK_D]
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
            tl.store(tile_lse + row * tl.num_programs(0) + tile, log_sum(scores), mask=g < G)


# Pages of a tile and warps, by (bytes of an element, padded head size). NOT MEASURED on a GPU yet: from the compiler's
# reports, without spills (docs/lab/kernels.md). A program reads one tile: what hides its latency is other programs.
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


def scores(query: Tensor, bounds: PageBounds, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores`, of float32 and 16-bit queries; bounds have any strides but the last.

    Raises:
        ValueError: dtypes that differ, or bounds whose last stride is not 1.
    """
    assert bounds.valid is not None
    return _scores(query, bounds, group, temperature, valid=adjacent(bounds.valid))


def scores_at(query: Tensor, store: PageBounds, table: Tensor, group: str, temperature: float) -> Tensor:
    """As `dispatch.page_scores_at`. Its launches depend on shapes alone, so that a CUDA graph may capture them.

    Raises:
        ValueError: a table that is not int32, or as `scores`.
    """
    table = checked_table(table)
    minimum, maximum = (
        part.transpose(0, 1)[None].expand(len(query), -1, -1, -1) for part in (store.minimum, store.maximum)
    )
    return _scores(query, PageBounds(minimum, maximum), group, temperature, table=table)


def adjacent(part: Tensor) -> Tensor:
    """Return a tensor whose last elements are adjacent, as kernels read it."""
    return part if part.stride(-1) == 1 else part.contiguous()


def checked_table(table: Tensor) -> Tensor:
    """Return a table of pages as kernels read it; ValueError unless it is int32."""
    if table.dtype != torch.int32:
        raise ValueError(f"a table of pages is int32 [B,P], got {table.dtype} {list(table.shape)}")
    return adjacent(table)


def _scores(
    query: Tensor,
    bounds: PageBounds,
    group: str,
    temperature: float,
    *,
    valid: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Launch the kernels, with one of `valid` and `table`."""
    minimum, maximum, step = bounds.minimum, bounds.maximum, bounds.step
    kind = query.dtype if step is None else torch.int8
    if not kind == minimum.dtype == maximum.dtype or minimum.stride(-1) != 1 or maximum.stride(-1) != 1:
        raise ValueError(
            f"page bounds are of the query's {query.dtype}, or torch.int8 with a step, with adjacent elements, got "
            f"{minimum.dtype} and {maximum.dtype} with last strides {minimum.stride(-1)} and {maximum.stride(-1)}"
        )
    known = valid if table is None else table
    assert known is not None
    batch, heads, share, size = query.shape
    pages = known.shape[1]
    constants, options = launch(query.element_size(), size, share, group)
    tiles = triton.cdiv(pages, constants["BLOCK"])
    shape = (batch, heads, share, pages) if group in ("each", "softmax") else (batch, heads, pages)
    out = query.new_empty(shape, dtype=torch.float32)
    tile_lse = None
    if group == "softmax":
        tile_lse = query.new_empty(batch, heads, share, tiles, dtype=torch.float32)
    if pages and batch:
        with torch.cuda.device_of(query):  # Triton launches on the current device
            score_pages[tiles, heads, batch](
                query.contiguous(),
                minimum,
                maximum,
                None if step is None else step.contiguous(),
                valid,
                table,
                out,
                tile_lse,
                pages,
                known.stride(0),
                1 / temperature,
                *minimum.stride()[:3],
                *maximum.stride()[:3],
                **constants,
                **options,
            )
    if tile_lse is not None:
        return vote_tiles(out, tile_lse, VOTE_BLOCK)
    return out.flatten(1, 2) if group == "each" else out
