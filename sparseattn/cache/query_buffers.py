"""The queries that a selector learns from: those of a sample of the rows, each kept until its row is sealed, and the
newest of the prompt, kept until the first seal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer


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
        """Keep the sampled of `queries` `[B,H,G,n,D]` at positions `at` `[B,n]`; none of a negative position."""
        wanted = sampled(at, self.share)
        more = wanted.sum(1)
        kept = self.held if self.held.shape == more.shape else torch.zeros_like(more)
        self.held = kept + more
        self.resize(int(self.held.max()), queries)
        for b in more.nonzero()[:, 0].tolist():
            rows = wanted[b].nonzero()[:, 0].to(queries.device)
            self.full[b, :, :, int(kept[b]) : int(self.held[b])] = queries[b].index_select(2, rows)

    def hand_over(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Give away the queries of each sequence's oldest rows, those at positions `at` `[B,n]`, negative for none.

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
        self.resize(int(self.held.max()))

    def take(self, index: Tensor) -> None:
        super().take(index)
        self.held = self.held[index.cpu()] if self.held.numel() else self.held

    def fresh(self) -> Queries:
        return Queries(self.share)

    def clone(self) -> Queries:
        twin = self.fresh()
        twin.rows, twin.held = self.rows, self.held  # held is replaced, never changed in place
        twin.storage = None if self.storage is None else self.storage.clone()
        return twin

    def reset(self) -> None:
        super().reset()
        self.held = self.held[:0]

    def saved(self) -> dict[str, Tensor]:
        return {**super().saved(), "held": self.held} if self.allocated else {}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        super().restore({name: part for name, part in tensors.items() if name != "held"}, device)
        self.held = tensors["held"].to("cpu", torch.int64)


class LastQueries(RowBuffer):
    """The newest queries `[B,H,G,m,D]` of each sequence, the newest last, zero in front of a shorter one.

    Args:
        wanted: how many are handed over, 0 none.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__(3)
        self.wanted = wanted
        self.at = torch.zeros(0, 0, dtype=torch.int64)  # [B,m] their positions on the CPU, -1 where there is none

    def store(self, queries: Tensor, at: Tensor, spare: int) -> None:
        """Take `queries` `[B,H,G,n,D]` of rows at positions `at` `[B,n]`, negative for padding.

        So many of the newest stay that, once one more and then `spare` of them are dropped, all that are wanted are
        there.
        """
        most, kept = self.wanted + 1 + spare, self.full if self.allocated else queries[:, :, :, :0]
        before = self.at if self.allocated else at[:, :0]
        both, old = torch.cat([before, at], 1), before.shape[1]
        chosen = [(mask >= 0).nonzero()[:, 0][-most:] for mask in both]
        size = max(map(len, chosen))
        self.at = torch.full((len(at), size), -1)
        self.storage = queries.new_zeros(*queries.shape[:3], size, queries.shape[4])
        self.rows = size
        for b, ids in enumerate(chosen):
            self.at[b, size - len(ids) :] = both[b, ids]
            for source, mine in ((kept, ids[ids < old]), (queries, ids[ids >= old] - old)):
                to = size - len(ids) + (int((ids < old).sum()) if source is queries else 0)
                taken = source[b].index_select(2, mine.to(source.device))
                self.storage[b, :, :, to : to + len(mine)] = taken

    def hand_over(self, newest: int) -> tuple[Tensor, Tensor]:
        """Give away all: of each sequence without its `newest` ones those that are wanted.

        Returns:
            `[B,H,G,wanted,D]`, zero in front of a shorter sequence, and their positions `[B,wanted]` int64 on the CPU,
            there -1.
        """
        kept, at = self.full, self.at
        stop = at.shape[1] - newest
        first = max(stop - self.wanted, 0)
        lacking = self.wanted - max(stop - first, 0)
        self.reset()
        queries = kept.new_zeros(*kept.shape[:3], self.wanted, kept.shape[4])
        queries[:, :, :, lacking:] = kept[:, :, :, first : max(stop, 0)]
        positions = torch.full((len(at), self.wanted), -1)
        positions[:, lacking:] = at[:, first : max(stop, 0)]
        return queries, positions

    def require(self, gone: Sequence[int], count: Sequence[int]) -> None:
        """ValueError where too few of the newest queries are left behind the drop of `gone` rows of `count` each."""
        for b, (rows, stored) in enumerate(zip(gone, count, strict=True)):
            left = max(int((self.at[b] >= 0).sum()) - rows, 0)
            if rows and left < min(self.wanted + 1, stored - rows):
                raise ValueError(
                    f"cannot drop {rows} rows of sequence {b} before the first seal: the last {self.wanted} queries of "
                    f"the prompt are to be handed over, and older ones are not kept; build the cache with "
                    f"rollback={max(gone)} or more"
                )

    def drop(self, gone: Sequence[int]) -> None:
        """Forgets the newest `gone` of each sequence."""
        kept = self.at.clone()
        for b, rows in enumerate(gone):
            real = (kept[b] >= 0).nonzero()[:, 0]
            kept[b, real[max(len(real) - rows, 0) :]] = -1
        stored = self.full
        self.rows, self.storage = 0, stored[:, :, :, :0]
        self.at, at = kept[:, :0], kept
        self.store(stored, at, stored.shape[3])

    def take(self, index: Tensor) -> None:
        super().take(index)
        self.at = self.at[index.cpu()] if self.allocated else self.at

    def fresh(self) -> LastQueries:
        return LastQueries(self.wanted)

    def clone(self) -> LastQueries:
        twin = self.fresh()
        twin.rows, twin.at = self.rows, self.at  # replaced, never changed in place
        twin.storage = None if self.storage is None else self.storage.clone()
        return twin

    def reset(self) -> None:
        super().reset()
        self.at = self.at[:0]

    def saved(self) -> dict[str, Tensor]:
        return {**super().saved(), "at": self.at} if self.allocated else {}

    def restore(self, tensors: Mapping[str, Tensor], device: torch.device | str) -> None:
        super().restore({name: part for name, part in tensors.items() if name != "at"}, device)
        self.at = tensors["at"].to("cpu", torch.int64)
