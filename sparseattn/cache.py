"""The stored keys and values of one layer, in zones: sink | sealed | recent.

`append` stores, `seal` shows finished rows to the selector and lets it order them. A selector sees sealed rows only, so
nothing it names is counted twice; sink and recent rows are read by every query. Sealed rows may lie in host memory.
"""

from __future__ import annotations

import copy
import os

import torch
from torch import Tensor

import sparseattn.checks as checks
import sparseattn.contract as contract
from sparseattn.budget import Budget, budget_rows
from sparseattn.indexes import append_kept, usable_folder
from sparseattn.queries import Queries
from sparseattn.selection import Bounds, Selection
from sparseattn.selectors.base import Rows, Selector
from sparseattn.storage import RowBuffer
from sparseattn.zones import Zones


class KVCache:
    """Keys and values of B sequences and H heads, with the selector that indexes them.

    Each sequence is stored without its padding: sink and recent rows are its first and last *real* rows, so a padded
    batch gives what the unpadded sequences give. Where sequences differ in length, the sealed zone holds whole spans of
    zeros, which selectors are told never to select (`Zones`).

    Args:
        selector: chooses among the sealed rows; the cache owns it from here on.
        sink: first rows of each sequence, read by every query; 0 or more.
        window: last rows, read by every query, the current token's included; 0 or more. "1+2047" of SAAP is sink 1,
            window 2047; "128+512" of RetrievalAttention sink 128, window 512.
        seal: rows that must wait beyond the window before decoding seals them (the first decode seals whatever it
            can). At most `seal - 1` waiting rows are read densely, so for measuring quality set it to the selector's
            span, for speed leave it at 1024. At least the span. The sequences of a batch seal together: above the span,
            a short one may read fewer waiting rows than alone, and out of phase up to a span more wait.
        rollback: newest rows beyond the window kept unsealed so that `crop` can drop them (speculative decoding).
        capacity: rows to allocate at once, with `sealed_device` there; 0 grows by half when full, which copies what is
            stored: at the first seal after a prefill, where there is no capacity for more.
        fixed: `capacity` rows a sequence are all there will be (of several sequences a span less one: padding), and
            what a step reads keeps its address and shape, the selector's index too: a CUDA graph of `decode`, captured
            once rows are sealed, stays right while tokens are appended and sealed (`seal`) between its replays, and
            after `reset` with a batch of the same shape. A share as budget is then of the context at the capture.
        sealed_device: "cpu" keeps sealed rows in host memory (pinned where there is CUDA), where the selector then
            lives and searches: device memory holds sink and recent rows and does not grow with the context
            (RetrievalAttention, https://arxiv.org/abs/2409.10516). Call `seal` after each layer's prefill, so that one
            prefill at a time lies on the device. None: sealed rows lie between sink and recent rows.
        indexes: folder of index files (`indexes`): the first seal takes the index of the same rows from there if it
            can, and writes it there if it had to build it. Made if it is not there; it only ever grows.
        check: whether every selection is held against the contract (`contract.check`), which makes the host wait:
            comparisons and tests do, decoding for its own sake does not.

    Raises:
        ValueError: a negative size, `seal` below the selector's span, a `queries_share` that is no share, a
            `sealed_device` other than host memory, `indexes` that cannot be a folder, or `fixed` without a capacity
            for more than the sink, with a `sealed_device`, or with a selector whose step the host takes part in.

    A selector serves one cache; give each layer its own with `selector.for_layer(i)`.
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
        fixed: bool = False,
        sealed_device: torch.device | str | None = None,
        indexes: str | os.PathLike[str] | None = None,
        check: bool = False,
    ) -> None:
        if not isinstance(selector, Selector):
            raise ValueError(f"selector is an instance of a Selector, such as Quest(), got {selector!r}")
        sizes = {"sink": sink, "window": window, "rollback": rollback, "capacity": capacity, "seal": seal}
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} is 0 or more rows, an int, got {size!r}")
        if seal < selector.span:
            raise ValueError(f"seal is at least the span of {selector!r}, {selector.span} rows, got {seal}")
        checks.loose(selector)
        self.selector = selector
        self.sink, self.window, self.seal_rows, self.rollback = sink, window, seal, rollback
        self.sealed_device, self.fixed = checks.sealed_device(sealed_device), fixed
        self.indexes = None if indexes is None else usable_folder(indexes)
        self.check = check
        near = capacity
        if self.sealed_device is not None:
            near = sink + window + rollback + seal + selector.span  # after a seal, room until the next one
            selector.to(self.sealed_device)
        self._keys, self._values = RowBuffer(2, near), RowBuffer(2, near)  # [B,H,N,D]
        self._sealed_keys, self._sealed_values = (RowBuffer(2, capacity, pinned=True) for _ in range(2))  # if apart
        self._sealed_real = RowBuffer(2, capacity)  # [B,H,N] bool, where the sealed rows lie: not padding
        self._positions = RowBuffer(1, near)  # [B,N] int64 on the CPU, in the order of appending; valid if unsealed
        self._queries = Queries(checks.share(selector))
        # What steps on the device read, updated in place: [B] each.
        self._bounds: Bounds | None = None
        self._newest = torch.zeros(0, dtype=torch.int64)
        self._told: tuple[list[int], ...] = ()  # what these hold
        if fixed:
            self._fix(capacity)
        self._forget()

    def _fix(self, capacity: int) -> None:
        span = self.selector.span
        if self.sealed_device is not None or capacity < self.sink + span:
            apart = "" if self.sealed_device is None else f' and sealed_device="{self.sealed_device}"'
            raise ValueError(
                f"fixed=True takes a capacity for the sink and a span, {self.sink + span} rows or more, all on one "
                f"device; got capacity={capacity}{apart}"
            )
        self.selector.fix((capacity - self.sink) // span * span, self.seal_rows // span * span)
        for buffer in (self._keys, self._values, self._positions):
            buffer.fix(capacity)
        self._capacity = capacity

    def _forget(self) -> None:
        self._zones = Zones(0, self.sink, self.sealed_device is not None)
        self._decoded = False
        self._broken = False
        self.latest: Selection | None = None  # the last answer of `search`
        self._shown: Tensor | None = None  # the storage of which the selector has a view
        if not self.fixed:
            self._bounds = None

    # -- what is stored ------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first append."""
        return len(self._zones.count)

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows of each sequence."""
        return torch.tensor(self._zones.count)

    @property
    def sealed(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows that the selector has been shown."""
        return torch.tensor(self._zones.sealed)

    @property
    def keys(self) -> Tensor:
        """`[B,H,N,D]`, a view: N physical rows, at least the sink's. Rows outside `bounds` may hold anything.

        Every row, or with `sealed_device` those of the sink and the recent ones; of a `fixed` cache the whole capacity.
        """
        self._require_rows()
        return self._keys.visible

    @property
    def values(self) -> Tensor:
        """`[B,H,N,D]`, stored as the keys are. A view."""
        self._require_rows()
        return self._values.visible

    @property
    def sealed_keys(self) -> Tensor:
        """`[B,H,N,D]`, a view: the sealed rows in stored order, where they lie."""
        self._require_rows()
        return self._sealed_part(self._keys, self._sealed_keys)

    @property
    def sealed_values(self) -> Tensor:
        """`[B,H,N,D]`, stored as `sealed_keys` are. A view."""
        self._require_rows()
        return self._sealed_part(self._values, self._sealed_values)

    @property
    def sealed_bounds(self) -> Bounds:
        """The zones of `sealed_keys`: no sink, all of it sealed, none recent."""
        return Bounds.of(self.batch, self.sealed_keys.shape[2], device=self.sealed_keys.device)

    def _sealed_part(self, near: RowBuffer, apart: RowBuffer) -> Tensor:
        zones = self._zones
        return apart.data if zones.apart else near.full[:, :, zones.sink : zones.start]

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every stored row, for attention without a selection: in stored order, padding and spare places among them.

        Returns:
            keys, values `[B,H,N,D]` on the cache's device, views unless sealed rows lie apart; `[B,H,N]` bool, which
            places hold a row. The others hold anything.
        """
        self._require_rows()
        zones, heads = self._zones, self._keys.full.shape[1]
        row, base, device = torch.arange(self._keys.rows), zones.start, self._keys.full.device
        count, end = torch.tensor(zones.count)[:, None], torch.tensor(zones.end)[:, None]
        near = (row < count.clamp(max=zones.sink)) | ((row >= base) & (row < end))
        near = near[:, None].expand(-1, heads, -1).to(device)  # [B,H,N]
        sealed = self._sealed_real.data.to(device) if zones.zone else near[:, :, :0]
        real = torch.cat([near[:, :, : zones.sink], sealed, near[:, :, base:]], 2)
        if not (zones.apart and zones.zone):
            return self._keys.data, self._values.data, real
        keys, values = (
            torch.cat([x.data[:, :, :base], y.data.to(device), x.data[:, :, base:]], 2)
            for x, y in ((self._keys, self._sealed_keys), (self._values, self._sealed_values))
        )
        return keys, values, real

    @property
    def positions(self) -> Tensor:
        """`[B]` int64 on the cache's device: position of each sequence's newest token; updated in place."""
        self._require_rows()
        return self._newest

    @property
    def bounds(self) -> Bounds:
        """The zones of `keys`, on the cache's device; updated in place as rows come. With `sealed_device`, the sealed
        zone there is empty."""
        self._require_rows()
        assert self._bounds is not None
        return self._bounds

    def _require_rows(self) -> None:
        if self._broken:
            raise RuntimeError(f"{self.selector!r} failed while rows were sealed, so this cache is void: reset() it")
        if self.batch == 0:
            raise RuntimeError("the cache is empty: append a prefill first")

    # -- storing ---------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, queries: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Stores new rows behind those that are there. Never copies what is stored (growth apart).

        Args:
            keys, values: `[B,H,n,D]`, keys after RoPE.
            queries: `[B,H,G,n,D]` of the same tokens, if the selector has a `queries_share`; ignored otherwise. Those
                of sampled rows (`queries.sampled`) are kept until their rows are sealed.
            positions: `[B,n]` integers, rising along real rows; a negative one marks padding, which is not stored.
                Default: no padding, counting on from the newest row.

        Raises:
            ValueError: shapes, dtypes or devices that do not fit what is stored; NaN or infinite keys, values or
                queries (on a GPU, single rows are checked when they are sealed, not at every step); missing queries; a
                selector that serves another cache; more rows than a `fixed` cache has. Nothing is stored then.
        """
        first = self.batch == 0
        if first:
            checks.unused(self.selector)
            checks.reachable(self.selector, keys.device, self.sealed_device)
        else:
            self._require_rows()
        checks.rows(keys, values, self._keys.full if self._keys.allocated else None)
        checks.repeatable(keys, "storing rows")
        batch, _, new, _ = keys.shape
        if self._queries.share:
            checks.queries(queries, keys, self.selector, None if first else self._queries.full)
        zones = Zones(batch, self.sink, self._zones.apart) if first else self._zones
        at = None if positions is None else checks.positions(positions, batch, new, zones.next)
        if self.fixed:
            counts = [new] * batch if at is None else (at >= 0).sum(1).tolist()
            zones.require_room(counts, self._capacity, self.selector.span)
        self._zones = zones
        if first and zones.apart:
            for apart in (self._sealed_keys, self._sealed_values):
                apart.resize(0, keys[:, :, :0].to(self.sealed_device))
        self._store(keys, values, queries, at)

    def append_from(self, other: KVCache) -> None:
        """Stores the rows of another cache, which has sealed none and has no sink, and the queries it holds of them.

        So one prefill serves many selectors: `other` is not changed.

        Raises:
            ValueError: rows are sealed or a sink is kept apart in `other`, this selector learns from queries of which
                `other` holds no full set, or what `append` refuses.
        """
        other._require_rows()
        if other.sink or other._zones.zone:
            raise ValueError(
                f"rows are copied from a cache without sink and sealed rows, got a sink of {other.sink} and sealed "
                f"rows {other._zones.sealed}"
            )
        if self._queries.share and other._queries.share < 1:
            raise ValueError(
                f"{self.selector!r} learns from queries, and the cache to copy from holds {other._queries.share:g} of "
                f"them; it must hold all"
            )
        ends = torch.tensor(other._zones.end)[:, None]
        beyond = torch.arange(other._keys.rows) >= ends  # [B,N] behind a shorter sequence
        keys, values, queries = other._keys.data, other._values.data, None
        if bool(beyond.any()):
            hidden = beyond[:, None, :, None].to(keys.device)
            keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
        if self._queries.share:
            queries = other._queries.data
            if bool(beyond.any()):
                queries = queries.masked_fill(beyond[:, None, None, :, None].to(keys.device), 0.0)
        self.append(keys, values, queries, other._positions.data.masked_fill(beyond, -1))

    def _store(self, keys: Tensor, values: Tensor, queries: Tensor | None, at: Tensor | None) -> None:
        """Stores rows at positions `at` `[B,n]`, negative for padding; None: each sequence counts on."""
        zones, (batch, _, new, _), device = self._zones, keys.shape, keys.device
        counts, first, place, number = [new] * batch, zones.behind(new), None, None
        if at is None:
            at = torch.tensor(zones.next)[:, None]
            at, following = at + torch.arange(new) if new != 1 else at, [next + new for next in zones.next]
        else:
            counts = (at >= 0).sum(1).tolist()
            newest = at.amax(1).tolist() if new else [-1] * batch
            following = [max(held, last + 1) for held, last in zip(zones.next, newest, strict=True)]
            first = first if min(counts) == new else None
        if first is None or (queries is not None and self._queries.share):
            number = torch.tensor(zones.count)[:, None] + torch.cumsum(at >= 0, 1) - 1  # [B,n] in its sequence
            place = zones.place(number) if first is None else None
        zones.add(counts, following)
        stored = ((self._keys, keys, 2), (self._values, values, 2), (self._positions, at, 1))
        end = max(zones.end)
        for buffer, rows, _ in stored:
            buffer.resize(end, rows)
        if first is not None:
            for buffer, rows, dim in stored:
                buffer.full.narrow(dim, first, new).copy_(rows)
        elif place is not None:
            for b in range(batch):
                real = (at[b] >= 0).nonzero()[:, 0]
                target = place[b][real]
                self._positions.full[b].index_copy_(0, target, at[b][real])
                target, real = target.to(device), real.to(device)
                for buffer, rows in ((self._keys, keys), (self._values, values)):
                    buffer.full[b].index_copy_(1, target, rows[b].index_select(1, real))
        if queries is not None and number is not None and self._queries.share:
            self._queries.store(queries, at.masked_fill(number < self.sink, -1))  # no selector sees the sink
        self._publish()

    def _publish(self) -> None:
        """Brings what the device reads, and the selector's view of the stored keys, up to date."""
        zones, device = self._zones, self._keys.full.device
        told = (
            [min(count, self.sink) for count in zones.count],
            [zones.start] * len(zones.count),
            zones.end,
            [next - 1 for next in zones.next],
        )
        held = None if self._bounds is None else self._bounds.rows
        if held is None or len(held) != len(zones.count) or held.device != device:
            sink, sealed, end = (torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in told[:3])
            self._bounds = Bounds(sink, self.sink, sealed, end)
            self._newest = torch.tensor(told[3]).to(device)
        elif self._bounds is not None:
            parts = (self._bounds.sink, self._bounds.sealed, self._bounds.rows, self._newest)
            for part, numbers, before in zip(parts, told, self._told, strict=True):
                if numbers == before:
                    continue
                if len(set(numbers)) == 1:
                    part.fill_(numbers[0])
                else:
                    part.copy_(torch.tensor(numbers, dtype=part.dtype), non_blocking=True)
        self._told = told
        storage = self._sealed_keys.full if zones.apart else self._keys.full
        stored, places = self.selector.stored, storage.shape[2] - self.sink if self.fixed else zones.zone
        if stored is None or self._shown is not storage or stored.shape[2] != places:
            part = storage[:, :, self.sink :] if self.fixed else self._sealed_part(self._keys, self._sealed_keys)
            self.selector.stored, self._shown = part, storage

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Shows the selector the rows that have left the window, if it is time; `select` and `decode` call it.

        The first call seals every row before the window, later ones when `seal` rows wait; always whole spans. If the
        selector raises, the cache is void until `reset`.
        """
        self._require_rows()
        least = self.seal_rows if self._decoded else 1
        each = self._zones.due(self.window + self.rollback, least, self.selector.span)
        if max(each):
            checks.repeatable(self._keys.full, "sealing rows")
        self._decoded = True
        if max(each) == 0:
            return
        self._broken = True
        self._seal(each)
        self._broken = False

    def _seal(self, each: list[int]) -> None:
        zones, most = self._zones, max(each)
        padding = torch.arange(most) >= torch.tensor(each)[:, None]
        positions = self._positions.full[:, zones.start : zones.start + most].masked_fill(padding, -1)  # [B,n]
        if zones.apart:
            self._move_apart(each)
        else:
            self._make_room(each)
        zones.seal(each)
        new = slice(zones.zone - most, zones.zone)
        keys = self._sealed_part(self._keys, self._sealed_keys)[:, :, new]
        values = self._sealed_part(self._values, self._sealed_values)[:, :, new]
        if self._keys.full.is_cuda:
            checks.finite(keys=keys, values=values)
        queries, sampled = self._take_queries(positions)
        if queries is not None and self._keys.full.is_cuda:
            checks.finite(queries=queries)
        self._sealed_real.append((~padding).to(keys.device)[:, None].expand(-1, keys.shape[1], -1))
        rows = Rows(keys, values, positions.to(keys.device), queries, sampled)
        if self.indexes is not None and zones.zone == most:  # the prompt's, not what decoding adds
            order = append_kept(self.selector, rows, self.indexes)
        else:
            order = self.selector.append(rows)
        if order is not None:
            self._arrange(order, most)
        self._publish()

    def _arrange(self, order: Tensor, new: int) -> None:
        """Stores the last sealed rows in a selector's `order` `[B,H,m]`: the `new` ones, and others if m is more."""
        keys = self._sealed_part(self._keys, self._sealed_keys)
        values = self._sealed_part(self._values, self._sealed_values)
        checks.order(order, keys, new)
        for rows in (keys, values, self._sealed_real.data[..., None]):
            moved = rows[:, :, rows.shape[2] - order.shape[2] :]
            moved.copy_(moved.gather(2, order[..., None].expand_as(moved)))

    def _make_room(self, each: list[int]) -> None:
        """Where sequence b seals fewer rows than others, moves its later rows behind the zone and zeros the gap."""
        low, most = self._zones.start, max(each)
        later_rows = [recent - sealed for recent, sealed in zip(self._zones.recent, each, strict=True)]
        end = low + most + max(later_rows)
        buffers = (self._keys, self._values, self._positions)
        for buffer in buffers:
            buffer.resize(end, buffer.full)
        for b, (sealed, left) in enumerate(zip(each, later_rows, strict=True)):
            if sealed == most:
                continue
            for buffer in buffers:
                rows = buffer.full[b].movedim(buffer.dim - 1, 0)  # [N,...]
                later = rows[low + sealed : low + sealed + left].clone()
                rows[low + sealed : low + most] = 0
                rows[low + most : low + most + left] = later

    def _move_apart(self, each: list[int]) -> None:
        """Copies the rows that seal behind the sealed ones, zeros their padding, and keeps the rest in new storage."""
        zones, most = self._zones, max(each)
        low, zone = zones.start, zones.zone
        later_rows = [recent - sealed for recent, sealed in zip(zones.recent, each, strict=True)]
        end = low + max(later_rows)
        for near, apart in ((self._keys, self._sealed_keys), (self._values, self._sealed_values)):
            apart.resize(zone + most, apart.full)
            for b, rows in enumerate(each):
                for h in range(near.full.shape[1]):  # a head is contiguous, so that no other copy is made on the device
                    apart.full[b, h, zone : zone + rows].copy_(near.full[b, h, low : low + rows])
                apart.full[b, :, zone + rows : zone + most] = 0
        for buffer in (self._keys, self._values, self._positions):
            held = buffer.full
            buffer.reset()
            buffer.resize(end, held)
            for b, (rows, left) in enumerate(zip(each, later_rows, strict=True)):
                source, target = (x[b].movedim(buffer.dim - 1, 0) for x in (held, buffer.full))  # [N,...]
                target[:low] = source[:low]
                target[low : low + left] = source[low + rows : low + rows + left]

    def _take_queries(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The sampled queries `[B,H,G,m,D]` of the rows being sealed and their positions `[B,m]`, where those lie."""
        if not self._queries.share:
            return None, None
        queries, at = self._queries.hand_over(positions)
        if self.sealed_device is not None and queries.device != self.sealed_device:
            there = torch.empty(queries.shape, dtype=queries.dtype, device=self.sealed_device)
            for b in range(queries.shape[0]):
                for h in range(queries.shape[1]):
                    there[b, h].copy_(queries[b, h])
            queries = there
        return queries, at.to(queries.device)

    # -- reading -----------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, budget: Budget) -> Selection:
        """Seals what is due and asks the selector for at most `budget` rows per head; see `sparseattn.decode`.

        The selection lies with the sealed rows, on `sealed_device` if there is one: it names rows of `sealed_keys`
        then, not of `keys`, and `decode` is what attends to both parts and merges them.
        """
        rows = self.prepare(query, budget)
        return self.search(query if self.sealed_device is None else query.to(self.sealed_device), rows)

    def prepare(self, query: Tensor, budget: Budget) -> int:
        """The first half of `select`: checks both, seals what is due, and returns the budget in rows."""
        self._require_rows()
        checks.query(query, self._keys.full)
        if not query.is_cuda:
            checks.finite(query=query)
        if self.fixed and not self._zones.zone and checks.capturing(query):
            raise RuntimeError("nothing is sealed yet: capture a CUDA graph of a step when something is")
        if self._queries.share:
            checks.group(query, self._queries.full)
        context = self._capacity if self.fixed and budget is None else max(self._zones.count)
        rows = budget_rows(budget, context, self.selector.span, self.selector)
        self.seal()
        # More rows than there are, or can be, change nothing but the number of slots.
        return min(rows, max(self._capacity if self.fixed else context, self.selector.span))

    def search(self, query: Tensor, rows: int) -> Selection:
        """The second half: at most `rows` rows per head for a query `[B,H,G,D]` on the device of the sealed rows.

        Raises:
            ContractError: with `check`, a selection that the contract does not allow.
        """
        at = self.positions if self.sealed_device is None else torch.tensor(self._zones.next) - 1
        self.latest = self.selector.select(query, at, rows)
        if self.check:
            zones = self._zones
            padded = any(sealed < zones.zone for sealed in zones.sealed)
            real = self._sealed_real.data if padded else None
            contract.check(self.latest, query, at, rows, zones.zone, real, self.selector)
        return self.latest

    # -- editing -----------------------------------------------------------------------------------------------------

    def crop(self, drop: int | Tensor) -> None:
        """Forgets the newest rows of every sequence, as speculative decoding does with rejected tokens.

        Args:
            drop: rows, an int for all sequences or int64 `[B]`.

        Raises:
            ValueError: `drop` reaches into sealed rows, which never change: construct the cache with a larger
                `rollback`.
        """
        self._require_rows()
        checks.repeatable(self._keys.full, "dropping rows")
        zones = self._zones
        gone: list[int] = torch.as_tensor(drop, dtype=torch.int64, device="cpu").expand(self.batch).tolist()
        before = zones.end
        first = zones.crop(gone)
        zones.next = [  # the next token takes the position of the first one dropped
            int(self._positions.full[b, place]) if rows else held
            for b, (rows, place, held) in enumerate(zip(gone, first, zones.next, strict=True))
        ]
        if self._queries.share:
            row = torch.arange(min(zones.end), max(before))
            kept = (row < torch.tensor(zones.end)[:, None]) | (row >= torch.tensor(before)[:, None])
            self._queries.drop(self._positions.full[:, row].masked_fill(kept, -1))
        for buffer in (self._keys, self._values, self._positions):
            buffer.resize(max(zones.end), buffer.full)
        self._publish()

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was (beam search); `index` `[B']` may repeat and omit.

        ValueError where the storage is `fixed` and B' is not B.
        """
        self._require_rows()
        checks.repeatable(self._keys.full, "reordering sequences")
        if index.ndim != 1 or index.dtype != torch.int64 or not bool(((index >= 0) & (index < self.batch)).all()):
            raise ValueError(f"reorder takes int64 [B'] indices below the batch of {self.batch}, got {index}")
        for buffer in self._buffers():
            buffer.take(index)
        self._zones.take(index.tolist())
        self.selector.reorder(index if self.sealed_device is None else index.to(self.sealed_device))
        self._publish()

    def clone(self) -> KVCache:
        """An independent copy, selector included."""
        twin = copy.copy(self)
        twin.selector = self.selector.clone()
        twin._zones = copy.copy(self._zones)  # its counts are replaced, never changed in place
        for name in self._BUFFERS:
            setattr(twin, name, getattr(self, name).clone())
        twin._bounds = None
        if self.batch:
            twin._publish()
        return twin

    def reset(self) -> None:
        """Forgets every row, the selector's too, and frees the storage unless it is fixed; the configuration stays."""
        for buffer in self._buffers():
            buffer.reset()
        self.selector.reset()
        self._forget()

    def to(self, device: torch.device | str) -> KVCache:
        """Moves storage and selector, and returns the cache; what lies on `sealed_device` stays there.

        Raises:
            ValueError: a selector that works in host memory only, and no `sealed_device`.
        """
        checks.reachable(self.selector, torch.device(device), self.sealed_device)
        for buffer in (self._keys, self._values, self._queries):
            buffer.to(device)
        if self.sealed_device is None:
            self.selector.to(device)
            self._sealed_real.to(device)
        if self.batch:
            self._publish()
        return self

    _BUFFERS = ("_keys", "_values", "_sealed_keys", "_sealed_values", "_sealed_real", "_positions", "_queries")

    def _buffers(self) -> list[RowBuffer]:
        return [getattr(self, name) for name in self._BUFFERS]

    def __repr__(self) -> str:
        apart = "" if self.sealed_device is None else f", sealed_device={str(self.sealed_device)!r}"
        apart += f", capacity={self._capacity}, fixed=True" if self.fixed else ""
        return (
            f"KVCache({self.selector!r}, sink={self.sink}, window={self.window}, seal={self.seal_rows}, "
            f"rollback={self.rollback}{apart}): {self.batch} sequences of {self._zones.count} rows"
        )
