"""The KV heads of one layer that have one method: their rows, their budget, and what decoding them has read."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from sparseattn.cache.all_rows import bytes_named
from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.activity import LayerActivity
from sparseattn.core.budget import Budget
from sparseattn.core.selection import Chosen, Selection
from sparseattn.roles.role import Share

WAITING = 64  # selections whose rows are counted at once
SLOTS = 1024  # of a selection that may wait for that, and be held so long


def _number(rows: Tensor) -> int | Tensor:
    """Return rows as a number; a tensor on a GPU, for which no step waits, of float64, whose sums stay exact."""
    return rows.double() if rows.is_cuda else int(rows)


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
        self._waiting: list[Chosen] = []  # of one size, whose rows are not counted yet
        self._always, self._stored = 0.0, 0.0
        self._read: float | Tensor = 0.0  # shares, by KV head
        # Of the sequences whose token was no padding: rows read by a head on average, and bytes that all heads read.
        self.steps, self._held = 0, 0
        self._rows: float | Tensor = 0.0
        self._bytes: float | Tensor = 0.0

    @property
    def mean_rows(self) -> float:
        """Rows attended by a query head in a call, mean over calls, sequences and heads; 0 without any."""
        self._count_waiting()
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

    def activity(self) -> LayerActivity:
        """Return what its heads did, but for dense steps, which its layer counts."""
        self._count_waiting()
        read = float(self._bytes)
        return LayerActivity(
            sparse_steps=self.steps,
            rows_read=round(float(self._rows)),
            rows_held=self._held,
            bytes_read=None if math.isnan(read) else round(read),
            bytes_held=self._held * self.rows.keys.shape[1] * self._row_bytes if self._held else 0,
        )

    @property
    def _row_bytes(self) -> int:
        """Bytes of a key and a value of one KV head."""
        keys = self.rows.keys
        return 2 * keys.shape[3] * self.rows.selector.bytes_of(keys)

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

    def decode(self, query: Tensor, scale: float, impl: str | None, real: Tensor | None = None) -> Tensor:
        """Return `[B,h,G,D]` for a layer's query `[B,H,G,D]`, and count what was read.

        real: `[B]` bool on the CPU, whose token is no padding; None: nobody's is.
        """
        if self.share.heads is not None:
            query = self.of(query)
        out = decode(query, self.rows, self.budget, scale=scale, impl=impl)
        self._count(real)
        return out

    def _count(self, real: Tensor | None) -> None:
        rows = self.rows
        chosen, tail = rows.search.chosen, rows.search.latest_tail
        assert chosen is not None
        stored, _ = rows.counts
        always_read = rows.stored.near_counts  # sink and rows not sealed, which every query reads
        rows_stored, rows_always = sum(stored), sum(always_read)
        mean_stored, always = rows_stored / len(stored), rows_always / len(stored)
        steps = len(stored)
        if real is not None:
            counted = real.tolist()
            steps = sum(counted)
            rows_stored = sum(count for count, is_real in zip(stored, counted, strict=True) if is_real)
            rows_always = sum(count for count, is_real in zip(always_read, counted, strict=True) if is_real)
        self.steps += steps
        self._held += rows_stored
        self._rows = self._rows + rows_always
        for part in (chosen,) if tail is None else (chosen, Chosen.of(tail.selection)):
            if real is None:
                self._wait(part)
            else:
                length = part.selection.length  # [B,Hs,S] rows
                read = (length.sum((1, 2)) * real.to(length.device)).sum()
                self._add(length.sum(), length, read)
        self._always += always
        self._stored += mean_stored
        self.calls += 1
        if not rows.check:
            self._bytes = math.nan
            return
        read_bytes, row = self._bytes_read(chosen.selection), self._row_bytes  # a comparison, which pays for looking
        self._read = self._read + (always + read_bytes.mean(0) / row) / mean_stored
        if real is not None:
            read_bytes = read_bytes * real.to(read_bytes.device)[:, None]
        self._bytes = self._bytes + read_bytes.sum() + rows.keys.shape[1] * row * rows_always

    def _wait(self, chosen: Chosen) -> None:
        """Count the rows of a selection later: many at once cost a step less."""
        waiting, sizes = self._waiting, chosen.sizes
        if waiting and (len(waiting) == WAITING or waiting[0].sizes != sizes):
            self._count_waiting()
        self._waiting.append(chosen)
        if math.prod(sizes) > 2 * SLOTS:
            self._count_waiting()

    def _count_waiting(self) -> None:
        if self._waiting:
            length, self._waiting = torch.stack([chosen.selection.length for chosen in self._waiting]), []
            read = length.sum()
            self._add(read, length[0], read)

    def _add(self, chosen: Tensor, length: Tensor, read: Tensor) -> None:
        """Add rows that selections such as `length` `[B,Hs,S]` chose, `read` of them by tokens that are no padding."""
        lists = length.shape[1]
        self._chosen = self._chosen + _number(chosen) / (length.shape[0] * lists)
        self._rows = self._rows + _number(read) / lists

    def _bytes_read(self, chosen: Selection) -> Tensor:
        """Return `[B,h]` float64: bytes read to choose and to attend, without the rows that are read anyway.

        NaN where the selector does not say what it reads. A row that several query heads chose is read once.
        """
        keys, tail = self.rows.keys, self.rows.search.latest_tail
        heads = keys.shape[1]
        if chosen.scan_bytes is None:
            return torch.full(keys.shape[:2], math.nan, dtype=torch.float64)
        read = bytes_named(self.rows, chosen) + chosen.scan_bytes + chosen.bias_bytes(heads)
        if tail is not None:
            read = read + self._row_bytes * tail.selection.distinct(heads, tail.keys.shape[2])
            read = read + tail.selection.bias_bytes(heads)
        return read.double()

    def clone(self) -> SparseHeads:
        """Return an independent copy that counts anew."""
        twin = copy.copy(self)
        twin.rows = self.rows.clone()
        twin.forget_counts()
        return twin

    def __repr__(self) -> str:
        which = "" if self.share.heads is None else f"KV heads {', '.join(map(str, self.share.heads.which))}: "
        return f"{which}{self.rows!r}, budget={self.budget!r}"
