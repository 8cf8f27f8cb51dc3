"""Where the rows of a cache lie: sink | sealed | recent on one device, or the sealed ones apart, in host memory or in a
few bits.

Rows are stored, moved into the sealed zone, ordered, dropped and read here; when that happens is `KVCache`'s matter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.layout import Zones
from sparseattn.cache.quantized_rows import SealedCodes
from sparseattn.cache.query_buffers import LastQueries, Queries
from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.core.selection import Bounds
from sparseattn.selectors.base import Rows


class StoredRows:
    """Keys, values and positions of B sequences and H heads, and the queries that wait until rows are sealed.

    Args:
        sink: first rows of each sequence, kept apart from the sealed ones.
        near: rows to allocate at once on the cache's own device.
        capacity: sealed rows to allocate at once where they lie.
        apart: the device of the sealed rows; None: between sink and recent rows.
        share: of the queries to keep, 0 to 1.
        last: how many of the prompt's newest queries the first seal hands over.
        codes: what keeps the sealed rows in a few bits, apart from the others; None: they are kept as they come.
        exact: whether sealed rows are kept as they come too, where there are codes of them.

    Attributes:
        zones: which row lies where, as counts.
        newest: `[B]` int64 on the cache's device, the position of each sequence's newest token; updated in place.
    """

    def __init__(
        self,
        sink: int,
        near: int,
        capacity: int,
        apart: torch.device | None,
        share: float,
        last: int,
        codes: SealedCodes | None = None,
        exact: bool = False,
    ) -> None:
        self.sink, self.apart, self.codes, self.exact = sink, apart, codes, exact
        self.keys, self.values = RowBuffer(2, near), RowBuffer(2, near)  # [B,H,N,D]
        # With codes, the rows of a seal until they are rounded, and then only where they are kept too.
        own = capacity if codes is None or exact else 0
        self.apart_keys, self.apart_values = (RowBuffer(2, own, pinned=apart is not None) for _ in range(2))
        # [B,H,N] bool, where the sealed rows lie: neither padding nor known to be dropped by the selector.
        self.real = RowBuffer(2, capacity)
        # [B,N] bool: of these, by place, those that are no padding in any head; what a step's selector sees.
        self.valid = RowBuffer(1, capacity, spare=False)
        self.positions = RowBuffer(1, near)  # [B,N] int64 on the CPU, in the order of appending; valid if unsealed
        self.queries, self.last = Queries(share), LastQueries(last)
        # What steps on the device read, updated in place: [B] each.
        self._bounds: Bounds | None = None
        self.newest = torch.zeros(0, dtype=torch.int64)
        self._told: tuple[list[int], ...] = ()  # what these hold
        self.fixed = self.dropped = False  # whether `drop` has taken a row
        self.zones = self._no_zones()

    _BUFFERS = (
        "keys",
        "values",
        "apart_keys",
        "apart_values",
        "real",
        "valid",
        "positions",
        "queries",
        "last",
        "codes",
    )

    def _buffers(self) -> dict[str, State]:
        return {name: state for name in self._BUFFERS if (state := getattr(self, name)) is not None}

    def _no_zones(self) -> Zones:
        return Zones(0, self.sink, self.apart is not None or self.codes is not None)

    @property
    def there(self) -> torch.device:
        """Where the sealed rows lie."""
        return self.apart or self.device

    @property
    def _near(self) -> tuple[RowBuffer, RowBuffer, RowBuffer]:
        """The buffers whose rows lie alike."""
        return self.keys, self.values, self.positions

    def fix(self, capacity: int, sealed: int) -> None:
        """Allocates `capacity` rows a sequence, of which `sealed` may be sealed, at the first append and never again
        (`RowBuffer.fix`)."""
        for buffer in self._near:
            buffer.fix(capacity)
        self.valid.fix(sealed)
        self.fixed = True

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Tensor | None:
        """`[B,H,N,D]`, the storage of the keys on the cache's own device; None before the first row."""
        return self.keys.full if self.keys.allocated else None

    @property
    def device(self) -> torch.device:
        """The cache's own."""
        return self.keys.full.device

    @property
    def bounds(self) -> Bounds:
        """The zones of `keys`, updated in place."""
        assert self._bounds is not None
        return self._bounds

    def sealed_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B,H,N,D]` of the sealed rows in stored order, where they lie: views, but read back anew
        where only their codes are kept."""
        zones = self.zones
        if self.codes is not None and zones.zone and not self.exact:
            return self.codes.last(zones.zone, self.keys.full.dtype)
        near, apart = (self.keys, self.values), (self.apart_keys, self.apart_values)
        if self.codes is not None and not zones.zone:
            none = self.keys.full[:, :, :0].to(self.there)
            return none, none
        keys, values = (
            far.data if zones.apart else own.full[:, :, zones.sink : zones.start]
            for own, far in zip(near, apart, strict=True)
        )
        return keys, values

    @property
    def sealed_real(self) -> Tensor | None:
        """`[B,H,N]` bool, which of the sealed rows are neither padding nor known to be dropped; None: all."""
        zones = self.zones
        whole = not self.dropped and all(sealed == zones.zone for sealed in zones.sealed)
        return None if whole else self.real.data

    @property
    def wants_queries(self) -> bool:
        """Whether rows that are stored now come with their queries."""
        return self.queries.share > 0 or (self.last.wanted > 0 and not self.zones.zone)

    @property
    def learned(self) -> Tensor | None:
        """`[B,H,G,m,D]`, queries that are kept; None where there are none to compare others with."""
        kept = next((buffer for buffer in (self.queries, self.last) if buffer.allocated), None)
        return None if kept is None else kept.full

    def indexed(self) -> tuple[Tensor, int]:
        """The storage of the keys that a selector may read, and how many rows of it: all behind the sink if fixed."""
        storage = self.apart_keys.full if self.zones.apart else self.keys.full
        return storage, storage.shape[2] - self.sink if self.fixed else self.zones.zone

    def shown(self) -> Tensor:
        """`[B,H,N,D]`, a view: these rows."""
        return self.keys.full[:, :, self.sink :] if self.fixed else self.sealed_rows()[0]

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every stored row: keys, values `[B,H,N,D]`, and `[B,H,N]` bool, which places hold one (`KVCache`)."""
        zones, heads = self.zones, self.keys.full.shape[1]
        row, base = torch.arange(self.keys.rows), zones.start
        count, end = torch.tensor(zones.count)[:, None], torch.tensor(zones.end)[:, None]
        near = (row < count.clamp(max=zones.sink)) | ((row >= base) & (row < end))
        near = near[:, None].expand(-1, heads, -1).to(self.device)  # [B,H,N]
        sealed = self.real.data.to(self.device) if zones.zone else near[:, :, :0]
        real = torch.cat([near[:, :, : zones.sink], sealed, near[:, :, base:]], 2)
        if not (zones.apart and zones.zone):
            return self.keys.data, self.values.data, real
        keys, values = (
            torch.cat([x.data[:, :, :base], y.to(self.device), x.data[:, :, base:]], 2)
            for x, y in zip((self.keys, self.values), self.sealed_rows(), strict=True)
        )
        return keys, values, real

    def copied(self, queries_too: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """What another cache appends to hold the same rows, of which none are sealed or of a sink.

        Returns:
            keys, values `[B,H,N,D]`; with `queries_too`, where all are kept, the queries `[B,H,G,N,D]`; positions
            `[B,N]`, -1 for padding.
        """
        beyond = torch.arange(self.keys.rows) >= torch.tensor(self.zones.end)[:, None]  # [B,N] behind a shorter one
        keys, values = self.keys.data, self.values.data
        queries = self.queries.data if queries_too else None
        if bool(beyond.any()):
            hidden = beyond[:, None, :, None].to(keys.device)
            keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
            queries = None if queries is None else queries.masked_fill(hidden[:, :, None], 0.0)
        return keys, values, queries, self.positions.data.masked_fill(beyond, -1)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows stored: `kv`, and the `books` kept of them (positions, what is real, queries); with codes
        `exact`, of the same rows as they came, where these are kept too."""
        kv = self.keys.nbytes + self.values.nbytes
        apart, more = self.apart_keys.nbytes + self.apart_values.nbytes, {}
        if self.codes is None:
            kv += apart
        else:
            kv, more = kv + self.codes.nbytes, {"exact": apart} if self.exact else {}
        books = (self.positions, self.real, self.valid, self.queries, self.last)
        return {"kv": kv, "books": sum(buffer.nbytes for buffer in books)} | more

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(self, zones: Zones, keys: Tensor) -> None:
        """Takes the zones of a new batch, whose first rows are `keys` `[B,H,n,D]`."""
        self.zones = zones
        self.positions.resize(0, torch.empty(len(keys), 0, dtype=torch.int64))
        if zones.apart:
            for buffer in (self.apart_keys, self.apart_values):
                buffer.resize(0, keys[:, :, :0].to(self.apart or keys.device))

    def store(self, keys: Tensor, values: Tensor, queries: Tensor | None, at: Tensor | None, spare: int) -> None:
        """Stores rows at positions `at` `[B,n]`, negative for padding; None: each sequence counts on.

        `spare`: so many of the newest rows may be dropped again before the first seal.
        """
        zones, (batch, _, new, _) = self.zones, keys.shape
        before, counts, first, place, number = zones.next, [new] * batch, zones.behind(new), None, None
        learns = queries is not None and self.wants_queries
        if at is None:
            following = [next + new for next in before]
            if new != 1 or first is None or learns:  # a token's position needs no tensor
                at = torch.tensor(before)[:, None] + torch.arange(new)
        else:
            counts = (at >= 0).sum(1).tolist()
            newest = at.amax(1).tolist() if new else [-1] * batch
            following = [max(held, last + 1) for held, last in zip(before, newest, strict=True)]
            first = first if min(counts) == new else None
        if at is not None and (first is None or learns):
            number = torch.tensor(zones.count)[:, None] + torch.cumsum(at >= 0, 1) - 1  # [B,n] in its sequence
            place = zones.place(number) if first is None else None
        zones.add(counts, following)
        end = max(zones.end)
        for buffer, rows in ((self.keys, keys), (self.values, values)):
            buffer.resize(end, rows)
            if first is not None:
                buffer.full.narrow(2, first, new).copy_(rows)
        self.positions.resize(end, self.positions.full)
        if first is not None:
            if at is None:
                _write(self.positions.full.select(1, first), before)
            else:
                self.positions.full.narrow(1, first, new).copy_(at)
        elif at is not None and place is not None:
            for b in range(batch):
                real = (at[b] >= 0).nonzero()[:, 0]
                target = place[b][real]
                self.positions.full[b].index_copy_(0, target, at[b][real])
                target, real = target.to(keys.device), real.to(keys.device)
                for buffer, rows in ((self.keys, keys), (self.values, values)):
                    buffer.full[b].index_copy_(1, target, rows[b].index_select(1, real))
        if queries is not None and at is not None and number is not None and learns:
            if self.queries.share:
                self.queries.store(queries, at.masked_fill(number < self.sink, -1))  # no selector sees the sink
            if self.last.wanted and not zones.zone:
                self.last.store(queries, at, spare)
        self.publish()

    def publish(self) -> None:
        """Brings what the device reads up to date."""
        zones = self.zones
        told = (
            [min(count, self.sink) for count in zones.count],
            [zones.start] * len(zones.count),
            zones.end,
            [next - 1 for next in zones.next],
        )
        held = None if self._bounds is None else self._bounds.rows
        if held is None or len(held) != len(zones.count) or held.device != self.device:
            sink, sealed, end = (torch.tensor(numbers, dtype=torch.int32).to(self.device) for numbers in told[:3])
            self._bounds = Bounds(sink, self.sink, sealed, end)
            self.newest = torch.tensor(told[3]).to(self.device)
        elif self._bounds is not None:
            parts = (self._bounds.sink, self._bounds.sealed, self._bounds.rows, self.newest)
            for part, numbers, before in zip(parts, told, self._told, strict=True):
                if numbers != before:
                    _write(part, numbers)
        self._told = told

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self, each: list[int], decoded: int) -> Rows:
        """Moves the oldest `each` unsealed rows of every sequence into the sealed zone and returns them, as views that
        hold until `settle`.

        Args:
            decoded: how many of the newest rows of a sequence are no part of the prompt, 1 at a step of decoding.

        Raises:
            ValueError: NaN or infinite rows or queries on a GPU, where single rows were not looked at before.
        """
        zones, most, first = self.zones, max(each), not self.zones.zone
        padding = torch.arange(most) >= torch.tensor(each)[:, None]
        positions = self.positions.full[:, zones.start : zones.start + most].masked_fill(padding, -1)  # [B,n]
        if zones.apart:
            self._move_apart(each)
        else:
            self._make_room(each)
        zones.seal(each)
        keys, values = (rows[:, :, rows.shape[2] - most :] for rows in self._unrounded())
        if self.keys.full.is_cuda:
            input_checks.finite(keys=keys, values=values)
        queries, sampled = self._take_queries(positions)
        if queries is not None and self.keys.full.is_cuda:
            input_checks.finite(queries=queries)
        last = self._take_last(decoded) if first and self.last.wanted else ()
        valid = (~padding).to(keys.device)
        self.real.append(valid[:, None].expand(-1, keys.shape[1], -1))
        self.valid.append(valid)
        return Rows(keys, values, positions.to(keys.device), queries, sampled, *last)

    def _unrounded(self) -> tuple[Tensor, Tensor]:
        """Sealed rows as they came: all, or with codes the last that are there so."""
        return self.sealed_rows() if self.codes is None else (self.apart_keys.data, self.apart_values.data)

    def settle(self, order: Tensor | None, new: int) -> None:
        """Stores the last sealed rows in a selector's `order` `[B,H,m]`: the `new` ones, and others if m is more; None:
        as they are. Then rounds them, if they are kept in a few bits: the new ones from what they came as, others from
        what their codes stand for, so that those are rounded once more.

        Raises:
            ValueError: no permutation of so many rows, or one that cuts a group of rows of few bits.
        """
        if order is not None:
            input_checks.order(order, self.real.data, new)
        if self.codes is not None:
            self._round(order, new)
        if order is not None:
            kept = self._unrounded() if self.codes is None or self.exact else ()
            for rows in (*kept, self.real.data[..., None]):
                moved = rows[:, :, rows.shape[2] - order.shape[2] :]
                moved.copy_(moved.gather(2, order[..., None].expand_as(moved)))
            first = self.real.rows - order.shape[2]
            self.valid.data[:, first:] = self.real.data[:, :, first:].any(1)
        if self.codes is not None and not self.exact:
            self.apart_keys.reset()
            self.apart_values.reset()

    def _round(self, order: Tensor | None, new: int) -> None:
        assert self.codes is not None
        rows = [part[:, :, part.shape[2] - new :] for part in self._unrounded()]
        more = 0 if order is None else order.shape[2] - new
        if more:
            read = self.codes.last(more, rows[0].dtype)
            rows = [torch.cat(parts, 2) for parts in zip(read, rows, strict=True)]
        if order is not None:
            rows = [part.gather(2, order[..., None].expand_as(part)) for part in rows]
        keys, values = rows
        self.codes.store(keys, values, self.codes.rows - more)

    def _make_room(self, each: list[int]) -> None:
        """Where sequence b seals fewer rows than others, moves its later rows behind the zone and zeros the gap."""
        low, most = self.zones.start, max(each)
        later_rows = [recent - sealed for recent, sealed in zip(self.zones.recent, each, strict=True)]
        end = low + most + max(later_rows)
        for buffer in self._near:
            buffer.resize(end, buffer.full)
        for b, (sealed, left) in enumerate(zip(each, later_rows, strict=True)):
            if sealed == most:
                continue
            for buffer in self._near:
                rows = buffer.full[b].movedim(buffer.dim - 1, 0)  # [N,...]
                later = rows[low + sealed : low + sealed + left].clone()
                rows[low + sealed : low + most] = 0
                rows[low + most : low + most + left] = later

    def _move_apart(self, each: list[int]) -> None:
        """Copies the rows that seal behind the sealed ones, zeros their padding, and keeps the rest in new storage."""
        zones, most = self.zones, max(each)
        low = zones.start
        later_rows = [recent - sealed for recent, sealed in zip(zones.recent, each, strict=True)]
        end = low + max(later_rows)
        for near, apart in ((self.keys, self.apart_keys), (self.values, self.apart_values)):
            zone = apart.rows
            apart.resize(zone + most, near.full[:, :, :0].to(self.there))
            for b, rows in enumerate(each):
                for h in range(near.full.shape[1]):  # a head is contiguous, so that no other copy is made on the device
                    apart.full[b, h, zone : zone + rows].copy_(near.full[b, h, low : low + rows])
                apart.full[b, :, zone + rows : zone + most] = 0
        for buffer in self._near:
            held = buffer.full
            buffer.reset()
            buffer.resize(end, held)
            for b, (rows, left) in enumerate(zip(each, later_rows, strict=True)):
                source, target = (x[b].movedim(buffer.dim - 1, 0) for x in (held, buffer.full))  # [N,...]
                target[:low] = source[:low]
                target[low : low + left] = source[low + rows : low + rows + left]

    def _take_queries(self, positions: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The sampled queries `[B,H,G,m,D]` of the rows being sealed and their positions `[B,m]`, where those lie."""
        if not self.queries.share:
            return None, None
        queries, at = self.queries.hand_over(positions)
        if self.apart is not None and queries.device != self.apart:
            there = torch.empty(queries.shape, dtype=queries.dtype, device=self.apart)
            for b in range(queries.shape[0]):
                for h in range(queries.shape[1]):
                    there[b, h].copy_(queries[b, h])
            queries = there
        return queries, at.to(queries.device)

    def _take_last(self, decoded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The prompt's last queries and what `Rows` says of its rows that are not sealed, where the sealed ones lie."""
        zones, device = self.zones, self.there
        queries, at = self.last.hand_over(decoded)
        if queries.is_cuda:
            input_checks.finite(queries=queries)
        count = (torch.tensor(zones.count) - decoded).clamp(min=0)[:, None]  # [B,1]
        sink = count.clamp(max=zones.sink)
        recent = (count - sink - torch.tensor(zones.sealed)[:, None]).clamp(min=0)
        row = torch.cat([torch.arange(zones.sink), torch.arange(zones.start, zones.start + int(recent.max()))])  # [u]
        real = (row < sink) | ((row >= zones.start) & (row < zones.start + recent))  # [B,u]
        positions = self.positions.full[:, row].masked_fill(~real, -1)
        keys = self.keys.full.index_select(2, row.to(self.device))
        keys = keys.masked_fill(~real.to(self.device)[:, None, :, None], 0)
        return queries.to(device), at.to(device), keys.to(device), positions.to(device)

    # -- editing -----------------------------------------------------------------------------------------------------

    def drop(self, held: Tensor) -> None:
        """Notes that of the sealed rows the selector holds `held` `[B,H,N]` bool, and no other ever again."""
        self.real.data.logical_and_(held)
        self.dropped = True

    def compact(self, ids: Tensor) -> None:
        """Of the sealed places only `ids` `[B,H,K]` int64 stay, in that order; the storage of the others is freed."""
        zones = self.zones
        low, start, kept = zones.sink, zones.start, ids.shape[2]
        self.real.keep(ids)
        valid = self.real.data.any(1)
        self.valid.reset()
        self.valid.append(valid)
        if zones.apart:
            self.apart_keys.keep(ids)
            self.apart_values.keep(ids)
        else:
            self.keys.keep(ids, low, start)
            self.values.keep(ids, low, start)
            self.positions.keep(ids[:, 0], low, start)  # of sealed rows any will do
        zones.free(zones.zone - kept)
        self.publish()

    def crop(self, gone: Sequence[int]) -> None:
        """Forgets the newest `gone` rows of each sequence; ValueError where those are sealed, or the last queries go
        that a first seal is to hand over."""
        zones, before = self.zones, self.zones.end
        if self.last.allocated:
            self.last.require(gone, zones.count)
        first = zones.crop(gone)
        zones.next = [  # the next token takes the position of the first one dropped
            int(self.positions.full[b, place]) if rows else held
            for b, (rows, place, held) in enumerate(zip(gone, first, zones.next, strict=True))
        ]
        if self.last.allocated:
            self.last.drop(gone)
        if self.queries.share:
            row = torch.arange(min(zones.end), max(before))
            kept = (row < torch.tensor(zones.end)[:, None]) | (row >= torch.tensor(before)[:, None])
            self.queries.drop(self.positions.full[:, row].masked_fill(kept, -1))
        for buffer in self._near:
            buffer.resize(max(zones.end), buffer.full)
        self.publish()

    def take(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was; ValueError where fixed storage has another batch."""
        for state in self._buffers().values():
            state.take(index)
        self.zones.take(index.tolist())
        self.publish()

    def clone(self) -> StoredRows:
        """An independent copy."""
        twin = copy.copy(self)
        twin.zones = copy.copy(self.zones)  # its counts are replaced, never changed in place
        for name, state in self._buffers().items():
            setattr(twin, name, state.clone())
        twin._bounds = None
        if self.zones.count:
            twin.publish()
        return twin

    def reset(self) -> None:
        """Forgets every row, and frees the storage unless it is fixed."""
        for state in self._buffers().values():
            state.reset()
        self.zones = self._no_zones()
        if not self.fixed:
            self._bounds = None
        self.dropped = False

    def to(self, device: torch.device | str) -> None:
        """Moves what does not lie on a device of its own."""
        for state in (self.keys, self.values, self.queries, self.last):
            state.to(device)
        if self.apart is None:
            for sealed in filter(None, (self.real, self.valid, self.codes, self.apart_keys, self.apart_values)):
                sealed.to(device)
        if self.zones.count:
            self.publish()


def _write(part: Tensor, numbers: Sequence[int]) -> None:
    """`part[b] = numbers[b]` of `[B]`, without a tensor of the numbers where they are the same."""
    if len(set(numbers)) == 1:
        part.fill_(numbers[0])
    else:
        part.copy_(torch.tensor(numbers, dtype=part.dtype), non_blocking=True)
