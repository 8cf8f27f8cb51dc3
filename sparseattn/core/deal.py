"""Which sealed rows a process keeps where they are dealt to several: whole units, one after another to each rank.

Unit u of a sequence's sealed rows, counted from the end of its sink, is rank `u % size`'s, so that every rank has near
and far rows, and what a selector keeps of a unit stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True, slots=True)
class Deal:
    """How sealed rows are dealt.

    Args:
        unit: rows that stay together.
        rank: of this process, from 0 on.
        size: ranks; 1: this process keeps every row.
    """

    unit: int
    rank: int = 0
    size: int = 1

    def hands(self, sealed: Sequence[int], each: Sequence[int]) -> list[Hand]:
        """Return what this rank keeps of the `each` rows that sequences seal behind `sealed` ones."""
        return [Hand.of(self, before, rows) for before, rows in zip(sealed, each, strict=True)]

    def most(self, sealed: int) -> int:
        """Return the most that any rank keeps of so many sealed rows of a sequence."""
        return -(-sealed // (self.unit * self.size)) * self.unit

    def numbers(self, valid: Tensor) -> Tensor:
        """Return which sealed row of its sequence, counted over all ranks, each row is that this rank keeps.

        Args:
            valid: `[B,N]` bool, rows of this rank that are no padding, in the order of their seals.

        Returns:
            `[B,N]` int64; of padding, any number.
        """
        here = valid.cumsum(1) - 1
        return (here // self.unit * self.size + self.rank) * self.unit + here % self.unit

    def part(self, rows: Count) -> tuple[Count, Count]:
        """Return where this rank's part begins and ends of `rows` rows that all ranks have, a number or a tensor of
        them: parts differ by one row at most."""
        return rows * self.rank // self.size, rows * (self.rank + 1) // self.size


@dataclass(frozen=True, slots=True)
class Hand:
    """What a rank is dealt of the rows that a sequence seals at once.

    Args:
        rows: how many it is dealt.
        all: how many are sealed.
        deal: by which rule.
        first: the number, among the units sealed, of the first that is this rank's.
    """

    rows: int
    all: int
    deal: Deal
    first: int

    @classmethod
    def of(cls, deal: Deal, sealed: int, rows: int) -> Hand:
        """Return what `deal` gives of `rows` rows, sealed behind `sealed` ones; whole units."""
        first, units = (deal.rank - sealed // deal.unit) % deal.size, rows // deal.unit
        return cls(len(range(first, units, deal.size)) * deal.unit, rows, deal, first)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Return `[units,unit,...]`, a view: the rows dealt, of `[N,...]` that begin with those sealed."""
        units = rows[: self.all].unflatten(0, (self.all // self.deal.unit, self.deal.unit))
        return units[self.first :: self.deal.size]
