"""Where the rows of a batch lie: sink | sealed | recent, as counts on the host.

Each sequence is stored without its padding. The sealed zone is common to the batch; a sequence that sealed fewer rows
than another has whole spans of padding in it. Where sealed rows are stored apart, recent rows follow the sink. Counting
on the host means that no step waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Zones:
    """Counts `[B]` int64 on the CPU, and the physical rows that follow from them.

    Attributes:
        sink: rows reserved for the sink, the physical rows `[0, sink)`.
        zone: rows of the sealed zone, padding included: `[sink, start)`, or `[0, zone)` of a storage of its own.
        count: `[B]` real rows. sealed: `[B]` of them sealed. next: `[B]` the position after the newest row's.
    """

    def __init__(self, batch: int, sink: int, apart: bool = False) -> None:
        self.sink, self.zone, self.apart = sink, 0, apart
        self.count, self.sealed, self.next = (torch.zeros(batch, dtype=torch.int64) for _ in range(3))

    @property
    def start(self) -> int:
        """The physical row where recent rows begin: behind the sealed zone, or the sink."""
        return self.sink if self.apart else self.sink + self.zone

    @property
    def recent(self) -> Tensor:
        """`[B]` rows neither of the sink nor sealed."""
        return self.count - self.count.clamp(max=self.sink) - self.sealed

    @property
    def end(self) -> Tensor:
        """`[B]` one past the last recent row; where there is none, `start`."""
        return self.start + self.recent

    def place(self, number: Tensor) -> Tensor:
        """Physical rows of the unsealed real rows `number` `[B,...]` of each sequence."""
        sealed = self.sealed.view(-1, *[1] * (number.ndim - 1))
        return torch.where(number < self.sink, number, number - self.sink - sealed + self.start)

    def due(self, keep: int, seal: int, span: int) -> Tensor:
        """`[B]` rows to seal now, whole spans: all but the newest `keep`, once `seal` rows wait in some sequence.

        The sequences of a batch seal together. Where they are out of phase (their waiting rows differ modulo the span),
        sealing waits for up to a span more, so that all have the same number of spans ready: sealed apart, every
        phase would add padding to all others at every seal.
        """
        waiting = (self.recent - keep).clamp(min=0)
        if int(waiting.max()) < seal + (span - 1 if int((waiting % span).unique().numel()) > 1 else 0):
            return torch.zeros_like(waiting)
        return waiting // span * span

    def seal(self, each: Tensor) -> None:
        """Counts `each` `[B]` rows as sealed; the zone grows by the most of them."""
        self.sealed = self.sealed + each
        self.zone += int(each.max())

    def crop(self, gone: Tensor) -> Tensor:
        """Forgets the newest `gone` `[B]` rows of each sequence and returns the physical place of the first of them.

        Raises:
            ValueError: a negative number, or rows that are sealed already.
        """
        free = torch.where(self.sealed > 0, self.recent, self.count)
        if bool((gone < 0).any()):
            raise ValueError(f"crop drops 0 or more rows, got {gone.tolist()}")
        if bool((gone > free).any()):
            raise ValueError(
                f"cannot drop {gone.tolist()} rows: only the newest {free.tolist()} are not sealed yet; build the "
                f"cache with rollback={int(gone.max())} or more to keep that many unsealed"
            )
        self.count = self.count - gone
        return self.place(self.count)

    def take(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was."""
        self.count, self.sealed, self.next = self.count[index], self.sealed[index], self.next[index]
