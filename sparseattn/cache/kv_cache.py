"""The keys and values of one layer, with the selector that indexes them, and when their rows are sealed.

`append` stores, `seal` shows finished rows to the selector and lets it order them. A selector sees sealed rows only, so
nothing it names is counted twice; sink and recent rows are read by every query. Where rows lie is `StoredRows`' matter.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparseattn.cache import input_checks, selection_checks
from sparseattn.cache.abilities import Abilities
from sparseattn.cache.index_files import append_kept, usable_folder
from sparseattn.cache.layout import Zones
from sparseattn.cache.quantized_rows import SealedCodes
from sparseattn.cache.rows import StoredRows
from sparseattn.cache.state_checks import append_first
from sparseattn.core.budget import Budget, Mass, budget_of, parse_budget
from sparseattn.core.mass import Promise, cut
from sparseattn.core.selection import Bounds, Selection, Tail, Weighed
from sparseattn.kernels.attend.dispatch import attend
from sparseattn.kernels.attend_quantized.reference import CodedRows
from sparseattn.selectors.abilities import EstimatesMass
from sparseattn.selectors.base import Selector, StepContext
from sparseattn.selectors.registry import as_selector
from sparseattn.utils.tensors import only_tensors

GROUP = 32  # rows of keys of a few bits that share levels, KIVI's


def unit_of(selector: Selector, bits: int | None = None, group: int = GROUP) -> int:
    """Rows are sealed in multiples of this: the selector's unit, and with `bits` whole groups of `group` rows."""
    return selector.unit if bits is None else math.lcm(selector.unit, group)


def check_seal(selector: Selector, seal: int, bits: int | None = None, group: int = GROUP) -> None:
    """ValueError where `seal` rows at a time are less than a unit."""
    if seal < (unit := unit_of(selector, bits, group)):
        whose = "" if bits is None else f" and of groups of {group} rows"
        raise ValueError(f"seal is at least the unit of {selector!r}{whose}, {unit} rows, got {seal}")


class Allowance(NamedTuple):
    """What a budget allows at a step.

    Args:
        rows: rows per head beyond sink and window, 1 or more.
        mass: the share of the attention that is to be held; None where the budget is no mass, or the selector has no
            use for it.
    """

    rows: int
    mass: float | None


class KVCache:
    """Keys and values of B sequences and H heads, with the selector that indexes them.

    Each sequence is stored without its padding: sink and recent rows are its first and last *real* rows, so a padded
    batch gives what the unpadded sequences give. Where sequences differ in length, the sealed zone holds whole spans of
    zeros, which selectors are told never to select (`Zones`).

    Args:
        selector: chooses among the sealed rows; the cache owns it from here on. A text is for `make_selector`.
        sink: first rows of each sequence, read by every query; 0 or more.
        window: last rows, read by every query, the current token's included; 0 or more. "1+2047" of SAAP is sink 1,
            window 2047; "128+512" of RetrievalAttention sink 128, window 512.
        seal: rows that must wait beyond the window before decoding seals them (the first decode seals whatever it
            can). At most `seal - 1` waiting rows are read densely, so for measuring quality set it to the selector's
            span, for speed leave it at 1024. At least the span. The sequences of a batch seal together: above the span,
            a short one may read fewer waiting rows than alone, and out of phase up to a span more wait.
        rollback: newest rows beyond the window kept unsealed so that `crop` can drop them (speculative decoding).
        capacity: rows to allocate at once, with `sealed_device` there; 0 grows by half when full, which copies what is
            stored: at the first seal after a prefill, where there is no capacity for more.
        fixed: `capacity` rows a sequence are all there will be (of several sequences a span less one: padding), and
            what a step reads keeps its address and shape, the selector's index too: a CUDA graph of `decode`, captured
            once rows are sealed, stays right while tokens are appended and sealed (`seal`) between its replays, and
            after `reset` with a batch of the same shape. A share as budget is then of the context at the capture.
        sealed_device: "cpu" keeps sealed rows in host memory (pinned where there is CUDA), where the selector then
            lives and searches: device memory holds sink and recent rows and does not grow with the context
            (RetrievalAttention, https://arxiv.org/abs/2409.10516). Call `seal` after each layer's prefill, so that one
            prefill at a time lies on the device. None: sealed rows lie between sink and recent rows.
        indexes: folder of index files (`index_files`): the first seal takes the index of the same rows from there if it
            can, and writes it there if it had to build it. Made if it is not there; it only ever grows.
        bits: 8 or 4: keep sealed rows in so many bits (`kernels.attend_quantized.reference`), keys by channel and
            values by row, as KIVI does (https://arxiv.org/abs/2402.02750); sink and rows that are not sealed stay as
            they come. A selector is shown the rows as they came, once: none that scores stored keys
            (`ReadsKeys`) or learns from weights (`Observes`) can be had. None (default): nothing is
            rounded.
        group: with `bits`, rows of keys that share a channel's levels, a power of two; rows are sealed in multiples of
            it. KIVI's is 32.
        exact: with `bits`, whether sealed rows are kept as they came too, for comparing with full attention over them
            (`evaluation.step_measures.compare`): memory grows, what a step reads does not.
        check: whether every selection is held against the contract (`selection_checks.check`), which makes the host
            wait: comparisons and tests do, decoding for its own sake does not.

    Raises:
        ValueError: an unknown selector, a negative size, `seal` below the selector's unit, a `queries_share` that is no
            share, `last_queries` that are no number, a `sealed_device` other than host memory, `indexes` that cannot be
            a folder, or `fixed` without a capacity for more than the sink, with a `sealed_device`, or with a selector
            whose step the host takes part in; other `bits` than 8 and 4, `bits` with `fixed` or with a selector that
            cannot go without exact rows, or a `group` that is no power of two.

    A selector serves one cache; give each layer its own with `selector.for_layer(i)`.
    """

    def __init__(
        self,
        selector: Selector | str,
        *,
        sink: int = 4,
        window: int = 64,
        seal: int = 1024,
        rollback: int = 0,
        capacity: int = 0,
        fixed: bool = False,
        sealed_device: torch.device | str | None = None,
        indexes: str | os.PathLike[str] | None = None,
        bits: int | None = None,
        group: int = GROUP,
        exact: bool = False,
        check: bool = False,
    ) -> None:
        selector = as_selector(selector)
        input_checks.parts_declared(selector)
        sizes = {"sink": sink, "window": window, "rollback": rollback, "capacity": capacity, "seal": seal}
        for name, size in sizes.items():
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} is 0 or more rows, an int, got {size!r}")
        self.bits, self.group, self.exact = bits, group, exact
        if bits is not None:
            input_checks.roundable(selector, bits, group, fixed)
        input_checks.levels(selector, bits, group)
        self.selector = selector
        check_seal(selector, seal, bits, group)
        input_checks.loose(selector)
        self.sink, self.window, self.seal_rows, self.rollback = sink, window, seal, rollback
        self.sealed_device, self.fixed = input_checks.sealed_device(sealed_device), fixed
        self.indexes = None if indexes is None else usable_folder(indexes)
        self.check = check
        near = capacity
        if self.sealed_device is not None or bits is not None:
            near = (
                sink + window + rollback + seal + unit_of(selector, bits, group)
            )  # after a seal, room until the next one
        if self.sealed_device is not None:
            selector.to(self.sealed_device)
        learned = input_checks.queries_wanted(selector)
        if learned[0] == 1 and learned[1]:  # no query of the prompt is missing, however wide the window
            learned = learned[0], max(learned[1], window + rollback + unit_of(selector, bits, group))
        codes = None if bits is None else SealedCodes(bits, group, capacity)
        self._stored = StoredRows(sink, near, capacity, self.sealed_device, *learned, codes, exact)
        self._abilities, self._learns = Abilities.of(selector), any(learned)
        if fixed:
            self._fix(capacity)
        self._forget()

    def _fix(self, capacity: int) -> None:
        unit = self.selector.unit
        if self.sealed_device is not None or capacity < self.sink + unit:
            apart = "" if self.sealed_device is None else f' and sealed_device="{self.sealed_device}"'
            raise ValueError(
                f"fixed=True takes a capacity for the sink and a unit, {self.sink + unit} rows or more, all on one "
                f"device; got capacity={capacity}{apart}"
            )
        sealed = (capacity - self.sink) // unit * unit
        self.selector.fix(sealed, self.seal_rows // unit * unit)
        for part in self.selector.tree():
            part.fixed_for_cache = True
        self._stored.fix(capacity, sealed)
        self._capacity = capacity

    def _forget(self) -> None:
        self._decoded = False
        self._broken = ""  # what failed or was interrupted half-way
        self.latest: Selection | None = None  # the last answer of `search`
        self.latest_tail: Tail | None = None  # what was attended to beside it
        self.latest_promise: Promise | None = None  # what it holds by the selector's estimate, of a budget by mass
        self._shown: Tensor | None = None  # the storage of which the selector has a view
        self._lookahead: Tensor | None = None  # the next query, as the layer before foresees it

    @functools.cached_property
    def unit(self) -> int:
        """Rows are sealed in multiples of this, see `unit_of`."""
        return unit_of(self.selector, self.bits, self.group)

    # -- what is stored ------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first append."""
        return len(self._stored.zones.count)

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        """Real rows of each sequence, and how many of them are sealed: `lengths` and `sealed` in plain numbers. Rows
        that `compact` has freed count."""
        return self._stored.zones.count, self._stored.zones.sealed

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows of each sequence, those that `compact` has freed among them."""
        return torch.tensor(self._stored.zones.count)

    @property
    def sealed(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows that the selector has been shown."""
        return torch.tensor(self._stored.zones.sealed)

    @property
    def freed(self) -> int:
        """Places of each head that `compact` has freed since the first row: with 0 every row is still stored."""
        return self._stored.zones.freed

    @property
    def keys(self) -> Tensor:
        """`[B,H,N,D]`, a view: N physical rows, at least the sink's. Rows outside `bounds` may hold anything.

        Every row, or with `sealed_device` or `bits` those of the sink and the recent ones; of a `fixed` cache the whole
        capacity.
        """
        self._require_rows()
        return self._stored.keys.visible

    @property
    def values(self) -> Tensor:
        """`[B,H,N,D]`, stored as the keys are. A view."""
        self._require_rows()
        return self._stored.values.visible

    def attended(self) -> tuple[Tensor, Tensor, Bounds]:
        """What a step attends to on the cache's own device: `keys`, `values` and `bounds`."""
        stored = self._stored
        return stored.keys.visible, stored.values.visible, stored.bounds

    @property
    def sealed_keys(self) -> Tensor:
        """`[B,H,N,D]`: the sealed rows in stored order, where they lie; a view. With `bits` and not `exact` they are
        read back from their codes at each call."""
        self._require_rows()
        return self._stored.sealed_rows()[0]

    @property
    def sealed_values(self) -> Tensor:
        """`[B,H,N,D]`, stored as `sealed_keys` are."""
        self._require_rows()
        return self._stored.sealed_rows()[1]

    @property
    def sealed_codes(self) -> CodedRows | None:
        """With `bits` the sealed rows as a step reads them, a view; None without, and before the first seal."""
        self._require_rows()
        return self._codes()

    def _codes(self) -> CodedRows | None:
        codes = self._stored.codes
        return codes.held if codes is not None and self._stored.zones.zone else None

    @property
    def sealed_bounds(self) -> Bounds:
        """The zones of `sealed_keys`: no sink, all of it sealed, none recent."""
        self._require_rows()
        return Bounds.of(self.batch, self._stored.zones.zone, device=self._stored.there)

    @property
    def all_bounds(self) -> Bounds:
        """The zones of the rows of `everything`."""
        self._require_rows()
        zones, bounds = self._stored.zones, self._stored.bounds
        if not zones.apart:
            return bounds
        return Bounds(bounds.sink, bounds.base, bounds.sealed + zones.zone, bounds.rows + zones.zone)

    def bytes_named(self, selection: Selection) -> Tensor:
        """`[B,H]` int64: bytes of the sealed rows that a selection names, each once for all query heads of a KV head;
        of rows of a few bits those of their codes and levels."""
        if (codes := self.sealed_codes) is not None:
            return codes.bytes_read(selection)
        keys = self._stored.keys.full
        heads, size = keys.shape[1], keys.shape[3]
        return selection.distinct(heads, self._stored.zones.zone) * (2 * size * self.selector.bytes_of(keys))

    def everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every stored row, for attention without a selection: in stored order, padding and spare places among them.

        Rows that the selector has dropped for good are no longer there, freed (`compact`) or not. Those that are kept
        in a few bits alone are read back.

        Returns:
            keys, values `[B,H,N,D]` on the cache's device, views unless sealed rows lie apart; `[B,H,N]` bool, which
            places hold a row. The others hold anything.
        """
        self._require_rows()
        self._note_dropped()
        return self._stored.everything()

    @property
    def positions(self) -> Tensor:
        """`[B]` int64 on the cache's device: position of each sequence's newest token; updated in place."""
        self._require_rows()
        return self._stored.newest

    @property
    def bounds(self) -> Bounds:
        """The zones of `keys`, on the cache's device; updated in place as rows come. With `sealed_device`, the sealed
        zone there is empty."""
        self._require_rows()
        return self._stored.bounds

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows stored, by part: `kv`, the keys and values; `books`, what the cache notes of them
        (positions, what is real, queries that wait); and every state of the selector by its name.

        Spare capacity is not in it, nor parameters of a selector, such as an artefact that all layers share.
        """
        return self._stored.nbytes | {name: state.nbytes for name, state in self.selector.buffers()}

    def _require_rows(self) -> None:
        if self._broken:
            raise RuntimeError(f"{self._broken}, so this cache is void: reset() it")
        if not self._stored.zones.count:
            raise RuntimeError("the cache is empty: append a prefill first")

    # -- storing ---------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, queries: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Stores new rows behind those that are there. Never copies what is stored (growth apart).

        Args:
            keys, values: `[B,H,n,D]`, keys after RoPE.
            queries: `[B,H,G,n,D]` of the same tokens, if the selector has a `queries_share`, and until the first seal
                if it has `last_queries`; ignored otherwise. Those of sampled rows (`query_buffers.sampled`) are kept
                until their rows are sealed, the prompt's last until the first seal.
            positions: `[B,n]` integers, rising along real rows; a negative one marks padding, which is not stored.
                Default: no padding, counting on from the newest row.

        Raises:
            ValueError: no tensors; shapes, dtypes or devices that do not fit what is stored; NaN or infinite keys,
                values or queries (on a GPU, single rows are checked when they are sealed, not at every step); missing
                queries; a selector that serves another cache, or that cannot serve such keys or lacks the layer's RoPE
                (`Selector.check_shape`); more rows than a `fixed` cache has. Nothing is stored then.
        """
        only_tensors(keys=keys, values=values)
        if queries is not None:
            only_tensors(queries=queries)
        if positions is not None:
            only_tensors(positions=positions)
        first = self.batch == 0
        if first:
            input_checks.unused(self.selector)
            input_checks.reachable(self.selector, keys.device, self.sealed_device)
        else:
            self._require_rows()
        input_checks.rows(keys, values, self._stored.held)
        input_checks.repeatable(keys, "storing rows")
        batch, _, new, _ = keys.shape
        stored = self._stored
        if stored.wants_queries:
            input_checks.queries(queries, keys, self.selector, stored.learned)
        zones = Zones(batch, self.sink, stored.zones.apart) if first else stored.zones
        at = None if positions is None else input_checks.positions(positions, batch, new, zones.next)
        if first:
            self.selector.check_shape(keys.shape[1], None, keys.shape[3])
        if self.fixed:
            counts = [new] * batch if at is None else (at >= 0).sum(1).tolist()
            zones.require_room(counts, self._capacity, self.unit)
        if first:
            stored.begin(zones, keys)
            self._claim()
        self._broken = "storing rows was cut short"
        stored.store(keys, values, queries, at, self.window + self.rollback)
        self._show()
        self._broken = ""

    def append_from(self, other: KVCache, heads: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """Stores the rows of another cache, which has sealed none and has no sink, and the queries it holds of them.

        So one prefill serves many selectors: `other` is not changed.

        Args:
            other: as said.
            heads: of a tensor `[B,H,...]` those KV heads that this cache is of; default all.

        Raises:
            ValueError: rows are sealed or a sink is kept apart in `other`, this selector learns from queries of which
                `other` holds no full set, or what `append` refuses.
        """
        other._require_rows()
        if other.sink or other._stored.zones.zone:
            raise ValueError(
                f"rows are copied from a cache without sink and sealed rows, got a sink of {other.sink} and sealed "
                f"rows {other._stored.zones.sealed}"
            )
        if self.selector.learns and other._stored.queries.share < 1:
            raise ValueError(
                f"{self.selector!r} learns from queries, and the cache to copy from holds "
                f"{other._stored.queries.share:g} of them; it must hold all"
            )
        keys, values, queries, positions = other._stored.copied(self.selector.learns)
        self.append(heads(keys), heads(values), None if queries is None else heads(queries), positions)

    def _claim(self) -> None:
        for part in self.selector.tree():
            part.rows_of_cache = True

    def _show(self) -> None:
        """Brings the selector's view of the stored keys up to date; of keys of a few bits only what asks for it has
        one."""
        if self.bits is not None:
            for part in self._abilities.rounded_readers:
                part.rounded = self._codes()
            return
        if not (readers := self._abilities.key_readers):
            return
        storage, places = self._stored.indexed()
        stored = readers[0].stored
        if stored is None or self._shown is not storage or stored.shape[2] != places:
            shown, self._shown = self._stored.shown(), storage
            for reader in readers:
                reader.stored = shown

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Shows the selector the rows that have left the window, if it is time; `select` and `decode` call it.

        The first call seals every row before the window, later ones when `seal` rows wait; always whole spans. All that
        is stored then is the prompt, whose last queries a selector may want; where `select` or `decode` make that call,
        all but the newest row, whose step it is. If the selector raises, the cache is void until `reset`.
        """
        self._require_rows()
        self._seal_due(decoded=0)

    def _seal_due(self, decoded: int) -> None:
        """`seal`, where the newest `decoded` rows of each sequence are no part of the prompt."""
        zones, keep, least = self._stored.zones, self.window + self.rollback, self.seal_rows if self._decoded else 1
        if self._decoded and max(zones.count) - min(zones.sealed) - self.sink - keep < least:
            return  # no sequence has as many waiting
        each = zones.due(keep, least, self.unit)
        if max(each):
            input_checks.repeatable(self._stored.keys.full, "sealing rows")
        self._decoded = True
        if max(each) == 0:
            return
        self._broken = f"{self.selector!r} failed while rows were sealed or freed"
        self._seal(each, decoded)
        self._broken = ""

    def _seal(self, each: list[int], decoded: int) -> None:
        first, most = self._stored.zones.zone == 0, max(each)
        rows = self._stored.seal(each, decoded)
        if not first:
            order = self.selector.append(rows)
        elif self.indexes is None:
            order = append_first(self.selector, rows)
        else:  # the prompt's, not what decoding adds
            order = append_kept(self.selector, rows, self.indexes)
        self._stored.settle(order, most)
        self._stored.publish()
        self._show()

    # -- reading -----------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, budget: Budget) -> Selection:
        """Seals what is due, asks the selector for at most `budget` rows per head, and counts what choosing read; see
        `sparseattn.decode`.

        The selection lies with the sealed rows, on `sealed_device` if there is one: it names rows of `sealed_keys`
        then, not of `keys`, and `decode` is what attends to both parts and merges them.
        """
        return self.choose(query, self.prepare(query, budget), counted=True)

    def choose(self, query: Tensor, allowed: Allowance, counted: bool) -> Selection:
        """`select` with what `prepare` returned; `counted`: whether what choosing reads is counted."""
        there = query if self.sealed_device is None else query.to(self.sealed_device)
        chosen = self.search(there, allowed, lambda: self.near(query).to(there.device), counted)
        if counted and (allowed.mass is not None or self._abilities.weighs_near):
            self.latest = chosen = self._also_read(chosen)
        return chosen

    def near(self, query: Tensor) -> Tensor:
        """`[B,H,G]`: the natural logarithm of the sum of exponentiated logits of the rows that every query reads, sink
        and unsealed; -inf where there are none. `query` is on the cache's device."""
        nothing = Selection.none(query.shape[0], query.shape[1], query.device)
        scale = 1 / self.selector.temperature(query.shape[3])
        return attend(query, self.keys, self.values, nothing, self.bounds, scale=scale)[1]

    def _also_read(self, chosen: Selection) -> Selection:
        """With the cost of `near`: the key of every row that it weighs, read before the step reads it."""
        bounds, keys = self.bounds, self.keys
        rows = (bounds.sink + bounds.rows - bounds.sealed).to(chosen.start.device, torch.int64)[:, None]  # [B,1]
        scanned = None if chosen.scanned is None else chosen.scanned + rows
        read = None
        if chosen.scan_bytes is not None:
            read = chosen.scan_bytes + rows * (keys.shape[3] * self.selector.bytes_of(keys))
        return dataclasses.replace(chosen, scanned=scanned, scan_bytes=read)

    def prepare(self, query: Tensor, budget: Budget) -> Allowance:
        """The first half of `select`: checks both, seals what is due, and says what the budget allows."""
        self._require_rows()
        input_checks.query(query, self._stored.keys.full)
        if not query.is_cuda:
            input_checks.finite(query=query)
        if self.fixed and not self._stored.zones.zone and input_checks.capturing(query):
            raise RuntimeError("nothing is sealed yet: capture a CUDA graph of a step when something is")
        if self._learns and (learned := self._stored.learned) is not None:
            input_checks.group(query, learned)
        budget = parse_budget(budget)
        unlimited = budget is None or (isinstance(budget, Mass) and budget.most is None)
        context = self._capacity if self.fixed and unlimited else max(self._stored.zones.count)
        rows = budget_of(self.selector, budget, context)
        if not unlimited:
            rows = self.selector.allowed(rows)
        self._seal_due(decoded=1)
        # More rows than there are, or can be, change nothing but the number of slots.
        rows = min(rows, max(self._capacity if self.fixed else context, self.selector.span))
        return Allowance(rows, budget.share if isinstance(budget, Mass) and self.selector.uses_budget else None)

    def step(self, near: Tensor | None = None, counted: bool = False) -> StepContext:
        """What the selector is told of a step at the newest token, see `StepContext`; once rows are sealed."""
        stored = self._stored
        positions = stored.newest if self.sealed_device is None else torch.tensor(stored.zones.next) - 1
        return StepContext(positions, stored.valid.visible, stored.zones.sealed, counted, near, self._lookahead)

    def foresee(self, ahead: Tensor) -> None:
        """Tells a selector that looks ahead (`LooksAhead`) what the layer before knew of the next query.

        Args:
            ahead: `[B,H,G,D]`, after RoPE: the query that this layer's projection makes of the input of the attention
                layer before. It holds for the next `select` or `decode` alone.

        Raises:
            ValueError: another shape, dtype or device than a query of this cache has, or NaN.
        """
        self._require_rows()
        input_checks.query(ahead, self._stored.keys.full)
        if not ahead.is_cuda:
            input_checks.finite(ahead=ahead)
        self._lookahead = ahead if self.sealed_device is None else ahead.to(self.sealed_device)

    def search(
        self, query: Tensor, allowed: Allowance, near: Callable[[], Tensor] | None = None, counted: bool = False
    ) -> Selection:
        """The second half: the rows of a query `[B,H,G,D]` on the device of the sealed rows.

        Args:
            allowed: what `prepare` said.
            near: gives what `KVCache.near` does, on the device of the sealed rows, for a mass and for a selector that
                weighs it (`WeighsNear`). For a mass it is asked once the selector has weighed its rows, so that what
                another device computes for it may take as long as the search.
            counted: whether what choosing reads is counted.

        Raises:
            ContractError: with `check`, a selection that the contract does not allow.
        """
        if self.check:
            self._note_dropped()  # what it drops while it chooses, it may still read at this step
        (rows, mass), selector, known = allowed, self.selector, self._abilities
        if near is None and (mass is not None or known.weighs_near):
            raise ValueError(f"this search by {selector!r} needs what sink and unsealed rows weigh: give it near")
        self.latest_tail = self.latest_promise = None
        if not self._stored.zones.zone:
            self._lookahead = None
            self.latest = Selection.none(query.shape[0], query.shape[1], query.device)
            if mass is not None and near is not None:
                self.latest, self.latest_promise = cut(Weighed.nothing(query), near(), mass)
            return self.latest
        step = self.step(near() if near is not None and known.weighs_near else None, counted)
        weighed = None
        if mass is None:
            chosen = selector.select(query, step, rows)
        else:
            assert isinstance(selector, EstimatesMass)  # `prepare` refuses others
            weighed = selector.weigh(query, step, rows)
            chosen = weighed.selection
        self._lookahead = None  # it was of this step
        if self.check:
            stored = self._stored
            selection_checks.check(chosen, query, step.positions, rows, stored.zones.zone, stored.sealed_real, selector)
        self.latest = selector.counted(chosen, query, step, rows) if counted else chosen
        if mass is not None and weighed is not None and near is not None:
            if self.check:
                selection_checks.check_weighed(weighed, query, selector)
            self.latest, self.latest_promise = cut(dataclasses.replace(weighed, selection=self.latest), near(), mass)
        return self.latest

    def _note_dropped(self) -> None:
        """Asks methods that evict what they hold; what they have dropped once they have dropped for good."""
        stored = self._stored
        if not stored.zones.zone:
            return
        for part in self._abilities.evictors:
            if (held := part.held()) is not None:
                input_checks.held(held, stored.real.data, self.selector)
                stored.drop(held)

    def tail(self, query: Tensor, selection: Selection) -> Tail | None:
        """Rows that the selector adds for what this selection of `search` does not read, None for none. They are part
        of the step: `decode` attends to them too, and merges.

        Args:
            query: as `search` was given.

        Raises:
            ContractError: with `check`, a tail that the contract does not allow.
        """
        part = self._abilities.tail
        if part is None or not self._stored.zones.zone:
            return None
        step = self.step()
        self.latest_tail = part.tail(query, step, selection)
        if self.check:
            selection_checks.check_tail(self.latest_tail, query, step.positions, self.selector)
        return self.latest_tail

    @property
    def observed(self) -> bool:
        """Whether the selector, or a part of it, learns from what a step's selection got."""
        return bool(self._abilities.observers) and self._stored.zones.zone > 0

    @property
    def weighs_near(self) -> bool:
        """Whether the selector, or a part of it, goes by what sink and unsealed rows weigh."""
        return self._abilities.weighs_near

    def observe(self, selection: Selection, weights: Tensor, total: Tensor) -> None:
        """Tells parts that observe what a step's selection got, see `Observes`."""
        for part in self._abilities.observers:
            part.observe(selection, weights, total)

    # -- editing -----------------------------------------------------------------------------------------------------

    def compact(self) -> int:
        """Frees the rows that the selector has dropped: those of each head that are left move together.

        The sealed zone shrinks to the most rows that any head holds, in whole units of the selector, so that memory
        falls as far as the fullest head allows; copying them takes as much memory again for the moment. Nothing that
        is decoded changes, but the rows are gone: what compares with full attention needs them, so that comparisons
        (`evaluate`, `bench`, `eval`) never call it. Call it after the prefill, or now and then.

        Returns:
            Places of each head that were freed; 0 where there were none to free.

        Raises:
            ValueError: a selector that does not evict or cannot follow (`FollowsMoves`), a `fixed` cache, or one of
                rows of a few bits.
        """
        self._require_rows()
        input_checks.compactable(self.selector, self.fixed, self.bits)
        stored, unit = self._stored, self.selector.unit
        if not stored.zones.zone:
            return 0
        self._note_dropped()
        dropped = ~stored.real.data
        fullest = int((~dropped).sum(-1).max())
        places = max(-(-fullest // unit), 1) * unit
        if places >= (before := stored.zones.zone):
            return 0
        ids = dropped.byte().argsort(dim=-1, stable=True)[..., :places]
        self._broken = f"{self.selector!r} failed while rows were sealed or freed"
        for part in self._abilities.followers:
            part.keep(ids)
        stored.compact(ids)
        self._broken = ""
        self.latest = self.latest_tail = self.latest_promise = None  # whose places are others' now
        self._show()
        return before - places

    def crop(self, drop: int | Tensor) -> None:
        """Forgets the newest rows of every sequence, as speculative decoding does with rejected tokens.

        Args:
            drop: rows, an int for all sequences or integers `[B]`.

        Raises:
            ValueError: `drop` is neither, or reaches into sealed rows, which never change: construct the cache with a
                larger `rollback`.
        """
        self._require_rows()
        input_checks.repeatable(self._stored.keys.full, "dropping rows")
        self._stored.crop(input_checks.dropped(drop, self.batch))
        self._lookahead = None  # of a token that is gone
        self._show()

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes what sequence `index[b]` was (beam search); `index` `[B']` may repeat and omit.

        ValueError for another `index`, or where the storage is `fixed` and B' is not B.
        """
        self._require_rows()
        input_checks.repeatable(self._stored.keys.full, "reordering sequences")
        input_checks.indices(index, self.batch)
        self._stored.take(index)
        self._lookahead = None  # of sequences as they were
        self.selector.reorder(index if self.sealed_device is None else index.to(self.sealed_device))
        self._show()

    def clone(self) -> KVCache:
        """An independent copy, selector included."""
        twin = copy.copy(self)
        twin.selector, twin._stored = self.selector.clone(), self._stored.clone()
        twin._abilities, twin._lookahead = Abilities.of(twin.selector), None
        if self.batch:
            twin._claim()
            twin._show()
        return twin

    def reset(self) -> None:
        """Forgets every row, the selector's too, and frees the storage unless it is fixed; the configuration stays."""
        self._stored.reset()
        self.selector.reset()
        self._forget()

    def to(self, device: torch.device | str) -> KVCache:
        """Moves storage and selector, and returns the cache; what lies on `sealed_device` stays there.

        Raises:
            ValueError: a selector that works in host memory only, and no `sealed_device`.
        """
        input_checks.reachable(self.selector, torch.device(device), self.sealed_device)
        self._stored.to(device)
        if self.sealed_device is None:
            self.selector.to(device)
        if self.batch:
            self._show()
        return self

    def __repr__(self) -> str:
        apart = "" if self.sealed_device is None else f", sealed_device={str(self.sealed_device)!r}"
        apart += f", capacity={self._capacity}, fixed=True" if self.fixed else ""
        apart += "" if self.bits is None else f", bits={self.bits}, group={self.group}"
        return (
            f"KVCache({self.selector!r}, sink={self.sink}, window={self.window}, seal={self.seal_rows}, "
            f"rollback={self.rollback}{apart}): {self.batch} sequences of {self._stored.zones.count} rows"
        )
