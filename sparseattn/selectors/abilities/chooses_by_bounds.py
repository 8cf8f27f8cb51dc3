"""Methods whose choice is that of the pages with the best bounds, as a kernel makes it with the attention at once."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparseattn.kernels.page_bounds.bounds import VotedBounds


class ChoosesByBounds(ABC):
    """A method that may choose nothing but the pages whose bounds are highest.

    Attributes:
        page: rows of a page, a power of two.
    """

    page: int

    @abstractmethod
    def voted_bounds(self, valid: Tensor, size: int) -> VotedBounds | None:
        """Return the bounds by whose order `select` chooses `budget // page` pages; None: it does anything else.

        Args:
            valid: `[B,N]` bool, the sealed rows that are no padding, as in `StepContext`.
            size: D.
        """
