"""Attention over chosen pages of vLLM's CPU cache, by the implementation that fits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, BoundedPages, MeanRows, StepPages
from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.page_bounds.bounds import PageBounds

ATTEND = Operation(__package__, "torch", "numba")


def attend_blocks(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    scores: Tensor,
    count: Any,
    scale: float,
    impl: str | None = None,
    means: MeanRows | None = None,
) -> None:
    """Write the attention of R tokens over their pages into their rows of `out`.

    Args:
        query, out: `[T,H*G,D]`, the heads of a token one after the other; R of its T tokens are served here.
        cache: whose rows are read in the query's dtype.
        pages: which rows may be read.
        scores: `[R,Hs,E*unit/page]` float32 of the pages of `pages.table`, -inf for what must not be chosen.
        count: pages chosen for each selection head: a number, or `[R]` of numpy, one for each token.
        scale: factor of the logits.
        impl: "torch" or "numba", see `implementations`.
        means: which stand for the rows of `pages.table` that are not chosen; None: nothing does.
    """
    ATTEND.pick(impl, query.device, query.dtype).attend(query, out, cache, pages, scores, count, scale, means)


def attend_bounded(
    query: Tensor,
    out: Tensor,
    layer: BoundedPages,
    pages: StepPages,
    count: Any,
    scale: float,
    impl: str | None = None,
) -> None:
    """Write what `attend_blocks` does with the scores of `page_bounds.dispatch.page_scores_at`.

    Args:
        query, out, count, scale, impl: see `attend_blocks`.
        layer: of the query's dtype.
        pages: whose entries are pages.
    """
    ATTEND.pick(impl, query.device, query.dtype).attend_bounded(query, out, layer, pages, count, scale)


def write_bounds(cache: BlockCache, bounds: PageBounds, places: Tensor, page: int, impl: str | None = None) -> None:
    """Write the least and the largest keys of pages in every channel, Quest's bounds.

    Args:
        cache: whose keys they are.
        bounds: `[places,H,D]` of the dtype in which rows are read, of which those at `places` are written.
        places: `[n]` int64, pages of the cache, counted over all blocks.
        page: their rows, a multiple of 16 that divides a block.
        impl: see `attend_blocks`.

    Raises:
        ValueError: another page.
    """
    if page % 16 or cache.block % page:
        raise ValueError(f"a page is a multiple of 16 rows that divides a block of {cache.block}, got {page}")
    ATTEND.pick(impl, cache.packed.device, bounds.minimum.dtype).write_bounds(cache, bounds, places, page)


def attend_rows(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    ids: Tensor,
    scale: float,
    impl: str | None = None,
    means: MeanRows | None = None,
) -> None:
    """Write the attention of R tokens over single rows, and over the pages that they read in any case.

    Args:
        query, out, cache, scale, impl, means: see `attend_blocks`.
        pages: entries to choose from, and pages that are read in any case, of 16 or 32 rows.
        ids: `[R,Hs,S]` int32, the rows that each selection head reads, counted over the entries of `pages.table`; -1
            for none. None stands twice in a list.
    """
    ATTEND.pick(impl, query.device, query.dtype).attend_rows(query, out, cache, pages, ids, scale, means)
