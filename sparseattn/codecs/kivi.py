"""Keys per channel and values per token in 2, 4 or 8 bits. KIVI, https://arxiv.org/abs/2402.02750."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sparseattn.codecs.base import GROUP, ROW, Kept, NewRows, RowCodec
from sparseattn.core.selection import Selection
from sparseattn.kernels.attend_quantized.dispatch import attend_coded
from sparseattn.kernels.attend_quantized.reference import CHANNELS, PARTS, CodedRows, check_bits, encode, width


class Kivi(RowCodec):
    """Rounds keys by channel over groups of rows, and values by row in groups of 32 channels.

    Both are read as `low + step * code`. KIVI keeps the last 128 rows in full precision; a cache's window and waiting
    rows do that here. `low` is rounded down and `step` up, where KIVI rounds to the nearest, so that no number is more
    than half a step off and the levels bound the keys (`Levels`).

    Args:
        bits: 2, 4 or 8.
        group: rows of keys that share levels, a power of two from 8 on; KIVI's is 32.
    """

    shows_levels = True
    parts: ClassVar[Mapping[str, str]] = {"keys": ROW, "key_levels": GROUP, "values": ROW, "value_levels": ROW}

    def __init__(self, bits: int = 2, group: int = 32) -> None:
        check_bits(bits)
        check_group(group)
        self.bits, self.group = bits, group

    def encode(self, rows: NewRows) -> dict[str, Tensor]:
        made = encode(rows.keys, rows.values, self.bits, self.group)
        return {name: getattr(made, name) for name in PARTS}

    def read(self, kept: Kept, row: Tensor) -> tuple[Tensor, Tensor]:
        return self.coded(kept).taken(row)

    def entry_bytes(self, size: int) -> dict[str, int]:
        codes, levels = width(size, self.bits), 4 * -(-size // CHANNELS)
        return {"keys": codes, "key_levels": 4 * size, "values": codes, "value_levels": levels}

    def coded(self, kept: Kept) -> CodedRows:
        return CodedRows(**{name: kept.part(name) for name in PARTS}, bits=self.bits, group=self.group)

    def attend(
        self, query: Tensor, kept: Kept, selection: Selection, scale: float | None, impl: str | None
    ) -> tuple[Tensor, Tensor]:
        return attend_coded(query, self.coded(kept), selection, scale=scale, impl=impl)


def check_group(group: int) -> None:
    """ValueError for a number of rows that do not share levels."""
    if type(group) is not int or not 8 <= group <= 1024 or group & (group - 1):
        raise ValueError(f"group is a power of two rows of keys that share levels, 8 to 1024, got {group!r}")
