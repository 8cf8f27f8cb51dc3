"""Methods that can rank rows that another method lists, without a look at the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from torch import Tensor

from sparseattn.core.step_cost import Launch

Second = TypeVar("Second", bound="RanksListed")


class RanksListed(ABC):
    """A method whose index serves as the second of two stages (`TwoStage`): keys as they are stored, rows by lists."""

    group: str  # the vote of a query group

    def as_second(self: Second) -> Second:
        """Return it in the form that a second stage has: itself, or a copy without rows that keeps its name.

        Raises:
            ValueError: these settings have no such form; it says what to give instead.
        """
        return self

    @abstractmethod
    def stored_rows(self) -> int:
        """Return how many rows its index has."""

    @abstractmethod
    def extend(self, keys: Tensor) -> None:
        """Take keys `[B,H,n,D]` behind those in its index, in the order in which rows are stored."""

    @abstractmethod
    def forget(self, first: int) -> None:
        """Forget the rows from `first` on, a multiple of the method's unit."""

    @abstractmethod
    def best_listed(self, query: Tensor, valid: Tensor, pages: Tensor, page: int, count: int) -> tuple[Tensor, Tensor]:
        """Return of the rows of some pages those with the best votes, and what is read beside a row's own bytes.

        Args:
            query: `[B,H,G,D]`.
            valid: `[B,N]` bool, rows that are no padding.
            pages: integers `[B,H,P]`, listed for all of a KV head's query heads, or `[B,H*G,P]` for each; negative:
                none.
            page: rows of a page.
            count: rows chosen.

        Returns:
            `[B,Hs,S]` int32, -1 for none, and bytes `[B,H]` or `[B,H*G]` int64 for each list.
        """

    @abstractmethod
    def row_bytes(self, size: int) -> int:
        """Return the bytes that ranking reads of one row, of keys of `size` channels."""

    @abstractmethod
    def bytes_beside(self, size: int, sealed: int, rows: float, spans: float) -> float:
        """Return what else it is expected to read for a list of `rows` rows in so many spans, spread evenly over
        `sealed` rows."""

    @abstractmethod
    def listed_launches(self, query: Tensor, rows: float, few: float, lists: int) -> tuple[Launch, ...]:
        """Return the launches that rank `rows` listed rows, of which `few` are chosen for each of `lists` selection
        heads of a sequence; the bytes of the first are the caller's to fill in."""
