"""Logits of rows, scores of pages and best rows from keys of a few bits in torch, which is the specification."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.kernels.group_vote import dispatch as group_vote
from sparseattn.kernels.group_vote.reference import vote
from sparseattn.kernels.quantized_keys import level_grid, packing
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys
from sparseattn.kernels.topk.dispatch import best_rows

CHUNK = 1 << 22  # numbers of unpacked keys at a time


def logits(query: Tensor, keys: QuantizedKeys) -> Tensor:
    """As `dispatch.logits`."""
    batch, heads, _, size = query.shape
    scaled = query.float() / size**0.5
    once = max(CHUNK // max(batch * heads * keys.mask.shape[1] // max(keys.groups, 1) * size, 1), 1)  # groups
    parts = zip(keys.codes.split(once, 2), keys.low.split(once, 2), keys.step.split(once, 2), strict=True)
    decoded = (QuantizedKeys(*part, keys.bits, grid=keys.grid).decoded() for part in parts)
    products = torch.cat([scaled @ part.mT for part in decoded], -1)
    return products.masked_fill(~keys.mask[:, None, None], -torch.inf)


def scores(query: Tensor, keys: QuantizedKeys, group: str, page: int) -> Tensor:
    """As `dispatch.scores`."""
    masses = logits(query, keys)
    if page > 1:
        masses = masses.unflatten(-1, (-1, page)).logsumexp(-1)
    return vote(masses, group)


def scores_at(query: Tensor, store: QuantizedKeys, table: Tensor, group: str, page: int) -> Tensor:
    """As `dispatch.scores_at`."""
    place, rows = table.long().clamp(min=0), store.group_rows
    codes, low, step = (part[place].transpose(1, 2) for part in (store.codes, store.low, store.step))  # [B,H,n,..]
    own = QuantizedKeys(codes, low, step, store.bits, (table >= 0).repeat_interleave(rows, 1))
    return scores(query, own, group, page)


def best(query: Tensor, keys: QuantizedKeys, group: str, count: int, page: int) -> Tensor:
    """As `dispatch.best`."""
    return best_rows(scores(query, keys, group, page), count)


def listed_logits(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int) -> Tensor:
    """As `dispatch.listed_logits`."""
    batch, heads, group, size = query.shape
    lists, stored = pages.shape[1], keys.mask.shape[1]
    out = query.new_full((batch, heads, group, pages.shape[2], page), -torch.inf, dtype=torch.float32)
    if not stored:
        return out.flatten(3)
    shape = -1, packing.words(size, keys.bits), packing.tile(keys.codes.device), 4
    tiles = keys.codes.unflatten(3, shape).flatten(2, 3)  # [B,H,N/T,W,T,4]
    height, rows = tiles.shape[4], stored // keys.groups
    scaled = (query.float() / size**0.5).view(batch, lists, -1, size)  # [B,L,1 or G,D]
    b = torch.arange(batch, device=query.device)[:, None, None]
    h = torch.arange(lists, device=query.device)[None, :, None] // (lists // heads)
    grid = None if keys.grid is None else keys.grid.repeat_interleave(lists // heads, 1)
    once = max(CHUNK // (batch * lists * page * size), 1)
    for first in range(0, pages.shape[2], once):
        part = pages[:, :, first : first + once].long()
        row = (part[..., None] * page + torch.arange(page, device=query.device)).flatten(2)  # [B,L,n]
        inside = (row >= 0) & (row < stored)
        row = torch.where(inside, row, 0)
        packed = tiles[b, h, row // height, :, row % height].flatten(3)
        codes = packing.unpack_bytes(packed, keys.bits, size)  # [B,L,n,D]
        low, step = level_grid.read(keys.low[b, h, row // rows], keys.step[b, h, row // rows], grid)
        valid = (inside & keys.mask[b, row])[:, :, None]
        products = (scaled @ (codes.float() * step + low).mT).masked_fill(~valid, -torch.inf)
        out[:, :, :, first : first + once] = products.view(batch, heads, group, -1, page)
    return out.flatten(3)


def best_listed(
    query: Tensor, keys: QuantizedKeys, group: str, pages: Tensor, page: int, count: int
) -> tuple[Tensor, Tensor]:
    """As `dispatch.best_listed`."""
    return best_of_listed(listed_logits(query, keys, pages, page), keys, group, pages, page, count)


def best_of_listed(
    logits: Tensor, keys: QuantizedKeys, group: str, pages: Tensor, page: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return what `dispatch.best_listed` does, of the logits of listed rows."""
    rows = group_vote.best_of_listed(logits, group, pages, page, count)
    return rows, groups_of(pages.long(), page, keys.groups, keys.mask.shape[1])


def groups_of(pages: Tensor, page: int, groups: int, stored: int) -> Tensor:
    """Return in how many of the `groups` that share levels a row of each list lies, `[B,L]` int64.

    Args:
        pages: int64 `[B,L,P]`, pages of `page` rows, negative: unused.
        stored: rows of all groups.
    """
    rows = stored // max(groups, 1)
    inside = math.gcd(page, max(rows, 1))  # of a page, so many rows lie in one group
    first = pages[..., None] * page + torch.arange(0, page, inside, device=pages.device)
    at = torch.where((first < 0) | (first >= stored), groups, first // max(rows, 1)).flatten(2)
    touched = torch.zeros(*pages.shape[:2], groups + 1, dtype=torch.bool, device=pages.device)
    return touched.scatter_(2, at, True)[..., :-1].sum(-1)
