"""The queries that a selector learns from: those of a sample of the unsealed rows, kept until their rows are sealed."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseattn.storage import RowBuffer


def sampled(positions: Tensor, share: float) -> Tensor:
    """Which rows at `positions` `[B,n]` int64 are in the sample of `share` (0 to 1); a negative position never is.

    Row p is if `floor((p+1) * share) > floor(p * share)`: evenly spaced, and of the token's position alone, so that
    padding, chunks and batches change nothing.
    """
    at = positions.double()
    return (positions >= 0) & (((at + 1) * share).floor() > (at * share).floor())


class Queries(RowBuffer):
    """Queries `[B,H,G,m,D]` of the sampled rows, the oldest first; `held` `[B]` of them are real.

    Args:
        share: of the rows that are in the sample, 0 to 1.
    """

    def __init__(self, share: float) -> None:
        super().__init__(3)
        self.share = share
        self.held = torch.zeros(0, dtype=torch.int64)  # on the CPU

    def store(self, queries: Tensor, at: Tensor) -> None:
        """Keeps the sampled of `queries` `[B,H,G,n,D]` at positions `at` `[B,n]`; none of a negative position."""
        wanted = sampled(at, self.share)
        more = wanted.sum(1)
        held = self.held if self.held.shape == more.shape else torch.zeros_like(more)
        self.held = held + more
        self.resize(int(self.held.max()), queries)
        for b in more.nonzero()[:, 0].tolist():
            rows = wanted[b].nonzero()[:, 0].to(queries.device)
            self.full[b, :, :, int(held[b]) : int(self.held[b])] = queries[b].index_select(2, rows)

    def hand_over(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Gives away the queries of each sequence's oldest rows, those at positions `at` `[B,n]`, negative for none.

        Returns:
            `[B,H,G,m,D]`, zero where a sequence has fewer, and their positions `[B,m]` int64 on the CPU, there -1.
        """
        gone = sampled(at, self.share)
        count = gone.sum(1)
        most, left, given = int(count.max()), self.held - count, self.full
        super().reset()  # a prefill's queries can be several times its keys: their storage goes with them
        self.resize(int(left.max()), given)
        positions = torch.full((at.shape[0], most), -1)
        for b in range(at.shape[0]):
            first, last = int(count[b]), int(self.held[b])
            positions[b, :first] = at[b][gone[b]]
            self.full[b, :, :, : last - first] = given[b, :, :, first:last]
            given[b, :, :, first:most] = 0
        self.held = left
        return given[:, :, :, :most], positions

    def drop(self, at: Tensor) -> None:
        """Forgets the newest queries: those of rows dropped from positions `at` `[B,n]`, negative for none."""
        self.held = self.held - sampled(at, self.share).sum(1)
        self.resize(int(self.held.max()), self.full)

    def take(self, index: Tensor) -> None:
        super().take(index)
        self.held = self.held[index.cpu()] if self.held.numel() else self.held

    def fresh(self) -> Queries:
        return Queries(self.share)

    def clone(self) -> Queries:
        twin = self.fresh()
        twin.rows, twin.held = self.rows, self.held  # held is replaced, never changed in place
        twin._data = None if self._data is None else self._data.clone()
        return twin

    def reset(self) -> None:
        super().reset()
        self.held = self.held[:0]
