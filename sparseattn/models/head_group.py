"""The KV heads of one layer that have one method: their rows, their budget, and what decoding them has read."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import Budget
from sparseattn.core.selection import Selection
from sparseattn.roles.roles import Share


class SparseHeads:
    """A cache of some of a layer's KV heads, or of all of them.

    Args:
        share: which heads, and their method.
        rows: their cache.
        budget: the one that is asked for, rows beyond sink and window; see `Share.budget`.
    """

    def __init__(self, share: Share, rows: KVCache, budget: Budget) -> None:
        self.share, self.rows, self.asked = share, rows, budget
        self.forget_counts()

    def forget_counts(self) -> None:
        """Counts anew."""
        self.calls = 0
        # Rows chosen, read anyway and stored, summed over calls; a tensor on a GPU, for which no step waits.
        self._chosen: float | Tensor = 0.0
        self._always, self._stored = 0.0, 0.0
        self._read: float | Tensor = 0.0  # shares, by KV head

    @property
    def budget(self) -> Budget:
        """What it may read beyond sink and window."""
        return self.share.budget(self.asked)

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
        """Bytes read to choose and to attend over those of all rows as they came, mean over calls, sequences and KV
        heads; NaN without any, where the cache was made without `check`, and where the selector does not say what it
        reads."""
        return float(torch.as_tensor(self._read).mean()) / self.calls if self.calls and self.rows.check else math.nan

    def bytes_by_head(self) -> Tensor:
        """`[h]` float64: `bytes_share` of each KV head."""
        return torch.as_tensor(self._read, dtype=torch.float64).cpu() / self.calls

    def of(self, x: Tensor) -> Tensor:
        """Its heads of `[B,H,...]`."""
        return self.share.of(x)

    def of_queries(self, x: Tensor, heads: int) -> Tensor:
        """Its query heads of `[B,HG,...]`, or of `[B,1,...]` for all, in a layer of H = `heads` KV heads."""
        if self.share.heads is None or x.shape[1] == 1:
            return x
        return self.of(x.unflatten(1, (heads, -1))).flatten(1, 2)

    def append(self, keys: Tensor, values: Tensor, queries: Tensor, positions: Tensor | None) -> None:
        """Stores its heads of a layer's `[B,H,n,D]`, queries `[B,H,G,n,D]`."""
        self.rows.append(self.of(keys), self.of(values), self.of(queries), positions)

    def decode(self, query: Tensor, scale: float, impl: str | None) -> Tensor:
        """`[B,h,G,D]` for a layer's query `[B,H,G,D]`, counted."""
        out = decode(self.of(query), self.rows, self.budget, scale=scale, impl=impl)
        self._count()
        return out

    def _count(self) -> None:
        chosen = self.rows.latest
        assert chosen is not None
        stored, sealed = (sum(rows) / len(rows) for rows in self.rows.counts)
        tail = self.rows.latest_tail
        for part in (chosen,) if tail is None else (chosen, tail.selection):
            read = part.length.sum()
            batch, heads, _ = part.length.shape
            self._chosen = self._chosen + (read if read.is_cuda else int(read)) / (batch * heads)
        self._always += stored - sealed  # sink and rows not sealed
        self._stored += stored
        self.calls += 1
        if self.rows.check:  # a comparison, which pays for looking
            self._read = self._read + self._share_read(chosen, stored, stored - sealed)

    def _share_read(self, chosen: Selection, stored: float, always: float) -> Tensor:
        """`[h]`: bytes read to choose and to attend over those of all rows as they came, mean over sequences; NaN where
        the selector is silent.

        Query heads that choose apart read a row once that several of them chose.
        """
        if chosen.scan_bytes is None:
            return torch.full(self.rows.keys.shape[1:2], math.nan, dtype=torch.float64)
        keys, tail = self.rows.keys, self.rows.latest_tail
        heads, row = keys.shape[1], 2 * keys.shape[3] * self.rows.selector.bytes_of(keys)  # bytes of a key and a value
        read = self.rows.bytes_named(chosen) + chosen.scan_bytes + chosen.bias_bytes(heads)
        if tail is not None:
            read = read + row * tail.selection.distinct(heads, tail.keys.shape[2]) + tail.selection.bias_bytes(heads)
        return (always + read.double().mean(0) / row) / stored

    def clone(self) -> SparseHeads:
        """An independent copy that counts anew."""
        twin = copy.copy(self)
        twin.rows = self.rows.clone()
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        which = "" if self.share.heads is None else f"KV heads {', '.join(map(str, self.share.heads.which))}: "
        return f"{which}{self.rows!r}, budget={self.budget!r}"
