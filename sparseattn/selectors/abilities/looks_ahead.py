"""Methods that choose by a query foreseen from the layer before."""

from __future__ import annotations


class LooksAhead:
    """A method whose `select` goes by `StepContext.lookahead`, which `Search.foresee` of a cache brings."""
