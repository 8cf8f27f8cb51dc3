"""One decode step: seal what is due, select rows, attend to them."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.budget import Budget
from sparseattn.cache import KVCache
from sparseattn.kernels import attend, merge
from sparseattn.selection import Selection


def decode(
    query: Tensor, cache: KVCache, budget: Budget, *, scale: float | None = None, impl: str | None = None
) -> Tensor:
    """Attention of one new token's query over the rows its selector chooses, the sink and the recent window.

    Append the token's own key and value first. Exactly `attend` over `cache.select(query, budget)`, where all rows lie
    together.

    With the cache's `sealed_device`, search and attention over the rows found run there while the cache's own device
    attends to sink and recent rows, and the two are merged (the co-execution of CPU and GPU in RetrievalAttention,
    https://arxiv.org/abs/2409.10516). Merging is in float32; in 16 bits each part is rounded once before it.

    Args:
        query: `[B,H,G,D]`, after RoPE, in the cache's dtype and device.
        cache: one layer's cache.
        budget: rows beyond sink and window, per head: an int, a share of the context (float or "5%"), or None for all.
        scale: factor of the logits, default `1/sqrt(D)`.
        impl: see `attend`; it names the implementation on the cache's device, `sealed_device` takes its default.

    Returns:
        `[B,H,G,D]` in the query's dtype.

    Raises:
        ValueError: a query that does not fit the cache, or a budget below 1 row or below the selector's span.
        RuntimeError: an empty cache, or an `impl` that cannot run here.
    """
    if cache.sealed_device is None:
        selection = cache.select(query, budget)
        return attend(query, cache.keys, cache.values, selection, cache.bounds, scale=scale, impl=impl)[0]
    rows = cache.prepare(query, budget)
    asked, copied = _to_host(query)
    nothing = Selection.none(query.shape[0], query.shape[1], query.device)
    near = attend(query, cache.keys, cache.values, nothing, cache.bounds, scale=scale, impl=impl)
    if copied is not None:
        copied.synchronize()  # waits for the query, not for the attention queued behind it
    selection = cache.search(asked, rows)
    far = attend(asked, cache.sealed_keys, cache.sealed_values, selection, cache.sealed_bounds, scale=scale)
    return merge(*(torch.stack([a, _to_device(b, query.device)]) for a, b in zip(near, far, strict=True)))[0]


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
