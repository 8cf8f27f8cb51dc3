"""Logits of rows, scores of pages and best rows from keys of few bits, by the implementation that fits."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.kernels import scoring
from sparseattn.kernels.quantized_keys import level_grid as grids
from sparseattn.kernels.quantized_keys import reference
from sparseattn.kernels.scoring import best_rows, vote

IMPLS = ("torch", "numba", "triton")


def logits(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    impl: str | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """The logits of rows by their keys of few bits.

    numba's code rounds the query, times a group's steps, to 8 bits. With `last` the largest code a logit is then within
    `last sqrt(D) / 508` of the largest `|q_i step_i|` of the group.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        packed: `[B,H,N/rows,rows*4W]` uint8, see the module.
        low, step: `[B,H,N/rows,D]`, of 16 bits or, on a grid, int8 and uint8.
        real: `[B,N]` bool.
        bits: of a code.
        impl: see `scoring`.
        grid: `[B,H,3,D]` float32, see `kernels.quantized_keys.level_grid`; None: levels of 16 bits.

    Returns:
        `[B,H,G,N]` float32: `q . (low + step * code) / sqrt(D)`, -inf where a row is not real.
    """
    impl = _implementation(impl, query)
    if not real.shape[1]:
        return query.new_empty(*query.shape[:3], 0, dtype=torch.float32)
    if impl == "triton":
        from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu

        return quantized_keys_gpu.scores(query, packed, low, step, real, bits, "each", grid=grid).unflatten(
            1, query.shape[1:3]
        )
    if impl == "numba":
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        return quantized_keys_cpu.masses(query, packed, low, step, real, bits, grid=grid)
    batch, heads, _, size = query.shape
    asked, groups = query.float() / size**0.5, low.shape[2]
    once = max(reference.CHUNK // max(batch * heads * real.shape[1] // max(groups, 1) * size, 1), 1)  # groups
    parts = zip(packed.split(once, 2), low.split(once, 2), step.split(once, 2), strict=True)
    out = torch.cat([asked @ reference.keys_of(*part, bits, grid).mT for part in parts], -1)
    return out.masked_fill(~real[:, None, None], -torch.inf)


def scores(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    group: str,
    page: int = 1,
    impl: str | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """`logits`, the masses of pages of them, and the group's vote.

    Args:
        query, packed, low, step, real, bits, impl, grid: see `logits`.
        group: see `scoring.vote`.
        page: rows of a page, which scores the logarithm of the sum of its rows' exponentiated logits; it divides the
            rows of a group. 1: rows score their own logits.

    Returns:
        `[B,Hs,N/page]` float32, -inf where no row is real.
    """
    impl = _implementation(impl, query)
    if not real.shape[1]:
        return query.new_empty(len(query), query.shape[1:3].numel() if group == "each" else query.shape[1], 0).float()
    if impl == "triton":
        from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu

        return quantized_keys_gpu.scores(query, packed, low, step, real, bits, group, page, grid=grid)
    if impl == "numba":
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        if group == "softmax":
            return quantized_keys_cpu.scores(query, packed, low, step, real, bits, page, grid)
        return vote(quantized_keys_cpu.masses(query, packed, low, step, real, bits, page, grid), group, impl)
    found = logits(query, packed, low, step, real, bits, impl, grid)
    if page > 1:
        found = found.unflatten(-1, (-1, page)).logsumexp(-1)
    return vote(found, group, impl)


def scores_at(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    table: Tensor,
    bits: int,
    group: str,
    page: int = 1,
    impl: str | None = None,
) -> Tensor:
    """`scores` where the groups of all sequences lie in one store, as a serving engine's blocks do.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        packed: `[entries,H,rows*4W]` uint8, see the module.
        low, step: `[entries,H,D]`, of 16 bits.
        table: `[B,n]` int32, which entry of the store is a sequence's; negative: none.
        bits, group, page, impl: see `scores`.

    Returns:
        `[B,Hs,n*rows/page]` float32, -inf where the table names none.
    """
    impl = _implementation(impl, query)
    batch, size = len(query), query.shape[3]
    rows = reference.rows_of(packed, size, bits)
    if impl == "torch" or not table.shape[1]:
        place = table.long().clamp(min=0)
        packed, low, step = (held[place].transpose(1, 2) for held in (packed, low, step))  # [B,H,n,..]
        return scores(query, packed, low, step, (table >= 0).repeat_interleave(rows, 1), bits, group, page, impl)
    packed, low, step = (held.transpose(0, 1)[None].expand(batch, -1, -1, -1) for held in (packed, low, step))
    if impl == "triton":
        from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu

        return quantized_keys_gpu.scores(query, packed, low, step, None, bits, group, page, table=table)
    from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

    every = torch.ones(1, rows, dtype=torch.bool).expand(batch, -1)  # of any one entry
    if group == "softmax":
        return quantized_keys_cpu.scores(query, packed, low, step, every, bits, page, table=table)
    return vote(quantized_keys_cpu.masses(query, packed, low, step, every, bits, page, table=table), group, impl)


def best(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    group: str,
    count: int,
    page: int = 1,
    impl: str | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """The rows, or pages, with the `count` highest `scores`: `[B,Hs,S]` int32 as `scoring.best_rows` has them."""
    impl = _implementation(impl, query)
    if impl == "numba" and group == "softmax" and page == 1 and real.shape[1]:
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        return quantized_keys_cpu.chosen_rows(query, packed, low, step, real, bits, count, grid)
    return best_rows(scores(query, packed, low, step, real, bits, group, page, impl, grid), count)


def _implementation(impl: str | None, query: Tensor) -> str:
    """What scores: numba's code knows no gradients, so that by default it leaves a query that needs one to torch."""
    return scoring.chosen("torch" if impl is None and query.requires_grad else impl, query.device, query.dtype, IMPLS)


def listed_logits(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    pages: Tensor,
    page: int,
    impl: str | None = None,
    grid: Tensor | None = None,
) -> Tensor:
    """The logits of the rows of some pages by their keys of few bits, as `logits` has them.

    Args:
        query, packed, low, step, real, bits, grid: see `logits`.
        pages: integers `[B,H,P]`, listed for all of a KV head's query heads, or `[B,H*G,P]` for each; negative: unused.
        page: rows of a page, any power of two; a group need hold no whole number of pages.
        impl: see `scoring`.

    Returns:
        `[B,H,G,P*page]` float32, the rows of a page beside each other, -inf where a page is unused, where a row is not
        real, and where a page reaches beyond row N.
    """
    impl = _implementation(impl, query)
    if not pages.shape[2]:
        return query.new_empty(*query.shape[:3], 0, dtype=torch.float32)
    if impl == "triton":
        from sparseattn.kernels.quantized_keys import gpu as quantized_keys_gpu

        return quantized_keys_gpu.listed(query, packed, low, step, real, bits, pages, page, grid=grid)
    if impl == "numba":
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        return quantized_keys_cpu.listed_logits(query, packed, low, step, real, bits, pages, page, grid)
    batch, heads, group, size = query.shape
    listed, held = pages.shape[1], real.shape[1]
    out = query.new_full((batch, heads, group, pages.shape[2], page), -torch.inf, dtype=torch.float32)
    if not held:
        return out.flatten(3)
    shape = -1, reference.words(size, bits), reference.tile(packed.device), 4
    tiles = packed.unflatten(3, shape).flatten(2, 3)  # [B,H,N/T,W,T,4]
    height, rows = tiles.shape[4], held // low.shape[2]
    asked = (query.float() / size**0.5).view(batch, listed, -1, size)  # [B,L,1 or G,D]
    b = torch.arange(batch, device=query.device)[:, None, None]
    h = torch.arange(listed, device=query.device)[None, :, None] // (listed // heads)
    of_lists = None if grid is None else grid.repeat_interleave(listed // heads, 1)
    once = max(reference.CHUNK // (batch * listed * page * size), 1)
    for first in range(0, pages.shape[2], once):
        part = pages[:, :, first : first + once].long()
        row = (part[..., None] * page + torch.arange(page, device=query.device)).flatten(2)  # [B,L,n]
        there = (row >= 0) & (row < held)
        row = torch.where(there, row, 0)
        codes = reference.unpack_bytes(tiles[b, h, row // height, :, row % height].flatten(3), bits, size)  # [B,L,n,D]
        lowest, wide = grids.read(low[b, h, row // rows], step[b, h, row // rows], of_lists)
        known = (there & real[b, row])[:, :, None]
        found = (asked @ (codes.float() * wide + lowest).mT).masked_fill(~known, -torch.inf)
        out[:, :, :, first : first + once] = found.view(batch, heads, group, -1, page)
    return out.flatten(3)


def best_listed(
    query: Tensor,
    packed: Tensor,
    low: Tensor,
    step: Tensor,
    real: Tensor,
    bits: int,
    group: str,
    pages: Tensor,
    page: int,
    count: int,
    impl: str | None = None,
    grid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Of the rows of some pages those with the best votes, and how many groups' levels that reads.

    Args: see `listed_logits`; group: see `scoring.vote`; count: rows chosen.

    Returns:
        `[B,Hs,S]` int32, rows as `scoring.best_rows` has them; for each list of pages, `[B,H]` or `[B,H*G]` int64, the
        groups in which a listed row lies.
    """
    impl = _implementation(impl, query)
    if impl == "numba" and group == "softmax" and pages.shape[2] and pages.shape[1] == query.shape[1]:
        from sparseattn.kernels.quantized_keys import cpu as quantized_keys_cpu

        return quantized_keys_cpu.chosen_listed(query, packed, low, step, real, bits, pages, page, count, grid)
    found = listed_logits(query, packed, low, step, real, bits, pages, page, impl, grid)
    scores = vote(found, group)  # [B,Hs,P*page]
    place = best_rows(scores, count).long()
    on, listed = place.clamp(min=0), pages.long()
    own = listed.repeat_interleave(scores.shape[1] // listed.shape[1], 1)  # [B,Hs,P]
    chosen = torch.where(place < 0, -1, own.gather(2, on // page) * page + on % page).int()
    return chosen, reference.groups_of(listed, page, low.shape[2], real.shape[1])
