"""The stored keys and values of one layer, in zones: sink | sealed | recent.

`append` stores, `seal` shows finished rows to the selector and lets it order them. A selector sees sealed rows only, so
nothing it names is counted twice; sink and recent rows are read by every query.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from sparseattn import checks
from sparseattn.budget import Budget, budget_rows
from sparseattn.selection import Bounds, Selection
from sparseattn.selectors.base import Rows, Selector
from sparseattn.storage import RowBuffer


class KVCache:
    """Keys and values of B sequences and H heads, with the selector that indexes them.

    Each sequence is stored without its padding: sink and recent rows are its first and last *real* rows, so a padded
    batch gives what the unpadded sequences give. Where sequences differ in length, the sealed zone holds whole spans of
    zeros, which selectors are told never to select.

    Args:
        selector: chooses among the sealed rows; the cache owns it from here on.
        sink: first rows of each sequence, read by every query; 0 or more.
        window: last rows, read by every query, the current token's included; 0 or more. "1+2047" of SAAP is sink 1,
            window 2047; "128+512" of RetrievalAttention sink 128, window 512.
        seal: rows that must wait beyond the window before decoding seals them (the first decode seals whatever it
            can). At most `seal - 1` waiting rows are read densely, so for measuring quality set it to the selector's
            span, for speed leave it at 1024. At least the span. The sequences of a batch seal together, when the first
            of them is due: above the span, one may read fewer waiting rows than it would alone.
        rollback: newest rows beyond the window kept unsealed so that `crop` can drop them (speculative decoding).
        capacity: rows to allocate at once; 0 grows by half when full.

    Raises:
        ValueError: a negative size, or `seal` below the selector's span.
    """

    def __init__(
        self,
        selector: Selector,
        *,
        sink: int = 4,
        window: int = 64,
        seal: int = 1024,
        rollback: int = 0,
        capacity: int = 0,
    ) -> None:
        if not isinstance(selector, Selector):
            raise ValueError(f"selector is an instance of a Selector, such as Quest(), got {selector!r}")
        for name, size in (("sink", sink), ("window", window), ("rollback", rollback), ("capacity", capacity)):
            if size < 0:
                raise ValueError(f"{name} is 0 or more rows, got {size}")
        if seal < selector.span:
            raise ValueError(f"seal is at least the span of {selector!r}, {selector.span} rows, got {seal}")
        self.selector = selector
        self.sink, self.window, self.seal_rows, self.rollback = sink, window, seal, rollback
        self.capacity = capacity
        self._keys, self._values = RowBuffer(2, capacity), RowBuffer(2, capacity)  # [B,H,N,D]
        self._positions = RowBuffer(1, capacity)  # [B,N] int64, in the order of appending; meaningful if unsealed
        self._queries = RowBuffer(3)  # [B,H,G,n,D] of the recent rows, where the selector needs them
        self._forget()

    def _forget(self) -> None:
        # Counts live on the host, so that no step waits for the device; `bounds` carries them to the kernels.
        self._count = torch.zeros(0, dtype=torch.int64)  # [B] real rows
        self._sealed = torch.zeros(0, dtype=torch.int64)  # [B] of them sealed
        self._next = torch.zeros(0, dtype=torch.int64)  # [B] position that follows the last one
        self._zone = 0  # rows of the sealed zone, zeros for padding included
        self._decoded = False
        self._bounds: Bounds | None = None

    # -- what is stored ------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first append."""
        return self._count.shape[0]

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows of each sequence."""
        return self._count.clone()

    @property
    def sealed(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows that the selector has been shown."""
        return self._sealed.clone()

    @property
    def keys(self) -> Tensor:
        """`[B,H,N,D]`, N the physical rows up to the longest sequence's last. A view."""
        return self._keys.data

    @property
    def values(self) -> Tensor:
        """`[B,H,N,D]`, stored as the keys are. A view."""
        return self._values.data

    @property
    def positions(self) -> Tensor:
        """`[B]` int64 on the cache's device: position of each sequence's newest token."""
        return (self._next - 1).to(self.keys.device)

    @property
    def bounds(self) -> Bounds:
        """The zones, on the cache's device; updated in place as rows come."""
        self._require_rows()
        assert self._bounds is not None
        return self._bounds

    @property
    def _start(self) -> int:
        return self.sink + self._zone  # first row after the sealed zone

    def _require_rows(self) -> None:
        if self.batch == 0:
            raise RuntimeError("the cache is empty: append a prefill first")

    def _recent(self) -> Tensor:
        return self._count - self._count.clamp(max=self.sink) - self._sealed  # [B]

    def _end(self) -> Tensor:
        """`[B]` one past the last recent row of each sequence; where there is none, the end of the sealed zone."""
        return self._start + self._recent()

    def _place(self, number: Tensor) -> Tensor:
        """Physical rows of the unsealed real rows `number` `[B,...]` of each sequence."""
        sealed = self._sealed.view(-1, *[1] * (number.ndim - 1))
        return torch.where(number < self.sink, number, number - self.sink - sealed + self._start)

    def _last(self) -> int:
        return int(self._end().max())

    # -- storing ---------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, queries: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Stores new rows behind those that are there. Never copies what is stored (growth apart).

        Args:
            keys, values: `[B,H,n,D]`, keys after RoPE.
            queries: `[B,H,G,n,D]` of the same tokens, if the selector `needs_queries`; ignored otherwise.
            positions: `[B,n]` integers, rising along real rows; a negative one marks padding, which is not stored.
                Default: no padding, counting on from the newest row.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit what is stored; NaN or infinite keys or values (on a
                GPU, single rows are checked when they are sealed, not at every step); missing queries. Nothing is
                stored then.
        """
        checks.rows(keys, values, queries, self.selector, self._keys.full if self.batch else None)
        batch, _, new, _ = keys.shape
        if self.batch == 0:
            self._count, self._sealed, self._next = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))
        if positions is None:
            at = self._next[:, None] + torch.arange(new)
            counts = torch.full((batch,), new)
        else:
            at = checks.positions(positions, batch, new, self._next)
            counts = (at >= 0).sum(1)
        self._store(keys, values, queries, at, counts)
        if new:
            self._next = torch.maximum(self._next, at.amax(1) + 1)

    def _store(self, keys: Tensor, values: Tensor, queries: Tensor | None, at: Tensor, counts: Tensor) -> None:
        batch, new = at.shape
        recent = self._recent()
        order = self._count[:, None] + torch.cumsum(at >= 0, 1) - 1  # [B,n] number of each real row in its sequence
        place = self._place(order)
        self._count = self._count + counts
        last = self._last()
        stored = ((self._keys, keys, 2), (self._values, values, 2), (self._positions, at.to(keys.device), 1))
        for buffer, rows, _ in stored:
            buffer.reserve(last, rows)
            buffer.rows = last
        first = int(place[0, 0]) if new else 0
        if bool((counts == new).all()) and bool((place == torch.arange(first, first + new)).all()):
            for buffer, rows, dim in stored:
                buffer.full.narrow(dim, first, new).copy_(rows)
        else:
            for b in range(batch):
                real = (at[b] >= 0).nonzero()[:, 0].to(keys.device)
                target = place[b][at[b] >= 0].to(keys.device)
                for buffer, rows, dim in stored:
                    buffer.full[b].index_copy_(dim - 1, target, rows[b].index_select(dim - 1, real))
        if queries is not None and self.selector.needs_queries:
            self._store_queries(queries, at, counts, recent)
        self._show()

    def _store_queries(self, queries: Tensor, at: Tensor, counts: Tensor, recent: Tensor) -> None:
        now = self._recent()
        self._queries.reserve(int(now.max()), queries)
        self._queries.rows = int(now.max())
        for b in range(at.shape[0]):
            fresh = int(now[b] - recent[b])  # the others went to the sink, which no selector sees
            if fresh:
                real = (at[b] >= 0).nonzero()[-fresh:, 0].to(queries.device)
                self._queries.full[b, :, :, int(recent[b]) : int(now[b])] = queries[b].index_select(2, real)

    def _show(self) -> None:
        """Brings `bounds` and the selector's view of the stored keys up to date."""
        device = self._keys.full.device
        sink, end = self._count.clamp(max=self.sink).int(), self._end().int()
        sealed = torch.full_like(end, self._start)
        if self._bounds is None or self._bounds.rows.shape != end.shape or self._bounds.rows.device != device:
            self._bounds = Bounds(sink.to(device), self.sink, sealed.to(device), end.to(device))
        else:
            self._bounds.sink.copy_(sink, non_blocking=True)
            self._bounds.sealed.copy_(sealed, non_blocking=True)
            self._bounds.rows.copy_(end, non_blocking=True)
        self.selector.stored = self._keys.full[:, :, self.sink : self._start]

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Shows the selector the rows that have left the window, if it is time; `select` and `decode` call it.

        The first call seals every row before the window, later ones when `seal` rows wait; always whole spans.
        """
        self._require_rows()
        waiting = (self._recent() - self.window - self.rollback).clamp(min=0)  # [B]
        if self._decoded and int(waiting.max()) < self.seal_rows:
            return
        self._decoded = True
        span = self.selector.span
        each = waiting // span * span  # [B] rows to seal
        most = int(each.max())
        if most == 0:
            return
        self._make_room(each, most)
        low, high = self._start, self._start + most
        at = self._positions.full[:, low:high].masked_fill(
            (torch.arange(most) >= each[:, None]).to(self.keys.device), -1
        )
        keys, values = self._keys.full[:, :, low:high], self._values.full[:, :, low:high]
        if keys.is_cuda:
            checks.finite(keys, values)
        queries = self._take_queries(each, most) if self.selector.needs_queries else None
        self._sealed = self._sealed + each
        self._zone += most
        order = self.selector.append(Rows(keys, values, at, queries))
        if order is not None:
            checks.order(order, keys)
            index = order[..., None].expand_as(keys)
            keys.copy_(keys.gather(2, index))
            values.copy_(values.gather(2, index))
        self._show()

    def _make_room(self, each: Tensor, most: int) -> None:
        """Where sequence b seals fewer rows than others, moves its later rows behind the zone and zeros the gap."""
        low, recent = self._start, self._recent()
        end = int((low + most + recent - each).max())
        buffers = (self._keys, self._values, self._positions)
        for buffer in buffers:
            buffer.reserve(end, buffer.full)
            buffer.rows = end
        for b in range(self.batch):
            sealed, left = int(each[b]), int(recent[b] - each[b])
            if sealed == most:
                continue
            for buffer in buffers:
                rows = buffer.full[b].movedim(buffer.dim - 1, 0)  # [N,...]
                later = rows[low + sealed : low + sealed + left].clone()
                rows[low + sealed : low + most] = 0
                rows[low + most : low + most + left] = later

    def _take_queries(self, each: Tensor, most: int) -> Tensor:
        """`[B,H,G,most,D]`: the sealed rows' queries, zeros for padding; they leave the buffer."""
        recent = self._recent()
        taken = self._queries.full[:, :, :, :most].clone()
        left = int((recent - each).max())
        for b in range(self.batch):
            sealed, later = int(each[b]), int(recent[b] - each[b])
            taken[b, :, :, sealed:] = 0
            kept = self._queries.full[b, :, :, sealed : sealed + later].clone()
            self._queries.full[b, :, :, :later] = kept
        rest = RowBuffer(3)  # the prefill's queries are several times the keys: let their storage go
        rest.reserve(left, taken)
        rest.full[:, :, :, :left] = self._queries.full[:, :, :, :left]
        rest.rows = left
        self._queries = rest
        return taken

    # -- reading -----------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, budget: Budget) -> Selection:
        """Seals what is due and asks the selector for at most `budget` rows per head; see `sparseattn.decode`."""
        self._require_rows()
        checks.query(query, self._keys.full)
        self.seal()
        rows = budget_rows(budget, int(self._count.max()))
        if rows < self.selector.span and self._zone > 0:
            raise ValueError(
                f"a budget of {rows} rows is less than one span of {self.selector!r}, which reads "
                f"{self.selector.span} rows at a time"
            )
        return self.selector.select(query, self.positions, rows)

    # -- editing -----------------------------------------------------------------------------------------------------

    def crop(self, drop: int) -> None:
        """Forgets the newest `drop` rows of every sequence, as speculative decoding does with rejected tokens.

        Raises:
            ValueError: `drop` reaches into sealed rows, which never change: construct the cache with a larger
                `rollback`.
        """
        if drop < 0:
            raise ValueError(f"crop drops 0 or more rows, got {drop}")
        free = torch.where(self._sealed > 0, self._recent(), self._count)
        if self.batch and drop > int(free.min()):
            raise ValueError(
                f"cannot drop {drop} rows: only the newest {int(free.min())} are not sealed yet; build the cache with "
                f"rollback={drop} or more to keep that many unsealed"
            )
        if not self.batch or not drop:
            return
        gone = self._place(self._count - drop)  # [B] the first row dropped; its position is the next one's
        self._next = self._positions.full.cpu().gather(1, gone[:, None])[:, 0]
        self._count = self._count - drop
        self._keys.rows = self._values.rows = self._positions.rows = self._last()
        if self.selector.needs_queries:
            self._queries.rows = max(int(self._recent().max()), 0)
        self._show()

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was (beam search); `index` `[B']` may repeat and omit."""
        if index.ndim != 1 or index.dtype != torch.int64 or not bool(((index >= 0) & (index < self.batch)).all()):
            raise ValueError(f"reorder takes int64 [B'] indices below the batch of {self.batch}, got {index}")
        for buffer in self._buffers():
            buffer.take(index)
        host = index.cpu()
        self._count, self._sealed, self._next = self._count[host], self._sealed[host], self._next[host]
        self.selector.reorder(index)
        self._show()

    def clone(self) -> KVCache:
        """An independent copy, selector included."""
        twin = copy.copy(self)
        twin.selector = self.selector.clone()
        for name, value in vars(self).items():
            if isinstance(value, RowBuffer):
                setattr(twin, name, value.clone())
        twin._bounds = None
        if self._bounds is not None:
            twin._show()
        return twin

    def reset(self) -> None:
        """Forgets every row, the selector's too; storage and configuration stay."""
        for buffer in self._buffers():
            buffer.reset()
        self.selector.reset()
        self._forget()

    def to(self, device: torch.device | str) -> KVCache:
        """Moves storage and selector, and returns the cache."""
        for buffer in self._buffers():
            buffer.to(device)
        self.selector.to(device)
        if self._bounds is not None:
            self._show()
        return self

    def _buffers(self) -> list[RowBuffer]:
        return [self._keys, self._values, self._positions, self._queries]

    def __repr__(self) -> str:
        return (
            f"KVCache({self.selector!r}, sink={self.sink}, window={self.window}, seal={self.seal_rows}, "
            f"rollback={self.rollback}): {self.batch} sequences of {self._count.tolist()} rows"
        )
