"""Methods that drop rows for good."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Evicts(ABC):
    """A method that drops rows, and never names them again."""

    @abstractmethod
    def held(self) -> Tensor | None:
        """Return which of the rows it was shown it still holds.

        Rows of padding may be either.

        Returns:
            `[B,H,N]` bool over the sealed rows in stored order, where they lie; None: all of them.
        """
