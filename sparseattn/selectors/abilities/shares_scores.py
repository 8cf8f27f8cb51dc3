"""Methods whose rows may lie in several processes, since what they think of a row is known from it and the query."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from sparseattn.core.context import StepContext


class SharesScores(ABC):
    """A method that reads the candidates with the highest scores, and says these before it chooses.

    So processes that keep parts of a sequence can agree on the best of all (`KVCache(group=)`): their choice is then
    the one that a single process makes. A class that overrides `select` says its own scores too.

    Attributes:
        group: how a query group votes on its scores, see `vote`.
        page: rows of a candidate.
    """

    group: str
    page: int

    @abstractmethod
    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        """Return what each query head thinks of the candidates.

        Args:
            query: `[B,H,G,D]`, after RoPE.
            step: as `select` is given. Rows are those of this process, and `step.deal` says which of all they are.

        Returns:
            `[B,H,G,P]` float32, P candidates of `page` rows each, -inf for padding. A method that does not look at the
            query heads says `[B,H,1,P]`.
        """

    def why_not_compared(self) -> str | None:
        """Return why scores of rows in different processes are not those of one process, as the end of a sentence;
        None: they are. Where what scores a row is learned from other rows, they are not."""
        return None
