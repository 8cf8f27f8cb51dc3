"""What a selector is shown of a cache: rows once, as they are sealed, and a view of the stored keys if it asks."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

from torch import Tensor

from sparseattn.cache.abilities import Abilities
from sparseattn.cache.index_files import append_kept
from sparseattn.cache.rows import StoredRows
from sparseattn.cache.state_checks import append_first
from sparseattn.cache.written_in_place import only_read
from sparseattn.codecs.base import RowCodec
from sparseattn.selectors.base import Rows, Selector


def unit_of(selector: Selector, codec: RowCodec | None = None) -> int:
    """Rows are sealed in multiples of this: the selector's unit, and with a codec whole groups of its rows."""
    return selector.unit if codec is None else math.lcm(selector.unit, codec.group)


def check_seal(selector: Selector, seal: int, codec: RowCodec | None = None) -> None:
    """ValueError where `seal` rows at a time are less than a unit."""
    if seal < (unit := unit_of(selector, codec)):
        whose = "" if codec is None else f" and of groups of {codec.group} rows"
        raise ValueError(f"seal is at least the unit of {selector!r}{whose}, {unit} rows, got {seal}")


class ShownRows:
    """Seals rows: shows them to the selector, stores them in its order, and keeps its view of the keys up to date.

    Args:
        selector: who is shown them.
        abilities: which parts of it can do what.
        stored: the rows of the cache.
        indexes: folder of index files, see `KVCache`.

    Attributes:
        views: whether the selector has a view of the stored keys or their codes.
    """

    def __init__(
        self, selector: Selector, abilities: Abilities, stored: StoredRows, indexes: Path | None = None
    ) -> None:
        self.selector, self.abilities, self.stored, self.indexes = selector, abilities, stored, indexes
        self.views = bool(abilities.key_readers or abilities.rounded_readers)
        self._storage: Tensor | None = None  # of which the selector has a view

    def fix(self, capacity: int, seal: int) -> None:
        """Give the selector and the cache storage of a fixed size, see `KVCache`; `seal` rows are sealed at a time."""
        unit, sink = self.selector.unit, self.stored.sink
        sealed = (capacity - sink) // unit * unit
        self.selector.fix(sealed, seal // unit * unit)
        for part in self.selector.tree():
            part.fixed_for_cache = True
        self.stored.fix(capacity, sealed)

    def claim(self) -> None:
        """Note that the selector serves this cache: it serves one."""
        for part in self.selector.tree():
            part.rows_of_cache = True

    def seal(self, each: list[int], decoded: int) -> None:
        """Seal the oldest `each` unsealed rows of every sequence; the newest `decoded` are no part of the prompt."""
        first = self.stored.zones.zone == 0
        if self.stored.sealed.codes is not None:
            self.stored.sealed.codes.bind(self.selector.layer_context)
        rows = self.stored.seal(each, decoded)
        if not (new := rows.keys.shape[2]):  # all are other processes'
            order = None
        else:
            parts = {f"rows.{part.name}": getattr(rows, part.name) for part in fields(rows)}
            with only_read(self.selector, **{name: part for name, part in parts.items() if isinstance(part, Tensor)}):
                order = self._order(rows, first)
        self.stored.settle(order, new)
        self.stored.publish()
        self.refresh()

    def _order(self, rows: Rows, first: bool) -> Tensor | None:
        """Show the selector rows, and return in which order it wants them."""
        if not first:
            return self.selector.append(rows)
        if self.indexes is None:
            return append_first(self.selector, rows)
        return append_kept(self.selector, rows, self.indexes)  # the prompt's, not what decoding adds

    def refresh(self) -> None:
        """Bring the selector's view of the stored keys up to date; where a codec keeps the rows, only what reads
        their levels has one."""
        stored = self.stored
        if (codes := stored.sealed.codes) is not None:
            for part in self.abilities.rounded_readers:
                part.rounded = codes.codec.coded(codes) if stored.zones.zone else None
            return
        if not (readers := self.abilities.key_readers):
            return
        # All behind the sink if the storage is fixed, so that a view stays as it is.
        storage = stored.sealed.keys.full if stored.zones.apart else stored.keys.full
        places = storage.shape[2] - stored.sink if stored.fixed else stored.zones.zone
        view = readers[0].stored
        if view is None or self._storage is not storage or view.shape[2] != places:
            shown = storage[:, :, stored.sink :] if stored.fixed else stored.sealed_rows()[0]
            self._storage = storage
            for reader in readers:
                reader.stored = shown

    def forget(self) -> None:
        """Let go of the storage that the selector had a view of."""
        self._storage = None
