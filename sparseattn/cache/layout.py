"""Where the rows of a batch lie: sink | sealed | recent, as counts on the host.

Each sequence is stored without its padding. The sealed zone is common to the batch; a sequence that sealed fewer rows
than another has whole spans of padding in it. Where sealed rows are stored apart, recent rows follow the sink. Counting
on the host means that no step waits for the device; counting in plain numbers, that a step of one token costs little.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Zones:
    """Counts for each of B sequences, and the physical rows that follow from them. Lists are replaced, never changed.

    Attributes:
        sink: rows reserved for the sink, the physical rows `[0, sink)`.
        zone: rows of the sealed zone, padding included: `[sink, start)`, or `[0, zone)` of a storage of its own.
        start: the physical row where recent rows begin: behind the sealed zone, or the sink.
        count: real rows. sealed: of them sealed, freed ones included. next: the position after the newest row's.
        here: sealed rows that this process keeps, freed ones included: all of them, but where rows are dealt to ranks.
        freed: places that the zone had before rows were freed, and has no more.
    """

    def __init__(self, batch: int, sink: int, apart: bool = False) -> None:
        self.sink, self.zone, self.start, self.apart, self.freed = sink, 0, sink, apart, 0
        self.count, self.sealed, self.next, self.here = ([0] * batch for _ in range(4))

    def resume(self, sequences: Mapping[str, Sequence[int]], zone: int, freed: int) -> None:
        """Take the counts of a cache that was saved: `count`, `sealed` and `next` of each sequence.

        Raises:
            ValueError: counts of another number of sequences, or that no rows can have.
        """
        count, sealed, following = (list(sequences[name]) for name in ("count", "sealed", "next"))
        each = [*count, *sealed, *following, zone, freed]
        if {len(count), len(sealed), len(following)} != {len(self.count)} or any(type(n) is not int for n in each):
            raise ValueError(f"counts of {len(self.count)} sequences are as many whole numbers, got {dict(sequences)}")
        if min(each) < 0 or any(rows < done for rows, done in zip(count, sealed, strict=True)):
            raise ValueError(f"no cache has the counts {dict(sequences)} in a zone of {zone} rows, {freed} freed")
        self.count, self.sealed, self.next, self.freed = count, sealed, following, freed
        self._resize(zone)

    @property
    def recent(self) -> list[int]:
        """Rows neither of the sink nor sealed."""
        return [count - min(count, self.sink) - sealed for count, sealed in zip(self.count, self.sealed, strict=True)]

    @property
    def end(self) -> list[int]:
        """One past the last recent row; where there is none, `start`."""
        start, sink = self.start, self.sink
        return [
            start + count - min(count, sink) - sealed for count, sealed in zip(self.count, self.sealed, strict=True)
        ]

    def place(self, number: Tensor) -> Tensor:
        """Physical rows of the unsealed real rows `number` `[B,...]` of each sequence."""
        sealed = torch.tensor(self.sealed).view(-1, *[1] * (number.ndim - 1))
        return torch.where(number < self.sink, number, number - self.sink - sealed + self.start)

    def behind(self, new: int) -> int | None:
        """Return the physical row where `new` more rows of every sequence begin; None where they lie in several
        runs."""
        sink, start, first = self.sink, self.start, None
        for count, sealed in zip(self.count, self.sealed, strict=True):
            row = count if count < sink else start + count - sink - sealed
            if (start > sink and count < sink < count + new) or first not in (None, row):
                return None
            first = row
        return first

    def next_row(self) -> tuple[int, int] | None:
        """Return the physical row where one more token of every sequence lies, and its position; None where these
        differ, or some sequence fills its sink yet."""
        counts, sealed, following = self.count, self.sealed, self.next
        waiting = counts[0] - sealed[0]
        if len(counts) > 1 and (
            len(set(following)) > 1 or any(count - old != waiting for count, old in zip(counts, sealed, strict=True))
        ):
            return None
        return None if min(counts) < self.sink else (self.start - self.sink + waiting, following[0])

    def add_one(self) -> None:
        """Count one more real row of every sequence, at the next position."""
        self.count = [count + 1 for count in self.count]
        self.next = [position + 1 for position in self.next]

    def due(self, keep: int, seal: int, span: int) -> list[int]:
        """Rows to seal now, whole spans: all but the newest `keep`, once `seal` rows wait in some sequence.

        The sequences of a batch seal together. Where they are out of phase (their waiting rows differ modulo the span),
        sealing waits for up to a span more, so that all have the same number of spans ready: sealed apart, every
        phase would add padding to all others at every seal.
        """
        waiting = [max(recent - keep, 0) for recent in self.recent]
        out_of_phase = len({rows % span for rows in waiting}) > 1
        if max(waiting) < seal + (span - 1 if out_of_phase else 0):
            return [0] * len(waiting)
        return [rows // span * span for rows in waiting]

    def add(self, rows: Sequence[int], following: Sequence[int]) -> None:
        """Count `rows` more real rows, after which the next position is `following`."""
        self.count = list(map(operator.add, self.count, rows))
        self.next = list(following)

    def require_room(self, rows: Sequence[int], capacity: int, span: int) -> None:
        """ValueError where `rows` more real rows, and the padding of a seal with them, exceed a fixed storage's."""
        after = copy.copy(self)
        after.add(rows, self.next)
        padding = span - 1 if len(rows) > 1 else 0  # sequences may be out of phase, now or after a `crop`
        if max(after.end) + padding > capacity:
            kept = f" less {padding} for padding" if padding else ""
            raise ValueError(
                f"this cache is fixed at {capacity} rows a sequence{kept}: {list(rows)} more behind {self.end} do not "
                f"fit; give KVCache a larger capacity"
            )

    def seal(self, each: Sequence[int], here: Sequence[int]) -> None:
        """Count `each` rows as sealed, of which `here` stay in this process; the zone grows by the most of these."""
        self.sealed = list(map(operator.add, self.sealed, each))
        self.here = list(map(operator.add, self.here, here))
        self._resize(self.zone + max(here))

    def free(self, places: int) -> None:
        """Shrinks the zone by `places`."""
        self._resize(self.zone - places)
        self.freed += places

    def _resize(self, zone: int) -> None:
        self.zone = zone
        self.start = self.sink if self.apart else self.sink + zone

    def check_crop(self, gone: Sequence[int]) -> None:
        """ValueError for a negative number of rows, or where some of the newest `gone` are sealed already."""
        free = [
            recent if sealed else count
            for recent, sealed, count in zip(self.recent, self.sealed, self.count, strict=True)
        ]
        if min(gone) < 0:
            raise ValueError(f"crop drops 0 or more rows, got {list(gone)}")
        if any(rows > most for rows, most in zip(gone, free, strict=True)):
            raise ValueError(
                f"cannot drop {list(gone)} rows: only the newest {free} are not sealed yet; build the cache with "
                f"rollback={max(gone)} or more to keep that many unsealed"
            )

    def crop(self, gone: Sequence[int]) -> list[int]:
        """Forgets the newest `gone` rows of each sequence and returns the physical place of the first of them.

        Raises:
            ValueError: see `check_crop`.
        """
        self.check_crop(gone)
        self.count = [count - rows for count, rows in zip(self.count, gone, strict=True)]
        places: list[int] = self.place(torch.tensor(self.count)).tolist()
        return places

    def take(self, index: Sequence[int]) -> None:
        """Sequence b becomes what sequence `index[b]` was."""
        counts_by_sequence = self.count, self.sealed, self.next, self.here
        self.count, self.sealed, self.next, self.here = ([counts[b] for b in index] for counts in counts_by_sequence)
