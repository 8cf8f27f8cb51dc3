"""Methods that choose by nothing but bounds or codes of keys, as a kernel does in one call with the attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

from torch import Tensor

from sparseattn.kernels.page_bounds.bounds import VotedBounds
from sparseattn.kernels.product_codes.codes import RankedCodes
from sparseattn.kernels.quantized_keys.keys import QuantizedKeys

ChosenBy: TypeAlias = VotedBounds | QuantizedKeys | RankedCodes


class ChoosesAtOnce(ABC):
    """A method whose choice a kernel may make together with the attention.

    Attributes:
        page: rows of a page, a power of two; 1 where codes of keys choose.
    """

    page: int

    @abstractmethod
    def chosen_by(self, valid: Tensor, size: int) -> ChosenBy | None:
        """Return that by whose order `select` chooses `budget // page` pages: bounds, or keys of few bits or product
        codes by which a group votes by "softmax". None: it does anything else. The same object until rows are sealed or
        moved.

        Args:
            valid: `[B,N]` bool, the sealed rows that are no padding, as in `StepContext`.
            size: D.
        """
