"""Attention over chosen pages of vLLM's CPU cache in torch, which is the specification."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache, BoundedPages, StepPages
from sparseattn.kernels.page_bounds.bounds import PageBounds
from sparseattn.kernels.page_bounds.dispatch import page_scores_at
from sparseattn.kernels.topk.dispatch import best


def attend(
    query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, scores: Tensor, count: Any, scale: float
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
            weights = torch.softmax(query[token, own].to(wide) @ k[:rows].to(wide).mT * scale, -1)
            out[token, own] = (weights @ v[:rows].to(wide)).to(out.dtype)


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


def attend_rows(query: Tensor, out: Tensor, cache: BlockCache, pages: StepPages, ids: Tensor, scale: float) -> None:
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
            weights = torch.softmax(query[token, heads_of].to(wide) @ k.to(wide).mT * scale, -1)
            out[token, heads_of] = (weights @ v.to(wide)).to(out.dtype)
