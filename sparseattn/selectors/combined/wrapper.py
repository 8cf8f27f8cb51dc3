"""Methods around one other method: what they do not say themselves, that one does."""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.selection import Selection, Tail
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.base import Rows, Selector


class Wrapper(Selector):
    """A method made of another, `inner`, which chooses, stores and learns wherever the subclass does not.

    A subclass overrides what it does otherwise. Not passed on is what would be wrong of most: `weigh` (`estimates` is
    False), since a choice that is changed weighs something else, and `check_state`, since the wrapper has state too.

    Args:
        inner: the method, or its name, see `make_selector`.

    Raises:
        ValueError: an `inner` that is neither.
    """

    def __init__(self, inner: Selector | str) -> None:
        from sparseattn.selectors.registry import as_selector  # which knows the wrappers too

        self.inner = as_selector(inner)
        self.span, self.uses_budget = self.inner.span, self.inner.uses_budget

    def allowed(self, budget: int) -> int:
        return self.inner.allowed(budget)

    def fix(self, rows: int, seal: int) -> None:
        self.inner.fix(rows, seal)

    def append(self, rows: Rows) -> Tensor | None:
        return self.inner.append(rows)

    def select(self, query: Tensor, positions: Tensor, budget: int) -> Selection:
        return self.inner.select(query, positions, budget)

    def cost(self, query: Tensor, sealed: int, budget: int) -> Scan:
        return self.inner.cost(query, sealed, budget)

    def keep(self, ids: Tensor) -> None:
        self.inner.keep(ids)

    def observe(self, selection: Selection, weights: Tensor) -> None:
        self.inner.observe(selection, weights)

    def tail(self, query: Tensor, positions: Tensor, selection: Selection) -> Tail | None:
        return self.inner.tail(query, positions, selection)
