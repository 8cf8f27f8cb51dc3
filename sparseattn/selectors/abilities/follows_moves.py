"""Methods whose state follows rows that `KVCache.compact` moves."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class FollowsMoves(ABC):
    """A method whose rows can be freed: one that evicts, or keeps something for every row that another one evicts."""

    @abstractmethod
    def keep(self, ids: Tensor) -> None:
        """Follow rows that have moved: place i of a head now holds what place `ids[..., i]` held.

        Buffers `[B,H,N,...]` follow with `RowBuffer.keep`. `Evicts.held` is over the K places from then on.
        `ReadsKeys.stored` still shows the places as they were.

        Args:
            ids: `[B,H,K]` int64, distinct in each head: the places it holds there, in rising order, then some that it
                does not hold, which fill up to K and stay dropped.
        """
