"""Attention over chosen pages of vLLM's CPU cache in torch, which is the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, BoundedPages, MeanRows, StepPages
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores_at
from sparseattn.kernels.topk.dispatch import best


def attend(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    scores: Tensor,
    count: Any,
    scale: float,
    means: MeanRows | None = None,
) -> None:
    """As `dispatch.attend_blocks`."""
    page, per, heads, chosen = pages.page, pages.unit // pages.page, cache.packed.shape[1], scores.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    share, each = query.shape[1] // chosen, chosen // heads
    limits = torch.as_tensor(count).expand(len(scores)).tolist()
    for r, token in enumerate(pages.tokens.tolist()):
        top = best(scores[r : r + 1], limits[r])[0]  # [Hs,S]
        always = pages.always[r][pages.always[r] >= 0].long()
        for s in range(chosen):
            ids = top[s][top[s] >= 0]
            places = torch.cat([pages.table[r].long()[ids // per] * per + ids % per, always])
            k, v = (read(places, page)[:, s // each].flatten(0, 1) for read in (cache.keys, cache.values))
            rows = len(k) - page + int(pages.tails[r])
            own = slice(s * share, (s + 1) * share)
            tail = _left(means, pages, r, ids * page, page, s // each)
            out[token, own] = _attended(query[token, own].to(wide), k[:rows], v[:rows], scale, tail).to(out.dtype)


def attend_bounded(query: Tensor, out: Tensor, layer: BoundedPages, pages: StepPages, count: Any, scale: float) -> None:
    """As `dispatch.attend_bounded`."""
    heads = layer.cache.packed.shape[1]
    grouped = query[pages.tokens].unflatten(1, (heads, -1))
    voted = layer.voted
    scores = page_scores_at(grouped, voted.bounds, pages.table, voted.group, "torch", voted.temperature)
    attend(query, out, layer.cache, pages, scores, count, scale)


def write_bounds(cache: BlockCache, bounds: PageBounds, places: Tensor, page: int) -> None:
    """As `dispatch.write_bounds`."""
    keys = cache.keys(places, page)
    bounds.minimum[places], bounds.maximum[places] = keys.amin(2), keys.amax(2)


def _left(
    means: MeanRows | None, pages: StepPages, r: int, first: Tensor, chosen: int, head: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean keys and values `[P,D]` of groups of a table's rows, and how many rows `[P]` of each are not read:
    `chosen` rows from each of `first` on are. None: nothing stands for them."""
    if means is None:
        return None
    per = pages.unit // means.rows
    group = (pages.table[r].long()[:, None] * per + torch.arange(per)).flatten()
    left = torch.where(group < 0, 0, means.rows)
    left = left.index_add(0, first // means.rows, torch.full_like(first, -chosen))
    group = group.clamp(min=0)
    return means.keys[head, group], means.values[head, group], left


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, tail: tuple[Tensor, Tensor, Tensor] | None
) -> Tensor:
    """`[G,D]`: attention over rows `[n,D]`, and over means that stand for others; see `_left`."""
    logits, values = query @ keys.to(query.dtype).mT * scale, values.to(query.dtype)
    if tail is not None:
        mean_keys, mean_values, left = (part.to(query.dtype) for part in tail)
        logits = torch.cat([logits, query @ mean_keys.mT * scale + left.log()], 1)
        values = torch.cat([values, mean_values])
    return torch.softmax(logits, -1) @ values


def attend_rows(
    query: Tensor,
    out: Tensor,
    cache: BlockCache,
    pages: StepPages,
    ids: Tensor,
    scale: float,
    means: MeanRows | None = None,
) -> None:
    """As `dispatch.attend_rows`."""
    page, unit, heads, chosen = pages.page, pages.unit, cache.packed.shape[1], ids.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    share, each = query.shape[1] // chosen, chosen // heads
    for r, token in enumerate(pages.tokens.tolist()):
        always = pages.always[r][pages.always[r] >= 0].long()
        always_rows = [
            read(always, page).transpose(0, 1).flatten(1, 2) for read in (cache.keys, cache.values)
        ]  # [H,rows,D]
        count = always_rows[0].shape[1] - page + int(pages.tails[r])
        for s in range(chosen):
            own = ids[r, s][ids[r, s] >= 0].long()
            rows = pages.table[r].long()[own // unit] * unit + own % unit
            far = [
                read(rows // 16, 16)[torch.arange(len(rows)), s // each, rows % 16]
                for read in (cache.keys, cache.values)
            ]
            k, v = (torch.cat([part, close[s // each, :count]]) for part, close in zip(far, always_rows, strict=True))
            heads_of = slice(s * share, (s + 1) * share)
            tail = _left(means, pages, r, own, 1, s // each)
            out[token, heads_of] = _attended(query[token, heads_of].to(wide), k, v, scale, tail).to(out.dtype)
