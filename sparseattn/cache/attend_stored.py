"""Attention of a few queries over every stored row where it lies: what verifies drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import ATTEND, attend
from sparseattn.kernels.attend.merge import merge, share
from sparseattn.kernels.implementations import choose
from sparseattn.kernels.weights_given.dispatch import log_sums

COMPILED = ("numba", "triton")  # implementations of `attend` that read rows in place
# Queries of a KV head, beyond which torch's blocked products make up for a copy of the rows. On 2 cores 36 queries over
# 131,072 rows of 128 took 34 ms a layer in place and 105 with the copy; on a GPU more would not fit a tile.
FEW = {"cpu": 128, "cuda": 32}


def in_place(cache: KVCache, queries: int) -> bool:
    """Return whether `attend_stored` reads rows without a copy: its code is compiled, and all rows lie together; or
    whether nothing else can, as rows are dealt to ranks."""
    keys = cache.stored.keys.full
    compiled = choose(None, keys.device, keys.dtype, ATTEND.names, ATTEND.fallback) in COMPILED
    if cache.ranks is not None:
        return True  # of which other processes have most
    return compiled and queries <= FEW.get(keys.device.type, 0) and not cache.stored.zones.apart


def attend_stored(
    query: Tensor, cache: KVCache, *, scale: float | None = None, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over every row that the cache holds, in place.

    Args:
        query: `[B,H,M,D]`, any number of queries of each KV head, all of which see all rows.
        cache: whose rows lie together, or are dealt to ranks, each of which asks with the same query. Rows that its
            selector has dropped for good are no longer there.
        scale, impl: as of `attend`.

    Returns:
        `[B,H,M,D]` and the log-sum-exp `[B,H,M]`, as of `attend`.
    """
    stored = cache.stored
    stored.require()
    cache.search.note_dropped()
    if cache.ranks is not None:
        return cache.ranks.merged(*_dealt(query, cache, scale, impl))
    return attend(
        query, stored.keys.visible, stored.values.visible, _all_sealed(cache), stored.bounds, scale=scale, impl=impl
    )


def _dealt(query: Tensor, cache: KVCache, scale: float | None, impl: str | None) -> tuple[Tensor, Tensor]:
    """`attend_stored` over this rank's rows."""
    stored, (batch, heads) = cache.stored, query.shape[:2]
    nothing = Selection.none(batch, heads, query.device)
    beside = attend(query, cache.keys, cache.values, nothing, stored.near_bounds, scale=scale, impl=impl)
    every = _all_sealed(cache)
    far = attend(query, *stored.sealed_rows(), every, stored.sealed_bounds, scale=scale, impl=impl)
    return merge(*(torch.stack(pair) for pair in zip(beside, far, strict=True)))


def with_new_rows(
    query: Tensor,
    cache: KVCache,
    new: tuple[Tensor, Tensor],
    seen: Tensor,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of n new tokens over every stored row and over each other, before they are stored.

    Args:
        query: `[B,H,G,n,D]`.
        cache: as of `attend_stored`; none of the new rows is in it.
        new: keys and values `[B,H,n,D]`, the new rows.
        seen: `[B,1,n,n]` or `[1,1,n,n]` bool, which new rows each new token sees.
        scale, impl: as of `attend`.

    Returns:
        `[B,H,G,n,D]` in the query's dtype; the log-sum-exp `[B,H,G,n]` float32, -inf where a token sees no row.
    """
    (keys, values), group = new, query.shape[2]
    folded = query.flatten(2, 3)  # [B,H,Gn,D]: one pass over the rows serves all tokens and all heads of a group
    stored = attend_stored(folded, cache, scale=scale, impl=impl)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    logits = (folded.float() @ keys.float().mT) * factor  # [B,H,Gn,n]
    logits = logits.masked_fill(~seen.repeat(1, 1, group, 1), -torch.inf)
    total = logits.logsumexp(-1)
    mine = share(logits, total[..., None]) @ values.float(), total
    out, lse = merge(torch.stack([stored[0].float(), mine[0]]), torch.stack([stored[1].float(), mine[1]]))
    return out.to(query.dtype).unflatten(2, (group, -1)), lse.unflatten(2, (group, -1))


def sums_seen(query: Tensor, keys: Tensor, seen: Tensor, *, scale: float | None = None) -> Tensor:
    """Return the log-sum-exp of each query over the keys that it sees, as `with_new_rows` returns it.

    Args:
        query: `[B,H,G,n,D]`.
        keys: `[B,H,N,D]`.
        seen: `[B,1,n,N]` or, of each query head, `[B,HG,n,N]` bool.
        scale: as of `attend`.

    Returns:
        `[B,H,G,n]` float32; -inf where a query sees none.
    """
    heads, group = query.shape[1:3]
    apart = seen.shape[1] > 1
    seen = seen.unflatten(1, (heads, group)).flatten(2, 3) if apart else seen.repeat(1, 1, group, 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    return log_sums(query.flatten(2, 3), keys, seen, factor).unflatten(2, (group, -1))


def _all_sealed(cache: KVCache) -> Selection:
    """Return the selection of every sealed row: one run where there is no padding among them."""
    stored = cache.stored
    zone, device = stored.zones.zone, stored.device
    batch, heads = stored.keys.full.shape[:2]
    if not zone:
        return Selection.none(batch, heads, device)
    real = stored.sealed_real
    if real is None:
        start = torch.zeros(batch, heads, 1, dtype=torch.int32, device=device)
        return Selection(start, torch.full_like(start, zone), _power_of_two(zone))
    return _runs(real)


def _runs(real: Tensor) -> Selection:
    """Return the selection of the rows of `[B,H,N]` bool, as runs."""
    edge = torch.nn.functional.pad(real.int(), (1, 1)).diff(dim=2)  # [B,H,N+1]: 1 where a run begins, -1 behind its end
    begins, ends = edge == 1, edge == -1
    slots = int(begins.sum(2).max())
    start = real.new_zeros(*real.shape[:2], slots, dtype=torch.int32)
    stop = torch.zeros_like(start)
    number = torch.arange(edge.shape[2], dtype=torch.int32, device=real.device).expand_as(edge)
    used = torch.arange(slots, device=real.device) < begins.sum(2, keepdim=True)  # as many begin as end
    start[used], stop[used] = number[begins], number[ends]
    length = stop - start
    return Selection(start, length, _power_of_two(int(length.max()) if slots else 1))


def _power_of_two(rows: int) -> int:
    return 1 << max(rows - 1, 0).bit_length()
