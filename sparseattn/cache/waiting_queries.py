"""The queries of a selector that learns from them, from when they come until a seal hands them over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparseattn.cache import input_checks
from sparseattn.cache.query_buffers import LastQueries, Queries
from sparseattn.codecs.base import RowCodec
from sparseattn.core.row_buffer import State
from sparseattn.selectors.base import Selector


class Wanted(NamedTuple):
    """Which queries a selector or a codec learns from.

    Args:
        share: of the rows, 0 to 1.
        last: how many of the prompt's newest the first seal hands over.
        shown: how many of these the selector is shown, where a codec wants more; None: all.
        once: whether those of the share are wanted only until every sequence has sealed rows.
    """

    share: float
    last: int
    shown: int | None = None
    once: bool = False

    @classmethod
    def of(cls, selector: Selector, codec: RowCodec | None, unsealed: int) -> Wanted:
        """Of a selector and a codec; `unsealed`: rows that a first seal may leave. ValueError for bad numbers."""
        share, last = input_checks.queries_wanted(selector)
        if share == 1 and last:  # no query of the prompt is missing, however wide the window
            last = max(last, unsealed)
        return cls(share, last if codec is None else max(last, codec.last_queries), last, selector.all_learn_once)


class WaitingQueries:
    """Queries of a sample of the rows, each kept until its row is sealed, and the prompt's newest, until the first.

    Args:
        wanted: which.

    Attributes:
        sampled, last: those of the sample, and the newest.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.sampled, self.last, self._shown = Queries(wanted.share), LastQueries(wanted.last), wanted.shown
        self._once = wanted.once

    def wanted(self, sealed: Sequence[int]) -> bool:
        """Return whether rows come with their queries that are stored when so many of each sequence are sealed."""
        return self.sampling(sealed) or (self.last.wanted > 0 and not any(sealed))

    def sampling(self, sealed: Sequence[int]) -> bool:
        """Return whether queries of the sample are wanted when so many rows of each sequence are sealed."""
        return self.sampled.share > 0 and not (self._once and len(sealed) > 0 and min(sealed) > 0)

    @property
    def kept(self) -> Tensor | None:
        """`[B,H,G,m,D]`, queries that are kept; None where there are none to compare others with."""
        kept = next((buffer for buffer in (self.sampled, self.last) if buffer.allocated), None)
        return None if kept is None else kept.full

    def store(self, queries: Tensor, at: Tensor, sink: Tensor, last: bool, spare: int) -> None:
        """Keep what is wanted of `queries` `[B,H,G,n,D]` of rows at positions `at` `[B,n]`, negative for padding.

        Args:
            sink: `[B,n]` bool, rows of the sink, which no selector sees.
            last: whether the newest are wanted too, as before the first seal.
            spare: so many of the newest rows may be dropped again before it.
        """
        if self.sampled.share:
            self.sampled.store(queries, at.masked_fill(sink, -1))
        if self.last.wanted and last:
            self.last.store(queries, at, spare)

    def of_rows(
        self, positions: Tensor, device: torch.device | None, before: Sequence[int], sealed: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Give away the sampled queries `[B,H,G,m,D]` of the rows being sealed, at `positions` `[B,n]`, and their
        positions `[B,m]`, on `device` if that is not None; before, sealed: rows that were sealed, and that are."""
        if not self.sampling(before):
            return None, None
        queries, at = self.sampled.hand_over(positions)
        self.forget_unwanted(sealed)
        if device is not None and queries.device != device:
            there = torch.empty(queries.shape, dtype=queries.dtype, device=device)
            for b in range(queries.shape[0]):
                for h in range(queries.shape[1]):
                    there[b, h].copy_(queries[b, h])
            queries = there
        return queries, at.to(queries.device)

    def of_prompt(self, decoded: int) -> tuple[Tensor, Tensor]:
        """Give away the prompt's last queries and their positions, as `LastQueries.hand_over` does.

        Raises:
            ValueError: NaN or infinite queries on a GPU, where single rows were not looked at before.
        """
        queries, at = self.last.hand_over(decoded)
        if queries.is_cuda:
            input_checks.check_finite(queries=queries)
        return queries, at

    def shown(self, last: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what the selector is shown of the prompt's last queries, their positions, and the unsealed rows."""
        if self._shown is None or not last:
            return last
        queries, at, *rest = last
        return (queries[:, :, :, -self._shown :], at[:, -self._shown :], *rest) if self._shown else ()

    def require(self, gone: Sequence[int], count: Sequence[int]) -> None:
        """ValueError where the newest `gone` of `count` rows cannot be dropped, see `LastQueries.require`."""
        if self.last.allocated:
            self.last.require(gone, count)

    def drop(self, gone: Sequence[int], positions: Callable[[], Tensor], sealed: Sequence[int]) -> None:
        """Forget those of the newest `gone` rows of each sequence; `positions()` is `[B,n]`, negative for none; sealed:
        rows of each that are."""
        if self.last.allocated:
            self.last.drop(gone)
        if self.sampling(sealed):
            self.sampled.drop(positions())

    def forget_unwanted(self, sealed: Sequence[int]) -> None:
        """Free the sample's queries where none are wanted any more, so many rows of each sequence being sealed."""
        if self.sampled.allocated and not self.sampling(sealed):
            self.sampled.reset()

    def states(self) -> tuple[State, State]:
        """Return what is kept of each sequence."""
        return self.sampled, self.last

    def clone(self) -> WaitingQueries:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.sampled, twin.last = self.sampled.clone(), self.last.clone()
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes of the queries kept."""
        return self.sampled.nbytes + self.last.nbytes
