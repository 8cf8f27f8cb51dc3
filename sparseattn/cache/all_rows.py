"""Every stored row of a cache: for comparisons with attention that selects nothing, and for another cache to take."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.selection import Bounds, Selection


def everything(cache: KVCache) -> tuple[Tensor, Tensor, Tensor]:
    """Return every stored row, for attention without a selection: in stored order, with padding and spare places.

    Rows that the selector has dropped for good are no longer there, freed (`KVCache.compact`) or not. Those that a
    codec keeps are read back.

    Returns:
        keys, values `[B,H,N,D]` on the cache's device, views unless sealed rows lie apart; `[B,H,N]` bool, which
        places hold a row. The others hold anything.

    Raises:
        RuntimeError: an empty cache, or one whose sealed rows are dealt to ranks.
    """
    stored, zones = cache.stored, cache.stored.zones
    stored.require()
    if cache.ranks is not None and any(zones.sealed):
        raise RuntimeError(f"{cache.ranks} has a part of the sealed rows alone: compare in a cache of one process")
    cache.search.note_dropped()
    heads, device = stored.keys.full.shape[1], stored.device
    row, base = torch.arange(stored.keys.rows), zones.start
    count, end = torch.tensor(zones.count)[:, None], torch.tensor(zones.end)[:, None]
    dense = (row < count.clamp(max=zones.sink)) | ((row >= base) & (row < end))
    dense = dense[:, None].expand(-1, heads, -1).to(device)  # [B,H,N]
    sealed = stored.sealed.real.data.to(device) if zones.zone else dense[:, :, :0]
    real = torch.cat([dense[:, :, : zones.sink], sealed, dense[:, :, base:]], 2)
    if not (zones.apart and zones.zone):
        return stored.keys.data, stored.values.data, real
    keys, values = (
        torch.cat([x.data[:, :, :base], y.to(device), x.data[:, :, base:]], 2)
        for x, y in zip((stored.keys, stored.values), stored.sealed_rows(), strict=True)
    )
    return keys, values, real


def all_bounds(cache: KVCache) -> Bounds:
    """Return the zones of the rows of `everything`."""
    zones, bounds = cache.stored.zones, cache.bounds
    if not zones.apart:
        return bounds
    return Bounds(bounds.sink, bounds.base, bounds.sealed + zones.zone, bounds.rows + zones.zone)


def bytes_named(cache: KVCache, selection: Selection) -> Tensor:
    """Return `[B,H]` int64: bytes of the sealed rows that a selection names, each once for all query heads of a KV
    head; of rows that a codec keeps, those that it reads for them."""
    if (kept := cache.stored.kept) is not None:
        return kept.codec.bytes_read(kept, selection)
    keys = cache.stored.keys.full
    heads, size = keys.shape[1], keys.shape[3]
    return selection.distinct(heads, cache.stored.zones.zone) * (2 * size * cache.selector.bytes_of(keys))


def copy_rows(source: KVCache, target: KVCache, heads: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Append the rows of a cache, which has sealed none and has no sink, to another, with the queries it holds of them.

    So one prefill serves many selectors: `source` is not changed.

    Args:
        source, target: as said.
        heads: of a tensor `[B,H,...]` those KV heads that `target` is of; default all.

    Raises:
        ValueError: rows are sealed or a sink is kept apart in `source`, `target` learns from queries of which `source`
            holds no full set, or what `append` refuses.
    """
    stored, zones = source.stored, source.stored.zones
    stored.require()
    if source.sink or zones.zone:
        raise ValueError(
            f"rows are copied from a cache without sink and sealed rows, got a sink of {source.sink} and sealed rows "
            f"{zones.sealed}"
        )
    learns, share = target.learns, stored.queries.sampled.share
    if learns and share < 1:
        raise ValueError(
            f"{target!r} learns from queries, and the cache to copy from holds {share:g} of them; it must hold all"
        )
    beyond = torch.arange(stored.keys.rows) >= torch.tensor(zones.end)[:, None]  # [B,N] behind a shorter one
    keys, values = stored.keys.data, stored.values.data
    queries = stored.queries.sampled.data if learns else None
    if bool(beyond.any()):
        hidden = beyond[:, None, :, None].to(keys.device)
        keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
        queries = None if queries is None else queries.masked_fill(hidden[:, :, None], 0.0)
    at = stored.positions.data.masked_fill(beyond, -1)
    target.append(heads(keys), heads(values), None if queries is None else heads(queries), at)
