"""The keys and values of one layer, with the selector that indexes them, and when their rows are sealed.

`append` stores, `seal` shows finished rows to the selector and lets it order them. A selector sees sealed rows only, so
nothing it names is counted twice; sink and recent rows are read by every query. Where rows lie is `StoredRows`' matter,
what a selector is shown `ShownRows`', what a step asks it `Search`'s, and what is done between steps `CacheEdits`'.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor

from sparseattn.cache import input_checks, rank_checks
from sparseattn.cache.edits import CacheEdits
from sparseattn.cache.index_files import usable_folder, warn_if_built_anew
from sparseattn.cache.layout import Zones
from sparseattn.cache.ranks import Ranks
from sparseattn.cache.rows import CUT_SHORT, StoredRows
from sparseattn.cache.sealed_rows import SealedRows
from sparseattn.cache.search import Search
from sparseattn.cache.shown_rows import ShownRows, check_seal, unit_of
from sparseattn.cache.token_store import TokenStore
from sparseattn.cache.waiting_queries import Wanted
from sparseattn.codecs.base import RowCodec
from sparseattn.codecs.registry import as_codec
from sparseattn.codecs.stored import StoredCodes
from sparseattn.core.budget import Allowance, Budget, allowance
from sparseattn.core.deal import Deal
from sparseattn.core.selection import Bounds, Selection
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import as_selector
from sparseattn.utils.inference_mode import keeps_tensors


def _fits(query: Tensor, keys: Tensor | None) -> bool:
    """Whether a query `[B,H,G,D]` is one of stored keys `[B,H,N,D]`; `input_checks.check_query` says why not."""
    if keys is None or query.ndim != 4 or query.dtype != keys.dtype or query.device != keys.device:
        return False
    (batch, heads, group, size), shape = query.shape, keys.shape
    return batch == shape[0] and heads == shape[1] and size == shape[3] and group > 0


class KVCache(CacheEdits):
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
            unit, for speed leave it at 1024. At least the unit. The sequences of a batch seal together: above the unit,
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
            prefill at a time lies on the device. "disk:FOLDER" keeps them in a file of a folder that has no name and
            is gone with the cache: a cache may then be larger than memory, where its selector does not read stored
            keys. None: sealed rows lie between sink and recent rows.
        indexes: folder of index files (`index_files`): the first seal takes the index of the same rows from there if it
            can, and writes it there if it had to build it. Made if it is not there; it only ever grows. A method that
            does not say what its index must be (`Selector.check_state`) keeps none there, and a warning says so.
        rows: how sealed rows are kept, a `RowCodec` or its text ("kivi:bits=4"); other rows stay as they come. A
            selector is shown the rows as they came, once: none that scores stored keys (`ReadsKeys`) or learns from
            weights (`Observes`) can be had. Rows are sealed in multiples of the codec's group. None: as they come.
        exact: with `rows`, whether sealed rows are kept as they came too, for comparing with full attention over them
            (`evaluation.step_measures.compare`): memory grows, what a step reads does not.
        group: processes that each keep a part of the sealed rows: a process group of torch.distributed, or `Ranks` of
            one, which says how they divide a budget. Each is given the same rows and queries, and returns the same.
            `capacity` is of all rows; what `select` returns, `stored.sealed_keys` and `nbytes` are of this process.
        check: whether every selection is held against the contract (`selection_checks.check`), which makes the host
            wait: comparisons and tests do, decoding for its own sake does not.

    Raises:
        ValueError: an unknown selector, or one that is wrongly declared; an argument out of its range; `fixed` without
            a capacity for more than the sink, with a `sealed_device`, or with a selector whose step the host takes part
            in; `rows` with `fixed` or with a selector that cannot go without exact rows; `group` with what a cache of
            ranks does not do (`rank_checks`), or with a selector whose rows cannot be dealt.

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
        rows: RowCodec | str | None = None,
        exact: bool = False,
        group: dist.ProcessGroup | Ranks | None = None,
        check: bool = False,
    ) -> None:
        self.selector = selector = as_selector(selector)
        input_checks.check_parts(selector)
        input_checks.check_sizes(sink=sink, window=window, rollback=rollback, capacity=capacity, seal=seal)
        self.codec = codec = as_codec(rows)
        input_checks.check_codec(selector, codec, fixed)
        input_checks.check_levels(selector, codec)
        check_seal(selector, seal, codec)
        input_checks.check_not_fixed(selector)
        self.sink, self.window, self.seal_rows, self.rollback = sink, window, seal, rollback
        self.fixed, self.check, self.unit = fixed, check, unit_of(selector, codec)
        disk = input_checks.disk_folder(sealed_device, codec)
        self.sealed_device = input_checks.checked_device("cpu" if disk else sealed_device)
        self._place = sealed_device if disk else self.sealed_device
        self.ranks = ranks = Ranks.of(group)
        deal = self._deal_of(ranks, indexes, exact)
        if self.sealed_device is not None:
            selector.to(self.sealed_device)
        wanted = Wanted.of(selector, codec, window + rollback + self.unit)
        codes = None if codec is None else StoredCodes(codec, capacity)
        own = capacity if ranks is None else deal.most(capacity)
        sealed, unsealed_rows = SealedRows(own, self.sealed_device, codes, exact, ranks is not None, disk), capacity
        if sealed.apart:
            unsealed_rows = sink + window + rollback + seal + self.unit  # after a seal, room until the next one
        self.stored, self._learns = (
            StoredRows(sink, unsealed_rows, sealed, wanted, deal),
            bool(wanted.share or wanted.last),
        )
        self._tokens, self.search = TokenStore(self.stored), Search(selector, self.stored, check, ranks)
        folder = None if indexes is None else usable_folder(indexes)
        if folder is not None:
            warn_if_built_anew(selector, folder)
        self._shown = ShownRows(selector, self.search.abilities, self.stored, folder)
        self._capacity = capacity if fixed else None
        if fixed:
            input_checks.check_fixed(sink, selector.unit, capacity, self.sealed_device)
            self._shown.fix(capacity, seal)
        self._decoded = False
        self._group: int | None = None  # query heads of each KV head, once a step has come
        self._granted: tuple[Budget, int | None] = (None, None)  # the last budget in rows, and what it allows

    def _deal_of(self, ranks: Ranks | None, indexes: str | os.PathLike[str] | None, exact: bool) -> Deal:
        """Which sealed rows this process keeps; ValueError where a cache of ranks has no such arguments."""
        if ranks is None:
            return Deal(self.unit)
        rank_checks.check_plain(self.fixed, self.sealed_device, self.codec, indexes, exact)
        rank_checks.check_dealable(self.selector)
        return Deal(self.unit, ranks.rank, ranks.size)

    # -- what is stored ------------------------------------------------------------------------------------------

    @property
    def learns(self) -> bool:
        """Whether the selector or the codec learns from queries of the prompt."""
        return self._learns

    @property
    def counts(self) -> tuple[list[int], list[int]]:
        """`lengths` and `sealed` in plain numbers."""
        return self.stored.zones.count, self.stored.zones.sealed

    @property
    def lengths(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows of each sequence, those that `compact` has freed among them."""
        return torch.tensor(self.stored.zones.count)

    @property
    def sealed(self) -> Tensor:
        """`[B]` int64 on the CPU: real rows that the selector has been shown."""
        return torch.tensor(self.stored.zones.sealed)

    @property
    def freed(self) -> int:
        """Places of each head that `compact` has freed since the first row: with 0 every row is still stored."""
        return self.stored.zones.freed

    @property
    def keys(self) -> Tensor:
        """`[B,H,N,D]`, a view: N physical rows, at least the sink's. Rows outside `bounds` may hold anything.

        Every row, or with `sealed_device` or `rows` those of the sink and the recent ones; of a `fixed` cache the whole
        capacity.
        """
        self.stored.require()
        return self.stored.keys.visible

    @property
    def values(self) -> Tensor:
        """`[B,H,N,D]`, stored as the keys are. A view."""
        self.stored.require()
        return self.stored.values.visible

    @property
    def positions(self) -> Tensor:
        """`[B]` int64 on the cache's device: position of each sequence's newest token; updated in place."""
        self.stored.require()
        return self.stored.newest

    @property
    def bounds(self) -> Bounds:
        """The zones of `keys`, on the cache's device; updated in place as rows come. With `sealed_device`, the sealed
        zone there is empty."""
        self.stored.require()
        return self.stored.bounds

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the rows stored, by part: `kv`, the keys and values; `books`, what the cache notes of them
        (positions, what is real, queries that wait); and every state of the selector by its name.

        Spare capacity is not in it, nor parameters of a selector, such as an artefact that all layers share.
        """
        return self.stored.nbytes | {name: state.nbytes for name, state in self.selector.buffers()}

    # -- storing ---------------------------------------------------------------------------------------------------

    def append(
        self, keys: Tensor, values: Tensor, queries: Tensor | None = None, positions: Tensor | None = None
    ) -> None:
        """Store new rows behind those that are there. Never copies what is stored (growth apart).

        Args:
            keys, values: `[B,H,n,D]`, keys after RoPE.
            queries: `[B,H,G,n,D]` of the same tokens, if the selector has a `queries_share` (where it learns once,
                until every sequence has sealed rows), and until the first seal if it or the codec has `last_queries`;
                ignored otherwise. Those of sampled rows (`query_buffers.sampled`) are kept until their rows are sealed,
                the prompt's last until the first seal.
            positions: `[B,n]` integers, rising along real rows; a negative one marks padding, which is not stored.
                Default: no padding, counting on from the newest row.

        Raises:
            ValueError: no tensors; shapes, dtypes or devices that do not fit what is stored; NaN or infinite keys,
                values or queries (on a GPU, single rows are checked when they are sealed, not at every step); missing
                queries; a selector that serves another cache, or that cannot serve such keys or lacks the layer's RoPE
                (`Selector.check_shape`); more rows than a `fixed` cache has. Nothing is stored then.
        """
        learning = self._learns and self.stored.queries.wanted(self.stored.zones.sealed)
        if positions is None and not learning and self._tokens.put(keys, values):  # a token of a step
            if self._shown.views:
                self._shown.refresh()
            return
        self._append_rows(keys, values, queries, positions, learning)

    @keeps_tensors
    def _append_rows(
        self, keys: Tensor, values: Tensor, queries: Tensor | None, positions: Tensor | None, learning: bool
    ) -> None:
        """`append` of what is no single token of a step."""
        input_checks.check_tensors(keys, values, queries, positions)
        stored = self.stored
        if first := not stored.zones.count:
            input_checks.check_unused(self.selector)
            input_checks.check_reachable(self.selector, keys.device, self.sealed_device)
        else:
            self.stored.require()
        input_checks.check_rows(keys, values, stored.keys.storage)
        input_checks.check_repeatable(keys, "storing rows")
        batch, _, new, _ = keys.shape
        if learning:
            learner = self.selector if self.codec is None or self.selector.learns else self.codec
            input_checks.check_queries(queries, keys, learner, stored.queries.kept)
        else:
            queries = None
        zones = Zones(batch, self.sink, stored.zones.apart) if first else stored.zones
        at = None if positions is None else input_checks.checked_positions(positions, batch, new, zones.next)
        if self._capacity is not None:
            zones.require_room([new] * batch if at is None else (at >= 0).sum(1).tolist(), self._capacity, self.unit)
        if first:
            self._begin(zones, keys)
        stored.broken = CUT_SHORT
        self._let_go()
        stored.store(keys, values, queries, at, self.window + self.rollback)
        if self._shown.views:
            self._shown.refresh()
        stored.broken = ""

    def _begin(self, zones: Zones, keys: Tensor) -> None:
        """Take a new batch, whose first rows are `keys` `[B,H,n,D]`, if selector, codec and ranks can serve it."""
        self.selector.check_shape(keys.shape[1], None, keys.shape[3])
        if self.codec is not None:
            input_checks.check_codec_fits(self.codec, keys, self.selector.layer_context.rope)
        if self.ranks is not None:
            zones_of = {name: getattr(self, name) for name in ("sink", "window", "seal_rows", "rollback")}
            rank_checks.check_same_cache(self.ranks, zones_of, self.selector, keys)
        self.stored.begin(zones, keys)
        self._shown.claim()

    # -- sealing -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Show the selector the rows that have left the window, if it is time; `select` and `decode` call it.

        The first call seals every row before the window, later ones when `seal` rows wait; always whole spans. All that
        is stored then is the prompt, whose last queries a selector may want; where `select` or `decode` make that call,
        all but the newest row, whose step it is. If the selector raises, the cache is void until `reset`.
        """
        self.stored.require()
        self._seal_due(decoded=0)

    def deal(self) -> None:
        """Seal what is due of a prompt that may go on, with a `group`, so that no rank keeps rows of others any longer.

        Where the prompt ends then, the same rows are sealed as if this had not been called. Without a `group` it does
        nothing.
        """
        if self.ranks is not None and not self._decoded:
            self._seal_due(decoded=0)
            self._decoded = False

    def _seal_due(self, decoded: int) -> None:
        """`seal`, where the newest `decoded` rows are no part of the prompt."""
        zones, keep, least = self.stored.zones, self.window + self.rollback, self.seal_rows if self._decoded else 1
        if self.ranks is not None and not self._decoded:
            rank_checks.check_same_prompt(self.ranks, zones.count, self.stored.device)
        if self._none_due():
            return
        each = zones.due(keep, least, self.unit)
        if max(each):
            input_checks.check_repeatable(self.stored.keys.full, "sealing rows")
        self._decoded = True
        if max(each) == 0:
            return
        self._seal_rows(each, decoded)

    def _none_due(self) -> bool:
        """Whether no sequence has as many rows waiting as are sealed at once, without a look at each."""
        zones, keep = self.stored.zones, self.sink + self.window + self.rollback
        return self._decoded and max(zones.count) - min(zones.sealed) - keep < self.seal_rows

    @keeps_tensors
    def _seal_rows(self, each: list[int], decoded: int) -> None:
        self.stored.broken = f"{self.selector!r} failed while rows were sealed or freed"
        self._let_go()
        self._shown.seal(each, decoded)
        self.stored.broken = ""

    # -- reading -----------------------------------------------------------------------------------------------------

    def select(self, query: Tensor, budget: Budget) -> Selection:
        """Seal what is due, ask the selector for at most `budget` rows per head, and count what choosing read.

        The selection lies with the sealed rows, on `sealed_device` if there is one: it names rows of
        `stored.sealed_keys` then, not of `keys`, and `decode` is what attends to both parts and merges them.
        """
        return self.search.choose(query, self.prepare(query, budget), counted=True)

    def prepare(self, query: Tensor, budget: Budget, finite: bool = True) -> Allowance:
        """Do the first half of `select`: check both, seal what is due, and say what the budget allows.

        finite: whether the query's numbers are looked at too. Who says no does so later (`check_finite`); before rows
            are sealed they are looked at all the same.
        """
        stored, keys = self.stored, self.stored.keys.storage
        if keys is None or stored.broken or not stored.zones.count:
            stored.require()
        if not (isinstance(query, Tensor) and _fits(query, keys)):
            input_checks.check_query(query, stored.keys.full)
        if query.shape[2] != self._group:
            _, heads, group, size = query.shape
            self.selector.check_shape(heads, group, size)
            self._group = group
        none_due = self._none_due()
        if finite or not none_due:
            self.check_finite(query)
        if self.fixed and not stored.zones.zone and input_checks.capturing(query):
            raise RuntimeError("nothing is sealed yet: capture a CUDA graph of a step when something is")
        if self._learns and (learned := stored.queries.kept) is not None:
            input_checks.check_group(query, learned)
        allowed = self._allowance(budget)
        if self.ranks is not None:
            rank_checks.check_in_rows(allowed)
        if not none_due:
            self._seal_due(decoded=1)
        return allowed

    @staticmethod
    def check_finite(query: Tensor) -> None:
        """Refuse, by ValueError, a query with NaN or infinite numbers; on a GPU nobody looks."""
        if not query.is_cuda and not math.isfinite(query.sum()):
            input_checks.check_finite(query=query)

    def _allowance(self, budget: Budget) -> Allowance:
        """Return `allowance`; of a budget in rows the part that does not follow the context is asked for once."""
        count = self.stored.zones.count
        context = count[0] if len(count) == 1 else max(count)
        known, rows = self._granted
        if rows is None or budget is not known or self._capacity is not None:
            allowed = allowance(self.selector, budget, context, self._capacity)
            if type(budget) is int:
                self._granted = budget, self.selector.allowed(budget)
            return allowed
        return Allowance(min(rows, max(context, self.selector.span)), None)

    def __repr__(self) -> str:
        apart = "" if self.sealed_device is None else f", sealed_device={str(self._place)!r}"
        apart += "" if self.ranks is None else f", group={self.ranks!r}"
        apart += f", capacity={self._capacity}, fixed=True" if self.fixed else ""
        apart += "" if self.codec is None else f", rows={str(self.codec)!r}"
        return (
            f"KVCache({self.selector!r}, sink={self.sink}, window={self.window}, seal={self.seal_rows}, "
            f"rollback={self.rollback}{apart}): {self.batch} sequences of {self.stored.zones.count} rows"
        )
