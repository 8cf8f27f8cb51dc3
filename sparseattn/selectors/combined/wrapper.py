"""Methods around one other method: what they do not say themselves, that one does."""

from __future__ import annotations

from torch import Tensor

from sparseattn.core.selection import Selection
from sparseattn.core.step_cost import Scan
from sparseattn.selectors.base import Rows, Selector, StepContext


class Wrapper(Selector):
    """A method made of another, `inner`, which chooses and stores wherever the subclass does not.

    A subclass overrides what it does otherwise. The abilities of `inner` are its own, the cache finds them there, but
    for `EstimatesMass`, since a choice that is changed weighs something else. Nor is `check_state` passed on, since the
    wrapper has state too.

    Args:
        inner: the method, or its name, see `make_selector`.

    Raises:
        ValueError: an `inner` that is neither.
    """

    part_names = ("inner",)

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

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        return self.inner.select(query, step, budget)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan | None:
        return self.inner.scan(query, sealed, budget)
