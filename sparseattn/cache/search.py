"""What a decode step asks of a selector: the rows of a query, and the tail beside them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from sparseattn.cache import input_checks, selection_checks
from sparseattn.cache.abilities import Abilities
from sparseattn.cache.at_once import StepAtOnce
from sparseattn.cache.rank_choice import RankChoice
from sparseattn.cache.ranks import Ranks
from sparseattn.cache.rows import StoredRows
from sparseattn.cache.written_in_place import only_read
from sparseattn.core.budget import Allowance
from sparseattn.core.mass import Promise, cut
from sparseattn.core.selection import Chosen, Selection, Tail, Weighed
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import Selector, StepContext


class Search:
    """Asks a cache's selector, tells it what it wants to know of a step, and keeps what it answered.

    Args:
        selector: whom it asks.
        stored: the rows of the cache.
        check: whether every selection is held against the contract (`selection_checks`).
        ranks: the processes that its rows are dealt to; None: this one has all.

    Attributes:
        abilities: which parts of the selector can do what.
        chosen: what the last step chose; None before the first.
        keep_choice: whether the next steps read what the last one chose, as long as no rows are sealed: drafts of one
            round may. The selector is not asked, and nothing is counted as read to choose.
        latest_tail: what was attended to beside it.
        latest_promise: what it holds by the selector's estimate, of a budget by mass.
        lookahead: `[B,H,G,D]`, the next query, as the layer before foresees it; of one step.
        pages_checked: whether scores of pages were held against the contract, which the first checked step does.
    """

    def __init__(self, selector: Selector, stored: StoredRows, check: bool, ranks: Ranks | None = None) -> None:
        self.selector, self.stored, self.check, self.ranks = selector, stored, check, ranks
        self._of_ranks = None if ranks is None else RankChoice.of(selector, stored, ranks)
        self._at_once = StepAtOnce.of(selector, stored)
        self.lookahead: Tensor | None = None
        self.abilities = Abilities.of(selector)
        self.pages_checked = self.keep_choice = False
        self.forget()

    def forget(self) -> None:
        """Let go of what was answered."""
        self.chosen: Chosen | None = None
        self._latest_sealed: list[int] = []  # rows of each sequence that it chose among, on all ranks together
        self.latest_tail: Tail | None = None
        self.latest_promise: Promise | None = None

    @property
    def latest(self) -> Selection | None:
        """The last selection; None before the first."""
        return None if self.chosen is None else self.chosen.selection

    def let_go(self) -> None:
        """Keep no storage alive that is about to be replaced."""
        if self._at_once is not None:
            self._at_once.let_go()

    def of(self, selector: Selector, stored: StoredRows) -> Search:
        """Return the search of a cache's clone, which foresees nothing."""
        twin = copy.copy(self)
        twin.selector, twin.stored, twin.abilities = selector, stored, Abilities.of(selector)
        twin.lookahead, twin._at_once = None, StepAtOnce.of(selector, stored)
        twin._of_ranks = None if self.ranks is None else RankChoice.of(selector, stored, self.ranks)
        return twin

    # -- what the selector is told -----------------------------------------------------------------------------------

    def step(self, unsealed_lse: Tensor | None = None, counted: bool = False) -> StepContext:
        """Return what the selector is told of a step at the newest token, see `StepContext`; once rows are sealed."""
        stored, sealed = self.stored, self.stored.sealed
        positions = stored.newest if sealed.device is None else torch.tensor(stored.zones.next) - 1
        there = sealed.valid.visible, stored.zones.here
        return StepContext(positions, *there, counted, unsealed_lse, self.lookahead, stored.deal)

    def foresee(self, ahead: Tensor) -> None:
        """Tell a selector that looks ahead (`LooksAhead`) what the layer before knew of the next query.

        Args:
            ahead: `[B,H,G,D]`, after RoPE: the query that this layer's projection makes of the input of the attention
                layer before. It holds for the next `select` or `decode` alone.

        Raises:
            ValueError: another shape, dtype or device than a query of this cache has, or NaN.
        """
        self.stored.require()
        input_checks.check_query(ahead, self.stored.keys.full)
        if not ahead.is_cuda:
            input_checks.check_finite(ahead=ahead)
        device = self.stored.sealed.device
        self.lookahead = ahead if device is None else ahead.to(device)

    def unsealed_lse(self, query: Tensor) -> Tensor:
        """Return what the rows weigh that every query reads, sink and unsealed ones.

        Args:
            query: `[B,H,G,D]`, on the cache's device.

        Returns:
            `[B,H,G]`: the natural logarithm of the sum of their exponentiated logits; -inf where there are none.
        """
        stored, nothing = self.stored, Selection.none(query.shape[0], query.shape[1], query.device)
        scale = 1 / self.selector.temperature(query.shape[3])
        keys, values = stored.keys.visible, stored.values.visible
        return attend(query, keys, values, nothing, stored.bounds, scale=scale)[1]

    # -- what it answers ---------------------------------------------------------------------------------------------

    def choose(
        self, query: Tensor, allowed: Allowance, unsealed_lse: Callable[[], Tensor] | None = None, counted: bool = False
    ) -> Selection:
        """Return the rows of a query, on the device of the sealed rows.

        Args:
            query: `[B,H,G,D]`, on the cache's device or on that of the sealed rows.
            allowed: what `KVCache.prepare` said.
            unsealed_lse: gives what `unsealed_lse` does, on the device of the sealed rows. For a mass it is asked once
                the selector has weighed its rows, so that what another device computes for it may take as long as the
                search. None: it is computed where it is needed, from a query on the cache's device, and counted with
                what choosing reads.
            counted: whether what choosing reads is counted.

        Raises:
            ContractError: with `check`, a selection that the contract does not allow.
        """
        if self.keep_choice and self.chosen is not None and self._latest_sealed == self.stored.zones.sealed:
            return self._kept(counted)
        if self.check:
            self.note_dropped()  # what it drops while it chooses, it may still read at this step
        wanted = allowed.mass is not None or self.abilities.weighs_unsealed
        there, weighed_here = query, unsealed_lse is None and wanted
        if self.stored.sealed.device is not None:
            there = query.to(self.stored.sealed.device)
        if weighed_here:
            unsealed_lse = lambda: self.unsealed_lse(query).to(there.device)  # noqa: E731
        self.latest_tail = self.latest_promise = None
        if self.check:
            with only_read(self.selector, query=there, **self._shown()):
                selection = self._chosen(there, allowed, unsealed_lse, counted)
        else:
            selection = self._chosen(there, allowed, unsealed_lse, counted)
        self._latest_sealed = [*self.stored.zones.sealed]
        self.lookahead = None  # it was of this step
        if weighed_here and counted:
            selection = self._also_read(selection)
        self.chosen = Chosen.of(selection)
        return selection

    @property
    def at_once(self) -> bool:
        """Whether a step may choose and attend at once: most methods choose by other things than bounds or codes, and
        what the last step chose may be asked for again."""
        return self._at_once is not None and not self.keep_choice

    def decoded(self, query: Tensor, rows: int, scale: float | None, impl: str | None) -> Tensor | None:
        """Choose and attend `at_once`, and keep what was chosen as `choose` does; None where that takes two calls, or
        where the query, or its sum, is not finite."""
        if self._at_once is None or (found := self._at_once(query, rows, scale, impl)) is None:
            return None
        out, self.chosen = found
        self.latest_tail = self.latest_promise = self.lookahead = None
        self._latest_sealed = [*self.stored.zones.sealed]
        return out

    def _shown(self) -> dict[str, Tensor]:
        """Return what the selector sees of the cache at a step, by the names that it has there."""
        if not self.stored.zones.zone:
            return {}
        return {"step.valid": self.stored.sealed.valid.visible, "step.positions": self.stored.newest}

    def _kept(self, counted: bool) -> Selection:
        """Return the last selection, whose choice cost nothing now."""
        kept = self.latest
        assert kept is not None
        self.latest_tail = self.latest_promise = self.lookahead = None
        if counted and kept.scan_bytes is not None:
            nothing = torch.zeros_like(kept.scan_bytes)
            scanned = None if kept.scanned is None else torch.zeros_like(kept.scanned)
            kept = dataclasses.replace(kept, scanned=scanned, scan_bytes=nothing)
            self.chosen = Chosen.of(kept)
        return kept

    def _chosen(
        self, query: Tensor, allowed: Allowance, unsealed_lse: Callable[[], Tensor] | None, counted: bool
    ) -> Selection:
        """`choose` on the device of the sealed rows, where `unsealed_lse` is given if it is needed."""
        (rows, mass), selector, stored = allowed, self.selector, self.stored
        if not stored.zones.zone:
            if self._of_ranks is not None and any(stored.zones.sealed):
                return self._of_ranks.select(query, None, rows)
            chosen = Selection.none(query.shape[0], query.shape[1], query.device)
            return chosen if mass is None else self._cut(Weighed.nothing(query), unsealed_lse, mass)
        step = self.step(
            unsealed_lse() if unsealed_lse is not None and self.abilities.weighs_unsealed else None, counted
        )
        weighed = None
        if self.check and not self.pages_checked:
            selection_checks.check_pages(query, selector)
            self.pages_checked = True
        if self._of_ranks is not None:
            chosen = self._of_ranks.select(query, step, rows)
        elif mass is None:
            chosen = selector.select(query, step, rows)
        else:
            assert isinstance(selector, EstimatesMass)  # `budget_of` refuses others
            weighed = selector.weigh(query, step, rows)
            chosen = weighed.selection
        if self.check:
            real, zone = stored.sealed_real, stored.zones.zone
            selection_checks.check(chosen, query, step.positions, rows, zone, real, selector)
        if counted:
            chosen = selector.counted(chosen, query, step, rows)
        if weighed is None or mass is None:
            return chosen
        if self.check:
            selection_checks.check_weighed(weighed, query, selector)
        return self._cut(dataclasses.replace(weighed, selection=chosen), unsealed_lse, mass)

    def _cut(self, weighed: Weighed, unsealed_lse: Callable[[], Tensor] | None, mass: float) -> Selection:
        assert unsealed_lse is not None
        chosen, self.latest_promise = cut(weighed, unsealed_lse(), mass)
        return chosen

    def _also_read(self, chosen: Selection) -> Selection:
        """Return it with the cost of `unsealed_lse`: the key of every row that it weighs, read before the step reads
        it."""
        bounds, keys = self.stored.bounds, self.stored.keys.full
        rows = (bounds.sink + bounds.rows - bounds.sealed).to(chosen.start.device, torch.int64)[:, None]  # [B,1]
        scanned = None if chosen.scanned is None else chosen.scanned + rows
        read = None
        if chosen.scan_bytes is not None:
            read = chosen.scan_bytes + rows * (keys.shape[3] * self.selector.bytes_of(keys))
        return dataclasses.replace(chosen, scanned=scanned, scan_bytes=read)

    def note_dropped(self) -> None:
        """Ask methods that evict what they hold; what they have dropped once they have dropped for good."""
        stored = self.stored
        if not stored.zones.zone:
            return
        for part in self.abilities.evictors:
            if (mask := part.held()) is not None:
                input_checks.check_held(mask, stored.sealed.real.data, self.selector)
                stored.sealed.drop(mask)

    def tail(self, query: Tensor, selection: Selection) -> Tail | None:
        """Return rows that the selector adds for what this selection of `choose` does not read, None for none. They are
        part of the step: `decode` attends to them too, and merges.

        Args:
            query: `[B,H,G,D]`, on the device of the sealed rows.

        Raises:
            ContractError: with `check`, a tail that the contract does not allow.
        """
        part = self.abilities.tail
        if part is None or not self.stored.zones.zone:
            return None
        step = self.step()
        if not self.check:
            self.latest_tail = part.tail(query, step, selection)
        else:
            with only_read(self.selector, query=query, **self._shown()):
                self.latest_tail = part.tail(query, step, selection)
            selection_checks.check_tail(self.latest_tail, query, step.positions, self.selector)
        return self.latest_tail

    @property
    def tokens_followed(self) -> int:
        """Of how many tokens of a dense pass over stored rows the selector, or a part of it, is shown the queries; 0:
        none, as before rows are sealed."""
        followers = self.abilities.check_followers
        return max(part.tokens_followed for part in followers) if followers and self.stored.zones.zone else 0

    def checked(self, queries: Tensor, total: Tensor) -> None:
        """Tell the parts that follow dense passes about one, see `FollowsChecks`.

        Args:
            queries: `[B,H,G,n,D]`, of the pass's newest tokens, `tokens_followed` of them where it has so many.
            total: `[B,H,G,n]` float32, +inf for padding.
        """
        if (device := self.stored.sealed.device) is not None:
            queries, total = queries.to(device), total.to(device)
        for part in self.abilities.check_followers:
            newest = slice(-part.tokens_followed, None)
            part.checked(queries[:, :, :, newest].flatten(2, 3), total[..., newest].flatten(2, 3))

    @property
    def observed(self) -> bool:
        """Whether the selector, or a part of it, learns from what a step's selection got."""
        return bool(self.abilities.observers) and self.stored.zones.zone > 0

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        """Tell parts that observe what a step's selection got, see `Observes`."""
        for part in self.abilities.observers:
            part.observe(selection, weights, total)
