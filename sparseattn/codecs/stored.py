"""What a cache holds of its sealed rows where a codec keeps them: its parts in growing tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sparseattn.codecs.base import GROUP, ONCE, OWN, ROW, SEAL, NewRows, RowCodec
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.row_buffer import RowBuffer, State
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend import gather

CHUNK = 1 << 22  # numbers read back at a time
POSITIONS = "positions"  # int32 of each row, of a codec that works before RoPE


class StoredCodes(State):
    """The parts that a codec made of the sealed rows of B sequences and H heads, in stored order.

    Args:
        codec: makes and reads them.
        capacity: rows to allocate at once.

    Attributes:
        size: D; 0 before the first row.
        rope: the layer's, for a codec that works before RoPE.
        scale: factor of the layer's logits; None: `1/sqrt(D)`.
    """

    def __init__(self, codec: RowCodec, capacity: int = 0) -> None:
        self.codec, self.capacity, self.rows, self.size = codec, capacity, 0, 0
        self.rope: Rope | None = None
        self.scale: float | None = None
        self._starts: list[int] = []  # the first row of each seal
        self._own: list[dict[str, int]] = []  # entries of OWN parts before each seal
        shares = {**codec.parts, POSITIONS: ROW} if codec.before_rope else dict(codec.parts)
        room = {ROW: capacity, GROUP: capacity // codec.group, SEAL: 0, ONCE: 0, OWN: 0}
        self._shares = shares
        self._parts = {name: RowBuffer(2, room[share]) for name, share in shares.items()}

    # -- storing -----------------------------------------------------------------------------------------------------

    def bind(self, context: LayerContext) -> None:
        """Take what a codec may ask of the layer."""
        self.rope, self.scale = context.rope, context.scale

    def store(self, rows: NewRows, first: int) -> None:
        """Keep new rows from row `first` on, in place of those that are there.

        Raises:
            ValueError: groups or seals that would be cut, before anything is stored.
        """
        self._check_cut(first)
        self.size, count = rows.keys.shape[3], rows.keys.shape[2]
        once = {name: self.part(name) for name, share in self._shares.items() if share == ONCE and self.rows}
        own = {name: self._entries(name, first) for name, share in self._shares.items() if share == OWN}
        made = self.codec.encode(replace(rows, rope=self.rope, once=once, entries=own))
        if self.codec.before_rope and rows.positions is not None:
            made = {**made, POSITIONS: rows.positions}
        before = {name: self._entries(name, first) for name in self._shares}
        seals = sum(start < first for start in self._starts)
        self._starts, self._own = [*self._starts[:seals], first], [*self._own[:seals], own]
        for name, part in self._parts.items():
            if self._shares[name] == ONCE and part.rows:
                continue
            if part.rows:
                part.resize(before[name])
            part.append(made[name])
        self.rows = first + count

    def _entries(self, name: str, first: int) -> int:
        """Entries of a part that belong to the rows before `first`, where a seal begins."""
        share, seals = self._shares[name], sum(start < first for start in self._starts)
        if share == OWN:
            return self._own[seals][name] if seals < len(self._own) else self._parts[name].rows
        return {ROW: first, GROUP: first // self.codec.group, SEAL: seals, ONCE: 1}[share]

    def _check_cut(self, first: int) -> None:
        group, whole = self.codec.group, not {SEAL, OWN} & set(self._shares.values())
        if first % group or first > self.rows:
            raise ValueError(
                f"rows that move begin at a group of {group} rows: an order begins at row {first} of {self.rows}"
            )
        if first < self.rows and not whole and first not in self._starts:
            raise ValueError(
                f"{self.codec} keeps the rows of a seal together, so that rows that move begin with a seal, at one of "
                f"{self._starts}: an order begins at row {first} of {self.rows}"
            )

    # -- reading -----------------------------------------------------------------------------------------------------

    def part(self, name: str) -> Tensor:
        """All entries `[B,H,E,...]` of a part, a view. RuntimeError before the first."""
        return self._parts[name].data

    def of(self, name: str, row: Tensor) -> Tensor:
        """Entries `[B,Hs,R,...]` of a part for rows `row` `[B,Hs,R]`; of a `ONCE` part `[B,Hs,...]`, for all rows."""
        share, part = self._shares[name], self.part(name)
        if share == ONCE:
            return part[:, :, 0].repeat_interleave(row.shape[1] // part.shape[1], 1)
        entry = {ROW: row, GROUP: row // self.codec.group}.get(share)
        return self.at(name, self._seal_of(row) if entry is None else entry)

    def at(self, name: str, entry: Tensor) -> Tensor:
        """Entries `entry` `[B,Hs,R]` of a part, `[B,Hs,R,...]`; of an empty part zeros."""
        part = self.part(name)
        if not part.shape[2]:
            return part.new_zeros(*entry.shape, *part.shape[3:])
        flat = part[..., None] if part.ndim == 3 else part.flatten(3)
        return gather.take(flat, entry).reshape(*entry.shape, *part.shape[3:])

    def _seal_of(self, row: Tensor) -> Tensor:
        starts = torch.tensor(self._starts, device=row.device)
        return torch.searchsorted(starts, row.contiguous(), right=True) - 1

    def roped(self, keys: Tensor, row: Tensor) -> Tensor:
        """`keys` `[B,Hs,R,D]` that were kept before RoPE, as they are after it, for rows `row` `[B,Hs,R]`."""
        if self.rope is None:
            raise RuntimeError(f"{self.codec} keeps keys before RoPE, and this cache was told none")
        return self.rope.rotate(keys, self.of(POSITIONS, row))

    def last(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values `[B,H,count,D]` of the last rows, read back."""
        first = next(iter(self._parts.values())).full
        batch, heads = first.shape[:2]
        once = max(CHUNK // max(batch * heads * self.size, 1), 1)
        rows = torch.arange(self.rows - count, self.rows, device=first.device)
        parts = [self.codec.read(self, row.expand(batch, heads, -1)) for row in rows.split(once)]
        keys, values = (torch.cat(part, 2).to(dtype) for part in zip(*parts, strict=True))
        return keys, values

    def last_positions(self, count: int) -> Tensor | None:
        """`[B,H,count]` int32 token positions of the last rows; None where the codec keeps none."""
        return self.part(POSITIONS)[:, :, self.rows - count :] if self.codec.before_rope else None

    # -- counting ----------------------------------------------------------------------------------------------------

    def named(self, selection: Selection) -> Tensor:
        """`[B,H,N]` bool: rows that a selection names for any query head of a KV head."""
        heads = next(iter(self._parts.values())).full.shape[1]
        return selection.mask(self.rows).unflatten(1, (heads, -1)).any(2)

    def touched(self, name: str, named: Tensor) -> Tensor:
        """`[B,H]`: entries of a part that rows `named` `[B,H,N]` bool are read from."""
        share = self._shares[name]
        if share == ROW:
            return named.sum(-1)
        if share == ONCE:
            return named.any(-1).long()
        if share == GROUP:
            return named.unflatten(2, (-1, self.codec.group)).any(3).sum(-1)
        ends = [*self._starts[1:], self.rows]
        return torch.stack(
            [named[:, :, a:b].any(-1) for a, b in zip(self._starts, ends, strict=True)], -1
        ).sum(-1)  # fmt: skip

    # -- as a state --------------------------------------------------------------------------------------------------

    def fresh(self) -> StoredCodes:
        return StoredCodes(self.codec, self.capacity)

    def clone(self) -> StoredCodes:
        twin = self.fresh()
        twin.rows, twin.size, twin.rope, twin.scale = self.rows, self.size, self.rope, self.scale
        twin._starts, twin._own = self._starts, self._own  # replaced, never changed in place
        twin._parts = {name: buffer.clone() for name, buffer in self._parts.items()}
        return twin

    def take(self, index: Tensor) -> None:
        for buffer in self._parts.values():
            buffer.take(index)

    def reset(self) -> None:
        self.rows, self._starts, self._own = 0, [], []
        for buffer in self._parts.values():
            buffer.reset()

    def saved(self) -> dict[str, Tensor]:
        if not self.rows:
            return {}
        own = [[entries[name] for name in self._shares if self._shares[name] == OWN] for entries in self._own]
        parts = {f"part.{name}": buffer.data for name, buffer in self._parts.items() if buffer.allocated}
        size = torch.tensor([self.rows, self.size])
        return {**parts, "seals": torch.tensor(self._starts), "own": torch.tensor(own), "size": size}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        names = [name for name, share in self._shares.items() if share == OWN]
        for name, part in tensors.items():
            kind, _, own = name.partition(".")
            if kind == "part":
                self._parts[own].append(part.to(device))
        self._starts, (self.rows, self.size) = tensors["seals"].tolist(), tensors["size"].tolist()
        self._own = [dict(zip(names, entries, strict=True)) for entries in tensors["own"].tolist()]

    def to(self, device: torch.device | str) -> None:
        for buffer in self._parts.values():
            buffer.to(device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._parts.values())
