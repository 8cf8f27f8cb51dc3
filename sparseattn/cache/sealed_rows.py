"""Sealed rows that lie apart, on a device of their own or kept by a codec, and which of all sealed rows are real."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.disk_rows import DiskRows
from sparseattn.codecs.base import NewRows
from sparseattn.codecs.stored import StoredCodes
from sparseattn.core.deal import Hand
from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.core.selection import Selection
from sparseattn.selectors.eviction.attention_received import received


class OfSeal(NamedTuple):
    """What a codec is told of the rows of a seal beside keys and values.

    Args:
        positions: `[B,n]` int64 token positions, negative for padding.
        last: at the first seal, if the codec wants queries, the prompt's newest `[B,H,G,m,D]`, their positions `[B,m]`,
            and the keys `[B,H,u,D]` and positions `[B,u]` of its rows that are not sealed; else empty.
        scale: factor of the layer's logits; None: `1/sqrt(D)`.
    """

    positions: Tensor
    last: tuple[Tensor, ...]
    scale: float | None

    @classmethod
    def of(cls, positions: Tensor, last: tuple[Tensor, ...], codes: StoredCodes) -> OfSeal:
        """Of all that is handed over, `last`, as many of the prompt's newest queries as the codec wants."""
        wanted = codes.codec.last_queries
        if last and wanted:
            queries, at, *rest = last
            return cls(positions, (queries[:, :, :, -wanted:], at[:, -wanted:], *rest), codes.scale)
        return cls(positions, (), codes.scale)

    def weights(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the rows `keys` `[B,H,n,D]` got from these queries, and how many tokens of the prompt see each of
        them, `[B,H,n]`."""
        queries, query_at, unsealed, unsealed_at = self.last
        at = self.positions.to(keys.device)
        got, _ = received(queries, query_at, [(keys, at), (unsealed, unsealed_at)], self.scale)
        newest = torch.cat([at, unsealed_at.to(at.device)], 1).amax(1)
        seen = (newest[:, None] - at + 1)[:, None].expand_as(got)
        return got, seen


class SealedRows:
    """What is kept of the sealed rows of B sequences and H heads, in stored order.

    Keys and values are here where they lie apart. Otherwise they lie between sink and recent rows, in the storage of
    those, and only what is known of them is here.

    Args:
        capacity: rows to allocate at once.
        device: of its own; None: that of the other rows.
        codes: what a codec keeps of them; None: they are kept as they come.
        exact: whether they are kept as they come too, where a codec keeps them.
        dealt: whether this process keeps a part of them alone, which then lies apart.
        folder: of a file that they lie in, see `DiskRows`; None: they lie in memory.

    Attributes:
        keys, values: `[B,H,N,D]`, where they lie apart: all as they came, or with a codec those of the last seal until
            it has them.
        real: `[B,H,N]` bool, neither padding nor known to be dropped by the selector.
        valid: `[B,N]` bool, by place, no padding in any head; what a step's selector sees.
        dropped: whether the selector has dropped a row.
    """

    def __init__(
        self,
        capacity: int,
        device: torch.device | None,
        codes: StoredCodes | None,
        exact: bool,
        dealt: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.device, self.codes, self.exact, self.dropped = device, codes, exact, False
        self.dealt = dealt
        own = capacity if codes is None or exact else 0
        self.keys, self.values = (
            RowBuffer(2, own, pinned=device is not None) if folder is None else DiskRows(own, folder) for _ in range(2)
        )
        self.told: OfSeal | None = None  # between a seal and its `settle`
        self.real, self.valid = RowBuffer(2, capacity), RowBuffer(1, capacity, spare=False)

    def fetch(self, selection: Selection) -> None:
        """Ask for the rows that a selection names, where they lie in a file."""
        for rows in (self.keys, self.values):
            if isinstance(rows, DiskRows):
                rows.fetch(selection)

    @property
    def apart(self) -> bool:
        """Whether keys and values lie apart from the other rows."""
        return self.dealt or self.device is not None or self.codes is not None

    def states(self) -> dict[str, State]:
        """Return what is kept of each sequence, by attribute."""
        kept: dict[str, State] = {"keys": self.keys, "values": self.values, "real": self.real, "valid": self.valid}
        return kept if self.codes is None else {**kept, "codes": self.codes}

    def begin(self, keys: Tensor) -> None:
        """Make room for rows such as `keys` `[B,H,n,D]`, of which none are sealed."""
        if self.apart:
            for buffer in (self.keys, self.values):
                buffer.resize(0, keys[:, :, :0].to(self.device or keys.device))

    def read(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B,H,N,D]` that lie apart: views, but read back anew where a codec keeps them.

        Args:
            like: `[B,H,n,D]`, rows as they came.
        """
        if self.codes is None or (self.exact and self.real.rows):
            return self.keys.data, self.values.data
        if self.real.rows:
            return self.codes.last(self.real.rows, like.dtype)
        none = like[:, :, :0].to(self.device or like.device)
        return none, none

    @property
    def unrounded(self) -> tuple[Tensor, Tensor]:
        """Keys and values that lie apart as they came: all, or with codes the last that are there so."""
        return self.keys.data, self.values.data

    def take_in(self, keys: Tensor, values: Tensor, first: int, hands: list[Hand]) -> None:
        """Copy, of sequence b of `keys` and `values` `[B,H,N,D]`, what `hands[b]` says of the rows from `first` on, and
        zero the padding behind a shorter one's."""
        most = max(hand.rows for hand in hands)
        for incoming, apart in ((keys, self.keys), (values, self.values)):
            zone = apart.rows
            apart.resize(zone + most, incoming[:, :, :0].to(self.device or incoming.device))
            for b, hand in enumerate(hands):
                for h in range(incoming.shape[1]):  # a head is contiguous, so that no other copy is made on the device
                    dealt = hand.of_rows(incoming[b, h, first:])  # [units,unit,D]
                    apart.full[b, h, zone : zone + hand.rows].view_as(dealt).copy_(dealt)
                apart.full[b, :, zone + hand.rows : zone + most] = 0

    def note(self, valid: Tensor, heads: int) -> None:
        """Note which of the newly sealed rows are no padding, `[B,n]` bool."""
        self.real.append(valid[:, None].expand(-1, heads, -1))
        self.valid.append(valid)

    def settle(self, order: Tensor | None, new: int, rows: tuple[Tensor, Tensor]) -> None:
        """Store the last sealed rows in a selector's order. Then give them to the codec, if there is one.

        It encodes new rows as they came, and others as they are read back, so that those are encoded once more.

        Args:
            order: `[B,H,m]`, of the `new` rows, and of others if m is more; None: as they are.
            new: rows of this seal.
            rows: keys and values `[B,H,N,D]` as they came, the new ones last.

        Raises:
            ValueError: no permutation of so many rows, or one that cuts a group of rows of the codec.
        """
        if order is not None:
            input_checks.check_order(order, self.real.data, new)
        if self.codes is not None:
            self._encode(self.codes, order, new, rows)
        if order is not None:
            kept = rows if self.codes is None or self.exact else ()
            for part in (*kept, self.real.data[..., None]):
                moved = part[:, :, part.shape[2] - order.shape[2] :]
                moved.copy_(moved.gather(2, order[..., None].expand_as(moved)))
            first = self.real.rows - order.shape[2]
            self.valid.data[:, first:] = self.real.data[:, :, first:].any(1)
        if self.codes is not None and not self.exact:
            self.keys.reset()
            self.values.reset()

    def _encode(self, codes: StoredCodes, order: Tensor | None, new: int, rows: tuple[Tensor, Tensor]) -> None:
        keys, values = (part[:, :, part.shape[2] - new :] for part in rows)
        more = 0 if order is None else order.shape[2] - new
        real = self.real.data[:, :, self.real.rows - new - more :]
        wanted, positions, queries = self.told, None, None
        weights: tuple[Tensor, Tensor] | None = None
        if wanted is not None and wanted.last:
            queries = wanted.last[0]
            weights = wanted.weights(keys) if codes.codec.wants_weights else None
        if codes.codec.before_rope and wanted is not None:
            at = wanted.positions.clamp(min=0).to(keys.device, torch.int32)
            positions = at[:, None].expand(-1, keys.shape[1], -1)
        if more:
            read, before = codes.last(more, keys.dtype), codes.last_positions(more)
            keys, values = (torch.cat(parts, 2) for parts in zip(read, (keys, values), strict=True))
            if positions is not None and before is not None:
                positions = torch.cat([before, positions], 2)
        if order is not None:
            keys, values = (part.gather(2, order[..., None].expand_as(part)) for part in (keys, values))
            real = real.gather(2, order)
            positions = None if positions is None else positions.gather(2, order)
            if weights is not None:  # the first seal's order is of its rows alone
                weights = weights[0].gather(2, order), weights[1].gather(2, order)
        got, seen = weights or (None, None)
        new_rows = NewRows(keys, values, real, positions, queries=queries, weights=got, seen=seen)
        codes.store(new_rows, codes.rows - more)
        self.told = None

    def drop(self, mask: Tensor) -> None:
        """Note that the selector holds the rows `mask` `[B,H,N]` bool, and no other ever again."""
        self.real.data.logical_and_(mask)
        self.dropped = True

    def compact(self, ids: Tensor) -> None:
        """Keep the places `ids` `[B,H,K]` int64 alone, in that order; the storage of the others is freed."""
        self.real.keep(ids)
        valid = self.real.data.any(1)
        self.valid.reset()
        self.valid.append(valid)
        if self.apart:
            self.keys.keep(ids)
            self.values.keep(ids)

    def clone(self) -> SealedRows:
        """Return an independent copy."""
        twin = copy.copy(self)
        for name, state in self.states().items():
            setattr(twin, name, state.clone())
        return twin

    def reset(self) -> None:
        """Forget every row, and free storage that is not fixed."""
        for state in self.states().values():
            state.reset()
        self.dropped = False

    def to(self, device: torch.device | str) -> None:
        """Move what has no device of its own."""
        if self.device is None:
            for state in self.states().values():
                state.to(device)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of keys and values that lie apart (`kv`), of what is known of rows (`books`); with codes `exact`, of
        the same rows as they came."""
        books = self.real.nbytes + self.valid.nbytes
        rows = self.keys.nbytes + self.values.nbytes
        if self.codes is None:
            return {"kv": rows, "books": books}
        return {"kv": self.codes.nbytes, "books": books} | ({"exact": rows} if self.exact else {})
