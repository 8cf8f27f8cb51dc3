"""The KV heads of one layer that have one method: their rows, their budget, and what decoding them has read."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from sparseattn.cache.all_rows import bytes_named
from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import Budget
from sparseattn.core.selection import Selection
from sparseattn.roles.role import Share


class SparseHeads:
    """A cache of some of a layer's KV heads, or of all of them.

    Args:
        share: which heads, and their method.
        rows: their cache.
        budget: rows beyond sink and window, where the share has no budget of its own; see `Share.budget`.

    Attributes:
        budget: what it reads beyond sink and window.
    """

    def __init__(self, share: Share, rows: KVCache, budget: Budget) -> None:
        self.rows = rows
        self.assign(share, budget)
        self.forget_counts()

    def assign(self, share: Share, budget: Budget) -> None:
        """Decode by this share from now on, with `budget` where it has none of its own."""
        self.share, self.budget = share, share.budget(budget)

    def forget_counts(self) -> None:
        """Start counting anew."""
        self.calls = 0
        # Rows chosen, read anyway and stored, summed over calls; a tensor on a GPU, for which no step waits.
        self._chosen: float | Tensor = 0.0
        self._always, self._stored = 0.0, 0.0
        self._read: float | Tensor = 0.0  # shares, by KV head

    @property
    def mean_rows(self) -> float:
        """Rows attended by a query head in a call, mean over calls, sequences and heads; 0 without any."""
        return (float(self._chosen) + self._always) / max(self.calls, 1)

    @property
    def mean_context(self) -> float:
        """Rows stored at a call, mean over calls and sequences; 0 without any."""
        return self._stored / max(self.calls, 1)

    @property
    def bytes_share(self) -> float:
        """Bytes read to choose and to attend, over those of all rows as they came; mean over calls, sequences, heads.

        NaN without any call, where the cache was made without `check`, and where the selector does not say what it
        reads.
        """
        return float(torch.as_tensor(self._read).mean()) / self.calls if self.calls and self.rows.check else math.nan

    def bytes_by_head(self) -> Tensor:
        """Return `bytes_share` of each KV head, `[h]` float64."""
        return torch.as_tensor(self._read, dtype=torch.float64).cpu() / self.calls

    def of(self, x: Tensor) -> Tensor:
        """Return its heads of `[B,H,...]`."""
        return self.share.of(x)

    def of_queries(self, x: Tensor, num_kv_heads: int) -> Tensor:
        """Return its query heads of `[B,HG,...]`, or of `[B,1,...]` for all, in a layer of H = `num_kv_heads`."""
        if self.share.heads is None or x.shape[1] == 1:
            return x
        return self.of(x.unflatten(1, (num_kv_heads, -1))).flatten(1, 2)

    def append(self, keys: Tensor, values: Tensor, queries: Tensor, positions: Tensor | None) -> None:
        """Store its heads of a layer's keys and values `[B,H,n,D]` with queries `[B,H,G,n,D]`."""
        if self.share.heads is not None:
            keys, values, queries = self.of(keys), self.of(values), self.of(queries)
        self.rows.append(keys, values, queries, positions)

    def decode(self, query: Tensor, scale: float, impl: str | None) -> Tensor:
        """Return `[B,h,G,D]` for a layer's query `[B,H,G,D]`, and count what was read."""
        if self.share.heads is not None:
            query = self.of(query)
        out = decode(query, self.rows, self.budget, scale=scale, impl=impl)
        self._count()
        return out

    def _count(self) -> None:
        rows = self.rows
        chosen, tail = rows.search.latest, rows.search.latest_tail
        assert chosen is not None
        stored, sealed = rows.counts
        mean_stored = sum(stored) / len(stored)
        always = mean_stored - sum(sealed) / len(sealed)
        for selection in (chosen,) if tail is None else (chosen, tail.selection):
            length = selection.length  # [B,Hs,S] rows
            read = length.sum()
            self._chosen = self._chosen + (read if read.is_cuda else int(read)) / (length.shape[0] * length.shape[1])
        self._always += always  # sink and rows not sealed
        self._stored += mean_stored
        self.calls += 1
        if rows.check:  # a comparison, which pays for looking
            self._read = self._read + self._share_read(chosen, mean_stored, always)

    def _share_read(self, chosen: Selection, stored: float, always: float) -> Tensor:
        """Return `[h]`: bytes read to choose and to attend, over those of all rows as they came; mean over sequences.

        NaN where the selector does not say what it reads. A row that several query heads chose is read once.
        """
        if chosen.scan_bytes is None:
            return torch.full(self.rows.keys.shape[1:2], math.nan, dtype=torch.float64)
        keys, tail = self.rows.keys, self.rows.search.latest_tail
        heads = keys.shape[1]
        row = 2 * keys.shape[3] * self.rows.selector.bytes_of(keys)  # bytes of a key and a value
        read = bytes_named(self.rows, chosen) + chosen.scan_bytes + chosen.bias_bytes(heads)
        if tail is not None:
            read = read + row * tail.selection.distinct(heads, tail.keys.shape[2]) + tail.selection.bias_bytes(heads)
        return (always + read.double().mean(0) / row) / stored

    def clone(self) -> SparseHeads:
        """Return an independent copy that counts anew."""
        twin = copy.copy(self)
        twin.rows = self.rows.clone()
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        which = "" if self.share.heads is None else f"KV heads {', '.join(map(str, self.share.heads.which))}: "
        return f"{which}{self.rows!r}, budget={self.budget!r}"
