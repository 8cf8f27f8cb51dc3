"""One decode step: seal what is due, select rows, attend to them, and tell the selector what they got if it asks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.ranks import Ranks
from sparseattn.core.budget import Allowance, Budget
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend.dispatch import attend, attend_stored, is_scale, no_scale
from sparseattn.kernels.attend.merge import merge, share

CODED: dict[str | None, str] = {"reference": "torch", "gather": "torch"}  # what attends to rows that a codec keeps


def decode(
    query: Tensor, cache: KVCache, budget: Budget, *, scale: float | None = None, impl: str | None = None
) -> Tensor:
    """Compute the attention of one new token's query over the rows its selector chooses, the sink and the recent
    window.

    Append the token's own key and value first. Exactly `attend_chosen` over `cache.select(query, budget)`, where all
    rows lie together.

    With a codec the sealed rows found are read as it keeps them (`RowCodec.attend`), and merged with the rest.

    With the cache's `group`, every rank calls this with the same query and gets the same output.

    With the cache's `sealed_device`, search and attention over the rows found run there while the cache's own device
    attends to sink and recent rows, and the two are merged (the co-execution of CPU and GPU in RetrievalAttention,
    https://arxiv.org/abs/2409.10516). Merging is in float32; in 16 bits each part is rounded once before it.

    Args:
        query: `[B,H,G,D]`, after RoPE, in the cache's dtype and device.
        cache: one layer's cache.
        budget: rows beyond sink and window, per head: an int, a share of the context (float or "5%"), None for all, or
            a `Mass`, for as many rows as hold a share of the attention by the selector's estimate. With
            `sealed_device` the host then waits for what the cache's device makes of sink and unsealed rows.
        scale: factor of the logits, default `1/sqrt(D)`.
        impl: see `attend`; it names the implementation on the cache's device, `sealed_device` takes its default.

    Returns:
        `[B,H,G,D]` in the query's dtype.

    Raises:
        ValueError: a query that does not fit the cache, or a budget below 1 row or below the selector's span, or a
            scale that a selector with a tail, or one that weighs its rows for a mass, was not told (`Selector.scale`).
        RuntimeError: an empty cache, or an `impl` that cannot run here.
    """
    search = cache.search
    alone = cache.sealed_device is None and cache.ranks is None and cache.codec is None and not cache.check
    at_once = alone and search.at_once  # where compiled code looks whether the query is finite
    allowed = cache.prepare(query, budget, finite=not at_once)
    if allowed.mass is not None or search.abilities.weighs_unsealed:
        _same_scale(query, cache, scale, "weighs rows")
    if at_once:
        out = search.decoded(query, allowed.rows, scale, impl) if allowed.mass is None else None
        if out is not None:
            return out
        cache.check_finite(query)
    if cache.ranks is not None:
        return _decode_over_ranks(query, cache, allowed, cache.ranks, scale, impl)
    if cache.sealed_device is None:
        selection = search.choose(query, allowed, counted=cache.check)
        return attend_chosen(query, cache, selection, scale=scale, impl=impl)
    return _decode_beside_host(query, cache, allowed, scale, impl)


def _decode_beside_host(
    query: Tensor, cache: KVCache, allowed: Allowance, scale: float | None, impl: str | None
) -> Tensor:
    """`decode` where sealed rows lie in host memory, which is searched and attended to there."""
    search, (on_host, copied) = cache.search, _to_host(query)
    nothing = Selection.none(query.shape[0], query.shape[1], query.device)
    beside = attend(query, cache.keys, cache.values, nothing, cache.bounds, scale=scale, impl=impl)
    if copied is not None:
        copied.synchronize()  # waits for the query, not for the attention queued behind it
    selection = search.choose(on_host, allowed, lambda: beside[1].to(on_host.device), counted=cache.check)
    parts, weights = _attend_parts(on_host, cache, selection, True, scale, None)
    there = [(_to_device(out, query.device), _to_device(lse, query.device)) for out, lse in parts]
    out, total = _merged([beside, *there])
    if weights is not None:  # the host waits for the device: what rows got is known when all is
        _observed(cache, selection, weights, parts[0][1], total.to(on_host.device))
    return out


def _decode_over_ranks(
    query: Tensor, cache: KVCache, allowed: Allowance, ranks: Ranks, scale: float | None, impl: str | None
) -> Tensor:
    """`decode` where sealed rows are dealt: of these each rank attends to its own that are chosen, of the rows that
    every query reads to its part, and all merge what they got."""
    stored = cache.stored
    nothing = Selection.none(query.shape[0], query.shape[1], query.device)
    beside = attend(query, cache.keys, cache.values, nothing, stored.near_bounds, scale=scale, impl=impl)
    selection = cache.search.choose(query, allowed, counted=cache.check)
    parts, _ = _attend_parts(query, cache, selection, True, scale, impl)
    return ranks.merged(*_merged([beside, *parts]))[0]


def attend_chosen(
    query: Tensor, cache: KVCache, selection: Selection, *, scale: float | None = None, impl: str | None = None
) -> Tensor:
    """Do the second half of a step, all rows lying together: attention over what `cache.select` answered, sink,
    window and the selector's tail. A selector that observes is told what its selection got.

    Args as of `decode`, which see; `cache` without `sealed_device`.

    Returns:
        `[B,H,G,D]` in the query's dtype.
    """
    parts, weights = _attend_parts(query, cache, selection, False, scale, impl)
    out, total = _merged(parts)
    if weights is not None:
        _observed(cache, selection, weights, parts[0][1], total)
    return out


def _attend_parts(
    query: Tensor,
    cache: KVCache,
    selection: Selection,
    apart: bool,
    scale: float | None,
    impl: str | None,
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:
    """(out, lse) of the rows chosen, with those that every query reads unless these lie `apart`, in one part or two,
    and of the tail if there is one; and, where the selector observes, the weights of the first part's rows among
    themselves."""
    stored, search, weights, parts = cache.stored, cache.search, None, []
    if apart and cache.codec is None:
        stored.sealed.fetch(selection)
        keys, values, bounds = *stored.sealed_rows(), stored.sealed_bounds
    elif impl is None and not query.is_cuda:  # rows behind the newest may hold anything, and views cost
        keys, values, bounds = stored.keys.full, stored.values.full, stored.bounds
    else:
        keys, values, bounds = stored.keys.visible, stored.values.visible, stored.bounds
    if cache.codec is not None:
        if not apart:
            nothing = Selection.none(query.shape[0], query.shape[1], query.device)
            parts.append(attend(query, keys, values, nothing, bounds, scale=scale, impl=impl))
        if (kept := stored.kept) is not None:
            parts.append(kept.codec.attend(query, kept, selection, scale, CODED.get(impl, impl)))
    elif search.abilities.observers and search.observed:
        out, lse, weights = attend(query, keys, values, selection, bounds, scale=scale, impl=impl, weights=True)
        parts.append((out, lse))
    else:
        parts.append(attend_stored(query, keys, values, selection, bounds, scale=scale, impl=impl))
    tail = search.tail(query, selection) if search.abilities.tail else None
    if tail is None:
        return parts, weights
    _same_scale(query, cache, scale, "weighs its tail")
    return [*parts, attend(query, tail.keys, tail.values, tail.selection, scale=scale, impl=impl)], weights


def _same_scale(query: Tensor, cache: KVCache, scale: float | None, what: str) -> None:
    """ValueError where a step's scale is not the one that the selector, which does `what` by logits, was told."""
    if scale is not None and not is_scale(scale):
        raise no_scale(scale)
    default = query.shape[3] ** -0.5
    bound, used = (default if factor is None else factor for factor in (cache.selector.layer_context.scale, scale))
    if not math.isclose(bound, used, rel_tol=1e-6):
        raise ValueError(
            f"{cache.selector!r} {what} by logits of scale {bound:g}, and this step has {used:g}: bind the selector to "
            f"a LayerContext with that scale before rows are sealed"
        )


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def _observed(cache: KVCache, selection: Selection, weights: Tensor, lse: Tensor, total: Tensor) -> None:
    """`weights` `[B,H*G,S,span]` of a part with `lse` `[B,H,G]` become those of the whole with `total`."""
    if lse is not total:  # the part is not all there is
        weights = weights * share(lse, total).float().flatten(1)[..., None, None]
    cache.search.observe(selection, weights, total)


def _to_host(rows: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """`rows` in host memory, complete once the event has happened (None: already)."""
    if not rows.is_cuda:
        return rows.cpu(), None
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(rows.device))
    return host, done


def _to_device(part: Tensor, device: torch.device) -> Tensor:
    """`part` of the host on `device`, without waiting for what is queued there."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)
