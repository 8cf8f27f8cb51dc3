"""Methods whose index has an entry for every few rows and whose choice is of whole pages by a score.

Quest is the first of them, https://arxiv.org/abs/2406.10774. What an entry holds and how pages score is all that such a
method says: a `KVCache` keeps the entries of a sequence side by side, a serving engine
(`sparseattn.serving.vllm`) in the order of its blocks, as PagedAttention has them, https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from sparseattn.core.row_buffer import RowBuffer
from sparseattn.core.selection import Selection, Weighed
from sparseattn.core.step_cost import Launch, Scan
from sparseattn.kernels.page_bounds.bounds import VotedBounds
from sparseattn.kernels.topk.dispatch import best_pages, best_rows
from sparseattn.selectors.abilities import EstimatesMass, SharesScores
from sparseattn.selectors.base import Rows, Selector, StepContext, vote
from sparseattn.selectors.checks import check_group
from sparseattn.selectors.pages.score_checks import check_scores
from sparseattn.selectors.saved_state import Loaded, check_finite, check_no_order, check_tensors

Entries: TypeAlias = Mapping[str, Tensor]


class PageSelector(EstimatesMass, SharesScores, Selector):
    """Chooses pages of `page` rows by a score, from entries of `unit` rows that their keys alone decide.

    A subclass names the tensors of an entry (`entry_names`), computes them (`entries`) and scores them (`scores`). That
    is enough for every cache; `scores_at` may be overridden for speed.

    Args:
        page: rows of a page, a power of two.
        group: how a query group votes, see `vote`.

    Attributes:
        entry_names: names of an entry's tensors. Each is an attribute, a `RowBuffer` of `[B,H,E,..]`, E entries.
        kernel: kind of the launch that scores, see `core.step_cost.KINDS`.
        mass: whether a score estimates the logarithm of the sum of the page's exponentiated logits; else it is on the
            scale of one row's logit.
    """

    entry_names: tuple[str, ...] = ()
    _shown: tuple[Tensor, Entries, Tensor] | None = None
    mass: bool = False
    kernel: str = "bounds"

    def __init__(self, page: int, group: str) -> None:
        if page < 1 or page & (page - 1):
            raise ValueError(f"a page is a power of two rows, got {page}")
        self.page, self.group = page, check_group(group)
        self.span = page
        for name in self.entry_names:
            setattr(self, name, RowBuffer(2))

    # -- what a method says ------------------------------------------------------------------------------------------

    @abstractmethod
    def entries(self, keys: Tensor) -> dict[str, Tensor]:
        """Return the entries of E times `unit` rows.

        Args:
            keys: `[B,H,E*unit,D]`, after RoPE; the elements of a row are adjacent.

        Returns:
            name -> `[B,H,E,..]` for every name of `entry_names`: what one holds depends on its own rows alone.
        """

    def entries_at(self, keys: Tensor, first: Tensor) -> dict[str, Tensor]:
        """Return `entries` where sequences share them, and positions of rows may count.

        Args:
            keys: see `entries`.
            first: `[E]` int64, the position of each entry's first row.
        """
        return self.entries(keys)

    @abstractmethod
    def scores(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        """Return how much pages promise, the group's vote included.

        Args:
            query: `[B,H,G,D]`, after RoPE.
            entries: name -> `[B,H,E,..]`, of the query's dtype or what `entries` made of it.
            real: `[B,E]` bool; an entry that is not may hold anything.

        Returns:
            `[B,Hs,P]` float32, P = E * unit / page, -inf where an entry is not real. For a vote by probabilities and
            for budgets by mass, on the scale of the layer's logits (`temperature`).
        """

    def scores_at(self, query: Tensor, store: Entries, table: Tensor) -> Tensor:
        """Score as `scores` does where sequences share one store of entries, as the blocks of a serving engine are
        shared.

        Args:
            query: `[B,H,G,D]`.
            store: name -> `[entries,H,..]`.
            table: `[B,E]` int32, which entry of the store is a sequence's; negative: none.

        Returns:
            As `scores`.
        """
        place = table.long().clamp(min=0)
        own = {name: entries[place].transpose(1, 2) for name, entries in store.items()}
        return self.scores(query, own, table >= 0)

    def bounds_at(self, store: Entries, size: int) -> VotedBounds | None:
        """Return the bounds by which `scores_at` scores pages, so that a kernel may choose and attend at once; None:
        its scores are other ones.

        Args:
            store: name -> `[entries,H,..]`.
            size: D.
        """
        return None

    def best_at(self, query: Tensor, store: Entries, table: Tensor, count: int) -> Tensor:
        """Return the `count` pages with the highest `scores_at`, counted over the table's entries.

        Args:
            query, store, table: see `scores_at`.

        Returns:
            `[B,Hs,S]` int32, -1 for none, S at most `count`.
        """
        return best_rows(self.scores_at(query, store, table), count)

    def page_logits(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        """Return what a page weighs for each query head, by the method's estimate: for budgets by mass (`weigh`).

        By default `scores` where every query head chooses for itself: right for scores that estimate a logit, too large
        for those that bound one.

        Args:
            query, entries, real: as of `scores`.

        Returns:
            `[B,H,G,P]` float32: the logarithm of the mean exponentiated logit of a page's rows, -inf where an entry is
            not real.
        """
        scores = self._of_heads(query, entries, real)
        return scores - math.log(self.page) if self.mass else scores

    def head_scores(self, query: Tensor, step: StepContext) -> Tensor:
        return self._of_heads(query, *self._entries_of(step.valid))

    def why_not_shared(self) -> str | None:
        """Return why its entries cannot lie in a store that sequences share, as the end of a sentence; None: they
        can."""
        return None

    # -- what every cache needs --------------------------------------------------------------------------------------

    def fix(self, rows: int, seal: int) -> None:
        for name in self.entry_names:
            getattr(self, name).fix(rows // self.unit)

    def append(self, rows: Rows) -> None:
        for name, part in self._checked_entries(rows.keys).items():
            getattr(self, name).append(part)

    def check_state(self, state: Loaded, rows: Rows, order: Tensor | None) -> None:
        """Tell an entry's shape and dtype by making one."""
        check_no_order(order)
        count = rows.keys.shape[2] // self.unit
        entry = self.entries(rows.keys[:, :, : self.unit])
        check_tensors(
            state, {name: (part.dtype, (*part.shape[:2], count, *part.shape[3:])) for name, part in entry.items()}
        )
        check_finite(state, *(name for name, part in entry.items() if part.is_floating_point()))

    def select(self, query: Tensor, step: StepContext, budget: int) -> Selection:
        if budget < self.page:
            self._refuse(budget)
        return self._best(self._scored(query, *self._entries_of(step.valid)), budget)

    def weigh(self, query: Tensor, step: StepContext, budget: int) -> Weighed:
        if budget < self.page:
            self._refuse(budget)
        logits = self.page_logits(query, *self._entries_of(step.valid))
        selection = self._best(vote(logits, self.group), budget)
        return Weighed.of(self.counted(selection, query, step, budget), self.fitted(logits), self.page)

    def scan(self, query: Tensor, sealed: int, budget: int) -> Scan:
        batch, heads, members, _ = query.shape
        entry_bytes, numbers = (sealed // self.unit * part for part in self.entry_size(query))
        pages, read = sealed // self.page, entry_bytes + self.bytes_once(query)
        scoring = Launch(self.kernel, batch * heads * read, 2.0 * batch * heads * members * numbers)
        counts = pages, min(budget, sealed) // self.page
        return self.ranked(query, Scan(pages, read), [scoring], counts, group=self.group, page=self.page)

    def bytes_once(self, query: Tensor) -> int:
        """Return the bytes that scoring reads for a KV head whatever the number of pages; by default none."""
        return 0

    def entry_size(self, query: Tensor) -> tuple[int, int]:
        """Return the bytes that are read of one entry of a KV head, and the numbers in it, for a query `[B,H,G,D]`."""
        if self.entry_names and getattr(self, self.entry_names[0]).rows:
            entry = {name: getattr(self, name).full[:1, :1, :1] for name in self.entry_names}
        else:
            keys = torch.zeros(1, 1, self.unit, query.shape[3], dtype=query.dtype)
            entry = self.for_layer(self.layer_context).entries(keys)
        read = sum(self.bytes_of(part) * math.prod(part.shape[3:]) for part in entry.values())
        return read, sum(math.prod(part.shape[3:]) for part in entry.values())

    def _checked_entries(self, keys: Tensor) -> dict[str, Tensor]:
        """Return `entries`; ValueError for a subclass that was not initialised, or for other names or shapes."""
        method = type(self).__name__
        if not all(isinstance(getattr(self, name, None), RowBuffer) for name in self.entry_names):
            raise ValueError(
                f"{method}.__init__ has not called super().__init__(page, group): call it, as it sets page and group "
                f"and makes a buffer for each of entry_names"
            )
        made = self.entries(keys)
        if set(made) != set(self.entry_names):
            raise ValueError(
                f"entries of {method} returned {', '.join(made) or 'nothing'}, and its entry_names are "
                f"{', '.join(self.entry_names) or 'empty'}: they must be the same"
            )
        wanted = [*keys.shape[:2], keys.shape[2] // self.unit]
        for name, part in made.items():
            if list(part.shape[:3]) != wanted:
                raise ValueError(
                    f"entries of {method} returned {name} as {list(part.shape)} for keys {list(keys.shape)}: it must "
                    f"be [B,H,E,..] = [{', '.join(map(str, wanted))},..], one entry for every {self.unit} rows"
                )
        return made

    def _scored(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        """Return `scores`; ValueError for another shape."""
        made = next(iter(entries.values()), real[:, None])
        pages, scores = made.shape[2] * self.unit // self.page, self.scores(query, entries, real)
        if scores.shape != (*query.shape[:2], pages):  # as nearly all are
            check_scores(type(self).__name__, scores, query, pages)
        return scores

    def _of_heads(self, query: Tensor, entries: Entries, real: Tensor) -> Tensor:
        """Return `scores` where every query head chooses for itself: `[B,H,G,P]`."""
        each = copy.copy(self)
        each.group = "each"
        return each._scored(query, entries, real).unflatten(1, query.shape[1:3])

    def _refuse(self, budget: int) -> NoReturn:
        raise ValueError(f"{self} reads whole pages: its budget is at least {self.page} rows, got {budget}")

    def _entries(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).visible for name in self.entry_names}

    def _entries_of(self, valid: Tensor) -> tuple[Entries, Tensor]:
        """Return what `scores` takes: the entries and which are real, by the rows `[B,N]` bool that are no padding.

        Both are made once for each seal, behind which `valid` is another tensor; in storage of a fixed size it is not.
        """
        if self._shown is None or self._shown[0] is not valid or self.fixed_for_cache:
            self._shown = valid, self._entries(), self.valid_entries(valid)
        _, entries, real = self._shown
        return entries, real

    def _forget_views(self) -> None:
        super()._forget_views()
        self._shown = None

    def valid_entries(self, valid: Tensor) -> Tensor:
        """Return what `scores` takes as `real`, of the rows `[B,N]` bool that are no padding, which comes in whole
        entries."""
        return valid[:, :: self.unit].contiguous()  # as kernels read it

    def _best(self, scores: Tensor, budget: int) -> Selection:
        """Return the best pages by `scores` `[B,Hs,P]` within `budget` rows."""
        start, length = best_pages(scores, budget // self.page, self.page)
        return Selection(start, length, self.page, whole=True)
