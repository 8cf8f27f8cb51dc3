"""Where the rows of a cache lie: sink | sealed | recent on one device, or the sealed ones apart (`SealedRows`).

Rows are stored, moved into the sealed zone, dropped and read here; when that happens is `KVCache`'s matter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.layout import Zones
from sparseattn.cache.row_moves import keep_recent, make_room, write_apart
from sparseattn.cache.sealed_rows import OfSeal, SealedRows
from sparseattn.cache.waiting_queries import WaitingQueries, Wanted
from sparseattn.codecs.stored import StoredCodes
from sparseattn.core.deal import Deal, Hand
from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.core.selection import Bounds
from sparseattn.kernels.attend_quantized.reference import CodedRows
from sparseattn.selectors.base import Rows
from sparseattn.utils.inference_mode import keeps_tensors

CUT_SHORT = "storing rows was cut short"


class StoredRows:
    """Keys, values and positions of B sequences and H heads, and the queries that wait until rows are sealed.

    Args:
        sink: first rows of each sequence, kept apart from the sealed ones.
        unsealed_rows: rows to allocate at once on the cache's own device.
        sealed: what is kept of sealed rows.
        wanted: queries that wait.
        deal: which sealed rows this process keeps.

    Attributes:
        keys, values: `[B,H,N,D]`, the rows on the cache's own device.
        positions: `[B,N]` int64 on the CPU, in the order of appending; valid if unsealed.
        queries: those that wait.
        zones: which row lies where, as counts.
        bounds: the zones of `keys`, on the cache's device; updated in place.
        newest: `[B]` int64 there, the position of each sequence's newest token; updated in place.
        as_they_came: whether rows are known to lie in the order in which they came; a selector may have ordered them.
        broken: what failed or was interrupted half-way, so that the rows are void; empty: nothing.
    """

    def __init__(self, sink: int, unsealed_rows: int, sealed: SealedRows, wanted: Wanted, deal: Deal) -> None:
        self.sink, self.sealed, self.queries, self.deal = sink, sealed, WaitingQueries(wanted), deal
        self.keys, self.values, self.positions = (
            RowBuffer(2, unsealed_rows),
            RowBuffer(2, unsealed_rows),
            RowBuffer(1, unsealed_rows),
        )
        # What steps on the device read, updated in place: [B] each.
        self.bounds, self.newest = Bounds.of(0, 0), torch.zeros(0, dtype=torch.int64)
        self._written: tuple[list[int], ...] = ()  # what these hold
        self.fixed, self.as_they_came, self.broken = False, True, ""
        self.zones = self._no_zones()

    def _no_zones(self) -> Zones:
        return Zones(0, self.sink, self.sealed.apart)

    @property
    def there(self) -> torch.device:
        """Where the sealed rows lie."""
        return self.sealed.device or self.device

    @property
    def _near(self) -> tuple[RowBuffer, RowBuffer, RowBuffer]:
        """The buffers whose rows lie alike."""
        return self.keys, self.values, self.positions

    def _states(self) -> tuple[State, ...]:
        return (*self._near, *self.sealed.states().values(), *self.queries.states())

    def fix(self, capacity: int, sealed: int) -> None:
        """Allocates `capacity` rows a sequence, of which `sealed` may be sealed, at the first append and never again
        (`RowBuffer.fix`)."""
        for buffer in self._near:
            buffer.fix(capacity)
        self.sealed.valid.fix(sealed)
        self.fixed = True

    # -- reading -----------------------------------------------------------------------------------------------------

    def require(self) -> None:
        """RuntimeError where nothing is stored, or what is stored is void."""
        if self.broken:
            raise RuntimeError(f"{self.broken}, so this cache is void: reset() it")
        if not self.zones.count:
            raise RuntimeError("the cache is empty: append a prefill first")

    @property
    def device(self) -> torch.device:
        """The cache's own."""
        return self.keys.full.device

    def sealed_rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B,H,N,D]` of the sealed rows in stored order, where they lie: views, but read back anew
        where a codec keeps them."""
        zones, unsealed = self.zones, self.keys.full
        if zones.apart:
            return self.sealed.read(unsealed)
        place = slice(zones.sink, zones.start)
        return unsealed[:, :, place], self.values.full[:, :, place]

    @property
    def sealed_real(self) -> Tensor | None:
        """`[B,H,N]` bool, which of the sealed rows are neither padding nor known to be dropped; None: all."""
        zones = self.zones
        whole = not self.sealed.dropped and all(rows == zones.zone for rows in zones.here)
        return None if whole else self.sealed.real.data

    @property
    def sealed_keys(self) -> Tensor:
        """`[B,H,N,D]`: the sealed rows in stored order, where they lie; a view. Where a codec keeps them, they
        are read back at each call."""
        self.require()
        return self.sealed_rows()[0]

    @property
    def sealed_values(self) -> Tensor:
        """`[B,H,N,D]`, stored as `sealed_keys` are."""
        self.require()
        return self.sealed_rows()[1]

    @property
    def kept(self) -> StoredCodes | None:
        """What a codec keeps of the sealed rows; None without a codec or before the first of them."""
        self.require()
        return self.sealed.codes if self.zones.zone else None

    @property
    def sealed_codes(self) -> CodedRows | None:
        """Sealed rows as codes and levels, a view; None where they are not kept so."""
        return None if (kept := self.kept) is None else kept.codec.coded(kept)

    @property
    def sealed_bounds(self) -> Bounds:
        """The zones of `sealed_keys`: no sink, all of it sealed, none recent."""
        self.require()
        return Bounds.of(len(self.zones.count), self.zones.zone, device=self.there)

    @property
    def near_counts(self) -> list[int]:
        """Of each sequence, the rows that every query reads and this process attends to."""
        zones, deal = self.zones, self.deal
        if deal.size == 1:
            return [count - sealed for count, sealed in zip(zones.count, zones.sealed, strict=True)]
        sink = zones.sink if deal.rank == 0 else 0
        parts = [deal.part(waiting) for waiting in zones.recent]
        return [min(count, sink) + end - start for count, (start, end) in zip(zones.count, parts, strict=True)]

    @property
    def near_bounds(self) -> Bounds:
        """The zones of `keys` where every query reads sink and unsealed rows that this process attends to: all, or
        where rows are dealt its part of them."""
        bounds, deal = self.bounds, self.deal
        if deal.size == 1:
            return bounds
        first, last = (bounds.sealed + part for part in deal.part(bounds.rows - bounds.sealed))
        return Bounds(bounds.sink if deal.rank == 0 else torch.zeros_like(bounds.sink), bounds.base, first, last)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows stored: `kv`, and the `books` kept of them (positions, what is real, queries); with a codec
        `exact`, of the same rows as they came, where these are kept too."""
        unsealed = {"kv": self.keys.nbytes + self.values.nbytes, "books": self.positions.nbytes + self.queries.nbytes}
        return {name: unsealed.get(name, 0) + size for name, size in self.sealed.nbytes.items()}

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(self, zones: Zones, keys: Tensor) -> None:
        """Take the zones of a new batch, whose first rows are `keys` `[B,H,n,D]`."""
        self.zones = zones
        self.positions.resize(0, torch.empty(len(keys), 0, dtype=torch.int64))
        self.sealed.begin(keys)

    def store(self, keys: Tensor, values: Tensor, queries: Tensor | None, at: Tensor | None, spare: int) -> None:
        """Store rows at positions `at` `[B,n]`, negative for padding; None: each sequence counts on.

        Args:
            queries: `[B,H,G,n,D]` of the same tokens, if some are to be kept.
            spare: so many of the newest rows may be dropped again before the first seal.
        """
        zones, (batch, _, new, _) = self.zones, keys.shape
        before, counts, first, number = zones.next, [new] * batch, zones.behind(new), None
        if at is None:
            following = [next + new for next in before]
            if new != 1 or first is None or queries is not None:  # a token's position needs no tensor
                at = torch.tensor(before)[:, None] + torch.arange(new)
        else:
            counts = (at >= 0).sum(1).tolist()
            newest = at.amax(1).tolist() if new else [-1] * batch
            following = [max(row, last + 1) for row, last in zip(before, newest, strict=True)]
            first = first if min(counts) == new else None
        if at is not None and (first is None or queries is not None):
            number = torch.tensor(zones.count)[:, None] + torch.cumsum(at >= 0, 1) - 1  # [B,n] in its sequence
        place = None if number is None or first is not None else zones.place(number)
        zones.add(counts, following)
        ends = zones.end
        if first is not None:
            self._write_run(keys, values, first, max(ends), before if at is None else at)
        elif at is not None and place is not None:
            write_apart(self._near, (keys, values, at), place, max(ends))
        if queries is not None and at is not None and number is not None:
            self.queries.store(queries, at, number < self.sink, not zones.zone, spare)
        self.publish(ends)

    def note_token(self, row: int, position: int) -> None:
        """Count one more token of every sequence, which has been written to `row`, with what the device reads."""
        self.zones.add_one()
        self.keys.rows = self.values.rows = self.positions.rows = row + 1
        batch = len(self.zones.count)
        self._written = (*self._written[:2], [row + 1] * batch, [position] * batch)

    def _write_run(self, keys: Tensor, values: Tensor, first: int, end: int, at: Tensor | list[int]) -> None:
        """Store new rows, which end at row `end`, from row `first` on in every sequence; `at`: positions `[B,n]`, or of
        one row for each as numbers."""
        new = keys.shape[2]
        self.keys.resize(end, keys).narrow(2, first, new).copy_(keys)
        self.values.resize(end, values).narrow(2, first, new).copy_(values)
        positions = self.positions.resize(end)
        if isinstance(at, Tensor):
            positions.narrow(1, first, new).copy_(at)
        else:
            _write(positions.select(1, first), at)

    @keeps_tensors
    def publish(self, ends: list[int] | None = None) -> None:
        """Brings what the device reads up to date; `ends`: those of the zones, where they are known."""
        zones = self.zones
        counts = (
            [min(count, self.sink) for count in zones.count],
            [zones.start] * len(zones.count),
            zones.end if ends is None else ends,
            [next - 1 for next in zones.next],
        )
        rows, device = self.bounds.rows, self.keys.full.device
        if len(rows) != len(zones.count) or rows.device != device:
            sink, sealed, end = (torch.tensor(numbers, dtype=torch.int32).to(device) for numbers in counts[:3])
            self.bounds = Bounds(sink, self.sink, sealed, end)
            self.newest = torch.tensor(counts[3]).to(device)
        else:
            parts = (self.bounds.sink, self.bounds.sealed, rows, self.newest)
            for part, numbers, before in zip(parts, counts, self._written, strict=True):
                if numbers != before:
                    _write(part, numbers)
        self._written = counts

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self, each: list[int], decoded: int) -> Rows:
        """Move the oldest `each` unsealed rows of every sequence into the sealed zone and return those that stay in
        this process, as views that hold until `settle`.

        Args:
            decoded: how many of the newest rows of a sequence are no part of the prompt, 1 at a step of decoding.

        Raises:
            ValueError: NaN or infinite rows or queries on a GPU, where single rows were not looked at before.
        """
        zones, first, before = self.zones, not self.zones.zone, self.zones.sealed
        hands = self.deal.hands(before, each)
        here = [hand.rows for hand in hands]
        most = max(here)
        padding = torch.arange(most) >= torch.tensor(here)[:, None]
        positions = self._positions_of(hands)  # [B,n]
        if zones.apart:
            self.sealed.take_in(self.keys.full, self.values.full, zones.start, hands)
            keep_recent(self._near, zones, each)
        else:
            make_room(self._near, zones, each)
        zones.seal(each, here)
        keys, values = (rows[:, :, rows.shape[2] - most :] for rows in self._unrounded())
        if self.keys.full.is_cuda:
            input_checks.check_finite(keys=keys, values=values)
        queries, sampled = self.queries.of_rows(positions, self.sealed.device, before, zones.sealed)
        if queries is not None and self.keys.full.is_cuda:
            input_checks.check_finite(queries=queries)
        last: tuple[Tensor, ...] = self._take_last(decoded) if first and self.queries.last.wanted else ()
        if self.sealed.codes is not None:
            self.sealed.told = OfSeal.of(positions, last, self.sealed.codes)
            last = self.queries.shown(last)
        self.sealed.note((~padding).to(keys.device), keys.shape[1])
        return Rows(keys, values, positions.to(keys.device), queries, sampled, *last)

    def _positions_of(self, hands: list[Hand]) -> Tensor:
        """`[B,n]`: the positions of the unsealed rows that `hands` say, -1 behind a shorter sequence's."""
        waiting = self.positions.full[:, self.zones.start :]
        at = waiting.new_full((len(hands), max(hand.rows for hand in hands)), -1)
        for own, rows, hand in zip(at, waiting, hands, strict=True):
            own[: hand.rows] = hand.of_rows(rows).flatten()
        return at

    def _unrounded(self) -> tuple[Tensor, Tensor]:
        """Sealed rows as they came: all, or with a codec the last that are there so."""
        return self.sealed.unrounded if self.zones.apart else self.sealed_rows()

    def settle(self, order: Tensor | None, new: int) -> None:
        """Store the last sealed rows, `new` ones of this seal, in a selector's `order`, see `SealedRows.settle`."""
        self.as_they_came &= order is None
        self.sealed.settle(order, new, self._unrounded())

    def _take_last(self, decoded: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the prompt's last queries and what `Rows` says of its rows that are not sealed, where the sealed ones
        lie."""
        zones, device = self.zones, self.there
        queries, at = self.queries.of_prompt(decoded)
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

    def places_left(self, unit: int) -> Tensor | None:
        """`[B,H,K]` int64: the sealed places to keep when those are freed that hold nothing, in whole units, as many as
        the fullest head has rows; None where nothing can be freed."""
        if not (before := self.zones.zone):
            return None
        free = ~self.sealed.real.data
        fullest = int((~free).sum(-1).max())
        places = max(-(-fullest // unit), 1) * unit
        return None if places >= before else free.byte().argsort(dim=-1, stable=True)[..., :places]

    def compact(self, ids: Tensor) -> None:
        """Of the sealed places only `ids` `[B,H,K]` int64 stay, in that order; the storage of the others is freed."""
        zones = self.zones
        low, start, kept = zones.sink, zones.start, ids.shape[2]
        self.sealed.compact(ids)
        if not zones.apart:
            self.keys.keep(ids, low, start)
            self.values.keep(ids, low, start)
            self.positions.keep(ids[:, 0], low, start)  # of sealed rows any will do
        zones.free(zones.zone - kept)
        self.publish()

    def check_crop(self, gone: Sequence[int]) -> None:
        """ValueError where the newest `gone` rows of each sequence are sealed, or the last queries would go with them
        that a first seal is to hand over."""
        self.zones.check_crop(gone)
        self.queries.require(gone, self.zones.count)

    def crop(self, gone: Sequence[int]) -> None:
        """Forgets the newest `gone` rows of each sequence; ValueError: see `check_crop`."""
        zones, before = self.zones, self.zones.end
        self.queries.require(gone, zones.count)
        first = zones.crop(gone)
        zones.next = [  # the next token takes the position of the first one dropped
            int(self.positions.full[b, place]) if rows else row
            for b, (rows, place, row) in enumerate(zip(gone, first, zones.next, strict=True))
        ]

        def positions() -> Tensor:  # of what is gone
            row = torch.arange(min(zones.end), max(before))
            kept = (row < torch.tensor(zones.end)[:, None]) | (row >= torch.tensor(before)[:, None])
            return self.positions.full[:, row].masked_fill(kept, -1)

        self.queries.drop(gone, positions, zones.sealed)
        for buffer in self._near:
            buffer.resize(max(zones.end))
        self.publish()

    def take(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was; ValueError where fixed storage has another batch."""
        for state in self._states():
            state.take(index)
        self.zones.take(index.tolist())
        self.queries.forget_unwanted(self.zones.sealed)
        self.publish()

    def clone(self) -> StoredRows:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.zones = copy.copy(self.zones)  # its counts are replaced, never changed in place
        twin.keys, twin.values, twin.positions = (buffer.clone() for buffer in self._near)
        twin.sealed, twin.queries = self.sealed.clone(), self.queries.clone()
        twin.bounds = Bounds.of(0, 0)
        if self.zones.count:
            twin.publish()
        return twin

    def reset(self) -> None:
        """Forgets every row, and frees the storage unless it is fixed."""
        for state in (*self._near, *self.queries.states()):
            state.reset()
        self.sealed.reset()
        self.zones, self.as_they_came, self.broken = self._no_zones(), True, ""
        if not self.fixed:
            self.bounds = Bounds.of(0, 0)

    def to(self, device: torch.device | str) -> None:
        """Move what does not lie on a device of its own."""
        for state in (self.keys, self.values, *self.queries.states()):
            state.to(device)
        self.sealed.to(device)
        if self.zones.count:
            self.publish()


def _write(part: Tensor, numbers: Sequence[int]) -> None:
    """`part[b] = numbers[b]` of `[B]`, without a tensor of the numbers where they are the same."""
    if len(set(numbers)) == 1:
        part.fill_(numbers[0])
    else:
        part.copy_(torch.tensor(numbers, dtype=part.dtype), non_blocking=True)
