"""One decode step: seal what is due, select rows, attend to them."""

from __future__ import annotations

from torch import Tensor

from sparseattn.budget import Budget
from sparseattn.cache import KVCache
from sparseattn.kernels import attend


def decode(
    query: Tensor, cache: KVCache, budget: Budget, *, scale: float | None = None, impl: str | None = None
) -> Tensor:
    """Attention of one new token's query over the rows its selector chooses, the sink and the recent window.

    Append the token's own key and value first. Exactly `attend` over `cache.select(query, budget)`.

    Args:
        query: `[B,H,G,D]`, after RoPE, in the cache's dtype and device.
        cache: one layer's cache.
        budget: rows beyond sink and window, per head: an int, a share of the context (float), or None for all.
        scale: factor of the logits, default `1/sqrt(D)`.
        impl: see `attend`.

    Returns:
        `[B,H,G,D]` in the query's dtype.

    Raises:
        ValueError: a query that does not fit the cache, or a budget below 1 row or below the selector's span.
        RuntimeError: an empty cache, or an `impl` that cannot run here.
    """
    selection = cache.select(query, budget)
    return attend(query, cache.keys, cache.values, selection, cache.bounds, scale=scale, impl=impl)[0]
