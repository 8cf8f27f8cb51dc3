"""Methods with rows of their own that stand for what a step does not read."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparseattn.core.context import StepContext
from sparseattn.core.selection import Selection, Tail


class HasTail(ABC):
    """A method that attends to rows of its own beside those it names, such as the mean of the values left out."""

    @abstractmethod
    def tail(self, query: Tensor, step: StepContext, selection: Selection) -> Tail | None:
        """Return the rows that stand for what this step does not read. The cache asks after `select`.

        Args:
            query, step: as `select` was given.
            selection: what is read.

        Returns:
            None: nothing is added.
        """
