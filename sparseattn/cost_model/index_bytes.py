"""How many bytes a method's index takes beside the KV cache: two short caches are filled and measured, on the CPU.

An index grows by the same bytes with every token, so that two lengths give what a token adds and what does not grow.
docs/lab/memory.md has the same figures for every method, part by part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.step_cost import Shape
from sparseattn.selectors.abilities import LooksAhead
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import make_selector

ROWS = 1024, 2048  # sealed rows of the two caches
LONGER = {  # methods of which these rows would be too few
    "bridge": (2048, 3072),  # 2,048 rows have all guides
    "retrieval": (2048, 2560),
    "ivf": (4096, 8192),  # both have 256 lists
}
SINK, WINDOW, BUDGET = 4, 64, 256


@dataclass(frozen=True, slots=True)
class IndexBytes:
    """Of one layer of one sequence.

    Args:
        fixed: bytes that do not grow.
        token: bytes that each token adds.
    """

    fixed: float
    token: float

    def at(self, context: int) -> float:
        """Return the bytes of a context of so many tokens."""
        return self.fixed + self.token * max(context - SINK - WINDOW, 0)


@functools.lru_cache(maxsize=64)
def index_bytes(spec: str, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype) -> IndexBytes:
    """Return what a method keeps in a layer of such heads.

    Raises:
        ValueError: a method that does not serve such a layer, such as one that needs a file trained for the model.
    """
    first, second = LONGER.get(spec.partition(":")[0], ROWS)
    shape = Shape(1, num_kv_heads, group, head_dim, dtype)
    few, many = (_held(spec, shape, rows) for rows in (first, second))
    token = (many - few) / (second - first)
    return IndexBytes(max(few - token * first, 0.0), token)


def _held(spec: str, shape: Shape, rows: int) -> int:
    """Return the bytes of the selector after one step over so many sealed rows."""
    cache = filled_cache(make_selector(spec), shape, rows, torch.Generator().manual_seed(0))
    return sum(size for name, size in cache.nbytes.items() if name not in ("kv", "books"))


def filled_cache(selector: Selector, shape: Shape, rows: int, draw: torch.Generator) -> KVCache:
    """Return a cache of drawn keys and values, with so many sealed rows, after one step.

    Args:
        selector: serves the cache.
        shape: B, H, G, D and the dtype of what it stores.
        rows: sealed, beside `SINK` and `WINDOW`.
        draw: what keys, values and queries are drawn with.
    """
    tokens, heads = SINK + rows + WINDOW, (shape.batch, shape.heads)
    queries = torch.randn(*heads, shape.group, tokens, shape.size, generator=draw).to(shape.dtype)
    keys, values = torch.randn(2, *heads, tokens, shape.size, generator=draw).to(shape.dtype)
    cache = KVCache(selector, sink=SINK, window=WINDOW, check=False)
    cache.append(keys, values, queries)
    cache.seal()
    query = queries[:, :, :, -1].contiguous()
    decode(query, looking_ahead(cache, query), max(BUDGET, cache.selector.span))
    return cache


def looking_ahead(cache: KVCache, query: Tensor) -> KVCache:
    """Return the cache, told the query of its next step if its method looks ahead."""
    if cache.selector.find(LooksAhead):
        cache.search.foresee(query)
    return cache
