"""Logits of rows, scores of pages and best rows from keys of a few bits, by the implementation that fits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseattn.kernels.implementations import Operation
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

SCORES = Operation(__package__, "torch", "numba", "triton")


def _pick(impl: str | None, query: Tensor) -> Any:
    """Return what scores: numba's code knows no gradients, so by default it leaves a query that needs one to torch."""
    return SCORES.pick(impl, query.device, query.dtype, query.requires_grad)


def logits(query: Tensor, keys: QuantizedKeys, impl: str | None = None) -> Tensor:
    """Return the logits of rows by their keys of few bits.

    numba's code rounds the query, times a group's steps, to 8 bits. With `last` the largest code a logit is then within
    `last sqrt(D) / 508` of the largest `|q_i step_i|` of the group.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        keys: N of them, with `valid`.
        impl: see `implementations`.

    Returns:
        `[B,H,G,N]` float32: `q . (low + step * code) / sqrt(D)`, -inf where a row is not valid.
    """
    kernel = _pick(impl, query)
    if not keys.mask.shape[1]:
        return query.new_empty(*query.shape[:3], 0, dtype=torch.float32)
    return kernel.logits(query, keys)


def scores(query: Tensor, keys: QuantizedKeys, group: str, page: int = 1, impl: str | None = None) -> Tensor:
    """Return the group's vote on `logits`, or on the masses of pages of them.

    Args:
        query, keys, impl: see `logits`.
        group: see `group_vote.dispatch.vote`.
        page: rows of a page, which scores the logarithm of the sum of its rows' exponentiated logits; it divides the
            rows of a group. 1: rows score their own logits.

    Returns:
        `[B,Hs,N/page]` float32, -inf where no row is valid.
    """
    kernel = _pick(impl, query)
    return kernel.scores(query, keys, group, page) if keys.mask.shape[1] else no_scores(query, group)


def scores_at(
    query: Tensor, store: QuantizedKeys, table: Tensor, group: str, page: int = 1, impl: str | None = None
) -> Tensor:
    """Return `scores` where the groups of all sequences lie in one store, as a serving engine's blocks do.

    Args:
        query: `[B,H,G,D]`, after RoPE.
        store: codes and levels `[entries,H,..]`, levels of 16 bits.
        table: `[B,n]` int32, which entry of the store is a sequence's; negative: none.
        group, page, impl: see `scores`.

    Returns:
        `[B,Hs,n*rows/page]` float32, -inf where the table names none.
    """
    kernel = _pick(impl, query)
    return kernel.scores_at(query, store, table, group, page) if table.shape[1] else no_scores(query, group)


def no_scores(query: Tensor, group: str) -> Tensor:
    """Return the scores `[B,Hs,0]` float32 of no row."""
    heads, members = query.shape[1:3]
    return query.new_empty(len(query), heads * members if group == "each" else heads, 0, dtype=torch.float32)


def best(query: Tensor, keys: QuantizedKeys, group: str, count: int, page: int = 1, impl: str | None = None) -> Tensor:
    """Return the rows, or pages, with the `count` highest `scores`: `[B,Hs,S]` int32 as `topk.dispatch.best_rows`."""
    kernel = _pick(impl, query)
    if not keys.mask.shape[1]:
        return no_scores(query, group).int()
    return kernel.best(query, keys, group, count, page)


def listed_logits(query: Tensor, keys: QuantizedKeys, pages: Tensor, page: int, impl: str | None = None) -> Tensor:
    """Return the logits of the rows of some pages by their keys of few bits, as `logits` has them.

    Args:
        query, keys, impl: see `logits`.
        pages: integers `[B,H,P]`, listed for all of a KV head's query heads, or `[B,H*G,P]` for each; negative: unused.
        page: rows of a page, any power of two; a group need hold no whole number of pages.

    Returns:
        `[B,H,G,P*page]` float32, the rows of a page beside each other, -inf where a page is unused, where a row is not
        valid, and where a page reaches beyond row N.
    """
    kernel = _pick(impl, query)
    if not pages.shape[2]:
        return query.new_empty(*query.shape[:3], 0, dtype=torch.float32)
    return kernel.listed_logits(query, keys, pages, page)


def best_listed(
    query: Tensor,
    keys: QuantizedKeys,
    group: str,
    pages: Tensor,
    page: int,
    count: int,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return of the rows of some pages those with the best votes, and how many groups' levels that reads.

    Args:
        query, keys, pages, page, impl: see `listed_logits`.
        group: see `group_vote.dispatch.vote`.
        count: rows chosen.

    Returns:
        `[B,Hs,S]` int32, rows as `topk.dispatch.best_rows` has them; for each list of pages, `[B,H]` or `[B,H*G]`
        int64, the groups in which a listed row lies.
    """
    return _pick(impl, query).best_listed(query, keys, group, pages, page, count)
