"""The contract of a row codec: how sealed rows are kept, read back for a selection, and counted in bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparseattn.codecs.table import NAMES
from sparseattn.core.rope import Rope
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend_quantized.reference import CodedRows, attend_read
from sparseattn.kernels.implementations import choose
from sparseattn.selectors.identity import Named, identity

# What shares an entry of a part: one row, the rows of a group, all rows of a seal, all rows there are. Of the last kind
# a codec says itself which entry is whose.
ROW, GROUP, SEAL, ONCE, OWN = "row", "group", "seal", "once", "own"


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows to be kept, in stored order. Padding is rows of zeros, in whole groups.

    Args:
        keys: `[B,H,n,D]`, after RoPE.
        values: `[B,H,n,D]`.
        real: `[B,H,n]` bool, no padding.
        positions: `[B,H,n]` int32 token positions, for a codec that works before RoPE (`before_rope`); else None.
        rope: the layer's rotary embedding, for such a codec; else None.
        queries: `[B,H,G,m,D]` of the prompt's newest tokens at the first seal (`last_queries`); else None.
        weights: `[B,H,n]` float32, the attention that each row got from these queries and all heads of its group, at
            the first seal, for a codec that asks for it (`wants_weights`); else None.
        seen: `[B,H,n]` int64 with `weights`, how many of the prompt's tokens are not before the row.
        once: what the first seal made for all rows, by part; empty at the first seal.
        entries: how many entries each `OWN` part has before these rows.
    """

    keys: Tensor
    values: Tensor
    real: Tensor
    positions: Tensor | None = None
    rope: Rope | None = None
    queries: Tensor | None = None
    weights: Tensor | None = None
    seen: Tensor | None = None
    once: Mapping[str, Tensor] = field(default_factory=dict)
    entries: Mapping[str, int] = field(default_factory=dict)

    @property
    def unroped(self) -> Tensor:
        """`[B,H,n,D]` float32: the keys before RoPE, for a codec that works there."""
        if self.rope is None or self.positions is None:
            raise RuntimeError("these rows came without RoPE or positions: the codec says before_rope = True")
        return self.rope.unrotate(self.keys.float(), self.positions)

    @property
    def half(self) -> torch.dtype:
        """The 16-bit dtype of numbers that are kept: the keys', or bfloat16 where these have more bits."""
        return self.keys.dtype if self.keys.element_size() == 2 else torch.bfloat16


class Kept(Protocol):
    """What is kept of N sealed rows, as `read` sees it; a cache's is `stored.StoredCodes`.

    Attributes:
        rows: N.
        size: D.
    """

    rows: int
    size: int

    def part(self, name: str) -> Tensor:
        """All entries `[B,H,E,...]` of a part, a view."""

    def of(self, name: str, row: Tensor) -> Tensor:
        """Entries `[B,Hs,R,...]` of a part for rows `row` `[B,Hs,R]`; of a `ONCE` part `[B,Hs,...]`, for all rows."""

    def at(self, name: str, entry: Tensor) -> Tensor:
        """Entries `entry` `[B,Hs,R]` of a part, `[B,Hs,R,...]`; of an empty part zeros."""

    def roped(self, keys: Tensor, row: Tensor) -> Tensor:
        """`keys` `[B,Hs,R,D]` that were kept before RoPE, as they are after it, for rows `row` `[B,Hs,R]`."""

    def named(self, selection: Selection) -> Tensor:
        """`[B,H,N]` bool: rows that a selection names for any query head of a KV head."""

    def touched(self, name: str, named: Tensor) -> Tensor:
        """`[B,H]`: entries of a part that rows `named` `[B,H,N]` bool are read from."""


class RowCodec(Named, ABC):
    """Keeps rows in a form of its own. The constructor's arguments are its configuration, stored under their names.

    The object holds nothing of any row, so that all layers and caches may share it.

    Attributes:
        parts: the tensors that `encode` returns, and what shares an entry of each: `ROW`, `GROUP`, `SEAL`, `ONCE` or
            `OWN`. `ONCE` parts are made by the first seal and handed to `encode` by every later one.
        group: rows that are kept together; rows are sealed in multiples of it.
        before_rope: whether `encode` and `read` need the layer's RoPE and the rows' positions.
        last_queries: how many of the prompt's newest queries the first `encode` needs.
        wants_weights: whether it needs the attention that rows got from these.
        shows_levels: whether `coded` gives levels and codes that selectors may read.
    """

    parts: ClassVar[Mapping[str, str]]
    group: int = 1
    before_rope: bool = False
    last_queries: int = 0
    wants_weights: ClassVar[bool] = False
    shows_levels: ClassVar[bool] = False

    @abstractmethod
    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        """Return the parts of new rows, each `[B,H,E,...]` with an entry for what shares it."""

    @abstractmethod
    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B,Hs,R,D]` float32 of rows `row` `[B,Hs,R]`; others are not read."""

    @abstractmethod
    def entry_bytes(self, size: int) -> dict[str, int]:
        """Return the bytes of an entry of each part, for rows of `size` channels: the codec's formula."""

    def check_size(self, size: int) -> None:
        """Raise ValueError for a head size that the codec does not take."""

    def nbytes(self, size: int, seals: Sequence[int]) -> int:
        """Return the bytes of one KV head, for `seals` rows of `size` channels at each seal."""
        count = {ROW: sum(seals), GROUP: sum(seals) // self.group, SEAL: len(seals), ONCE: 1}
        positions = 4 * sum(seals) if self.before_rope else 0
        return positions + sum(each * count[self.parts[name]] for name, each in self.entry_bytes(size).items())

    def row_bytes(self, size: int, rows: int = 4096) -> float:
        """Return the bytes of a row of `size` channels, where a prompt of `rows` rows is sealed at once."""
        return self.nbytes(size, [rows]) / rows

    def bytes_read(self, kept: Kept, selection: Selection) -> Tensor:
        """Return `[B,H]` int64: bytes that a step reads for a selection, each entry once for all query heads of a KV
        head."""
        named = kept.named(selection)  # [B,H,N]
        total = named.sum(-1) * (4 if self.before_rope else 0)
        for name, each in self.entry_bytes(kept.size).items():
            total = total + each * kept.touched(name, named)
        return total

    def attend(
        self, query: Tensor, kept: Kept, selection: Selection, scale: float | None, impl: str | None
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)` as `attend_coded` does, here in torch: the rows named are read back, then attended to.

        Raises:
            ValueError: an unknown `impl`.
            RuntimeError: an `impl` that does not read this codec's rows.
        """
        if impl in ("numba", "triton"):
            raise RuntimeError(f'impl="{impl}" cannot run: rows of {self} are read by torch alone')
        choose(impl, query.device, query.dtype, ("torch",))
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return attend_read(query, lambda row: self.read(kept, row), kept.rows, selection, factor)

    def coded(self, kept: Kept) -> CodedRows | None:
        """Return the rows as levels and codes that selectors may read (`ReadsRoundedKeys`); None: they are no such."""
        return None

    @classmethod
    def class_name(cls) -> str:
        """Return the name in the registry, or `module:Class` of a codec of a user."""
        return NAMES.get(f"{cls.__module__}:{cls.__qualname__}") or identity(cls)
