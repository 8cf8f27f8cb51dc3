"""Methods that are shown the queries of passes in which full attention reads every row."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class FollowsChecks(ABC):
    """A method that is told of each dense pass over stored rows, such as full attention's check of drafts.

    Attributes:
        tokens_followed: of how many of a pass's tokens, the newest, it is shown the queries: by default all of the
            longest check of drafts, 16 and the token before them.
    """

    tokens_followed: int = 17

    @abstractmethod
    def checked(self, queries: Tensor, total: Tensor) -> None:
        """Learn of a dense pass, once rows are sealed and before those of the pass are stored.

        A plain dense step is one too, so what only a sparse step needs is best made there.

        A pass over tokens that are taken back later (`crop`) was told all the same. What is learned lies in `State`.

        Args:
            queries: `[B,H,M,D]`, after RoPE, of the pass's newest tokens and of all heads of each KV head's group.
            total: `[B,H,M]` float32, the log-sum-exp of each query's logits over every row that it read, stored ones
                and those of the pass; +inf for padding, which gives no row any weight.
        """
