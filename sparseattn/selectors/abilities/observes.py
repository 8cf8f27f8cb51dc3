"""Methods that learn from the weights that their selections got."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparseattn.core.selection import Selection


class Observes(ABC):
    """A method that is shown after every step what its rows weighed."""

    @abstractmethod
    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        """Learn what a decode step's selection got.

        The cache calls it after every step behind the first seal, of a step that names nothing too. What it learns lies
        in `State`. A step that `crop` takes back was observed all the same. A part of a method made of others is shown
        the whole method's selection, not its own.

        Args:
            selection: what was read.
            weights: `[B,H*G,S,span]` float32, the softmax weights of its rows over everything attended: sink, window
                and tail are in the denominator. 0 in slots that are not used. On the device of the sealed rows.
            total: `[B,H,G]` float32, the log-sum-exp of that softmax: the logarithm of its denominator. On the same
                device.
        """
