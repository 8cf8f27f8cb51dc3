"""How many bytes a method's index takes beside the KV cache: two short caches are filled and measured, on the CPU.

An index grows by the same bytes with every token, so that two lengths give what a token adds and what does not grow.
docs/lab/memory.md has the same figures for every method, part by part.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.selectors.abilities import LooksAhead
from sparseattn.selectors.registry import make_selector

ROWS = 1024, 2048  # sealed rows of the two caches
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
    few, many = (_held(spec, num_kv_heads, group, head_dim, dtype, rows) for rows in ROWS)
    token = (many - few) / (ROWS[1] - ROWS[0])
    return IndexBytes(max(few - token * ROWS[0], 0.0), token)


def _held(spec: str, num_kv_heads: int, group: int, head_dim: int, dtype: torch.dtype, rows: int) -> int:
    """Return the bytes of the selector after one step over so many sealed rows."""
    draw = torch.Generator().manual_seed(0)
    tokens = SINK + rows + WINDOW
    keys, values = torch.randn(2, 1, num_kv_heads, tokens, head_dim, generator=draw).to(dtype)
    queries = torch.randn(1, num_kv_heads, group, tokens, head_dim, generator=draw).to(dtype)
    cache = KVCache(make_selector(spec), sink=SINK, window=WINDOW, check=False)
    cache.append(keys, values, queries)
    query = queries[:, :, :, -1].contiguous()
    if cache.selector.find(LooksAhead):
        cache.foresee(query)
    decode(query, cache, BUDGET)
    return sum(size for name, size in cache.nbytes.items() if name not in ("kv", "books"))
