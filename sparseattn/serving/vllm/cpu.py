"""vLLM's attention on the CPU with sparse decoding: chosen pages are read where they lie in its packed blocks.

Everything that is not the decoding of a long sequence is the stock backend's: prefill, short sequences, layers with
windows, drafts, and whatever runs unconfigured. So blocks keep the size and packing that suit its kernel. An
entry of the index is made from the cache, once it is whole and a sequence that holds it is long enough to be decoded
sparsely. A row that is written anew undoes it, and so does one that a KV connector may have loaded (`loaded_rows`).
That holds for chunked prefill, prefix hits (whole blocks), recycled blocks and preempted requests alike, and short
sequences pay nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from sparseattn.core.context import Heads, LayerContext
from sparseattn.kernels.attend_vllm_blocks import cpu_tables
from sparseattn.kernels.attend_vllm_blocks.blocks import BlockCache
from sparseattn.kernels.attend_vllm_blocks.dispatch import attend_blocks, attend_rows
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.serving.vllm import adapters, break_even, mismatch, per_request, self_test
from sparseattn.serving.vllm.adapters import (
    Attention,
    CommonAttentionMetadata,
    FullAttentionSpec,
    extract_layer_index,
    get_current_vllm_config,
    logger,
)
from sparseattn.serving.vllm.block_packing import packing_of, read_as
from sparseattn.serving.vllm.block_tails import BlockTails
from sparseattn.serving.vllm.counters import Counter
from sparseattn.serving.vllm.engine_checks import check_shape, settings_of, why_dense
from sparseattn.serving.vllm.loaded_rows import LoadedRows
from sparseattn.serving.vllm.mean_index import TailedStore
from sparseattn.serving.vllm.page_index import Store, entry_bytes
from sparseattn.serving.vllm.page_tables import engine_zones, near_page
from sparseattn.serving.vllm.per_request import RequestChoices, request_choices
from sparseattn.serving.vllm.served_requests import ServedRequests
from sparseattn.serving.vllm.settings import Settings
from sparseattn.serving.vllm.sparse_layers import EARLY, PLANNED, UNFIT, plan_layers
from sparseattn.serving.vllm.step_tokens import sparse_tokens

BUILDERS: weakref.WeakSet[SparseCPUBuilder] = weakref.WeakSet()  # of this process's engines


def why_dense_layer(layer: Attention, vllm_config: Any) -> str | None:
    """Why a layer cannot be sparse; None: it can."""
    if not isinstance(layer.impl, SparseCPUImpl):
        return "it has another backend"
    if layer.impl.unable is not None:
        return layer.impl.unable
    # By its own cache, for vLLM may merge those of a group. A subclass's is of chunks, or has a mask of its own.
    if type(layer.get_kv_cache_spec(vllm_config)) is not FullAttentionSpec:
        return "its cache is not of full causal attention"
    return "its values have another size than its keys" if layer.head_size_v != layer.head_size else None


class SparseCPUBackend(CPUAttentionBackend):
    """The stock backend, or where an engine is configured ours."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if settings_of(get_current_vllm_config()) is None else SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SparseCPUBuilder


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """The stock metadata, with what sparse layers need.

    Args:
        due: `[2,n]` int64, entries to be made in this step, and the position of each one's first row; None: there are
            none.
        served: None: no request decodes sparsely.
    """

    due: Tensor | None = None
    served: ServedRequests | None = None


class SparseCPUBuilder(CPUAttentionMetadataBuilder):
    """Makes the tables of a step, once for all layers of a group. Of an engine that nobody asked to be sparse, nothing
    beyond what vLLM's own does is called."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.settings: Settings | None = None
        self.impls: dict[str, SparseCPUImpl] = {}
        self.sparse: list[SparseCPUImpl] = []
        self.runner: Callable[[], Any] | None = lambda: None  # which runs the engine's steps; None: nobody does
        self.loaded: LoadedRows | None = None  # None: nothing but the engine writes rows
        if (settings := settings_of(self.vllm_config)) is None:
            return
        self.layers = adapters.layers_of(self.vllm_config, self.layer_names)
        self.impls = {name: layer.impl for name, layer in self.layers.items() if isinstance(layer.impl, SparseCPUImpl)}
        self.block = adapters.block_rows(self)
        self.use(settings)
        BUILDERS.add(self)

    def plan(self, settings: Settings | None) -> dict[str, str | None]:
        """See `plan_layers`, of this group's layers; none without settings.

        Raises:
            ValueError: settings that do not fit the model or the engine's blocks.
        """
        if settings is None:
            return {}
        every = plan_layers(settings, self.vllm_config, why_dense_layer)
        why = {name: every[name] for name in self.impls}
        if not all(why.values()):
            check_shape(settings, self.block)
        return why

    def use(self, settings: Settings | None) -> None:
        """Serve by these settings from the next step on; None: as stock. Indexes begin anew.

        Raises:
            ValueError: see `plan`; then nothing has changed.
        """
        why = self.plan(settings)
        if settings is not None:
            per_request.of_process()  # not first within a step
        self._share(settings, why)
        if settings is None or not self.sparse:
            return
        try:
            self._fit(settings)
            if self.loaded is not None and self._running() is None:
                raise RuntimeError(
                    "no object around the builder knows a step's requests, whose rows a connector may load"
                )
            self_test.check(self)  # compiles what a step runs, too
            if settings.measured:
                self.settings = settings = break_even.measured(self)
        except Exception as error:  # whatever calls of another vLLM than those known end with
            self._share(settings, dict.fromkeys(why, UNFIT))
            mismatch.met(settings.on_mismatch, error)
            return
        mismatch.warn_if_newer()
        self._say(settings, why)

    def _share(self, settings: Settings | None, why: dict[str, str | None]) -> None:
        """Tells each layer what it is from now on."""
        heads = None if settings is None else adapters.heads_here(self.vllm_config, self.num_kv_heads)
        for name, impl in self.impls.items():
            impl.use(name, settings, why.get(name), heads)
        self.sparse = [impl for impl in self.impls.values() if impl.sparse]
        for impl in self.sparse:
            impl.group = self.sparse
        self.settings = settings if self.sparse else None

    def _fit(self, settings: Settings) -> None:
        """Fits the tables and layers to the cache."""
        page, unit = settings.shape
        self.made: Any = np.zeros(0, np.bool_)  # by place, whether the index holds what the cache holds
        layer = next(layer for layer in self.layers.values() if layer.impl in self.sparse)
        kinds = {adapters.byte_floats(layer) for layer in self.layers.values() if layer.impl in self.sparse}
        if len(kinds) > 1:
            raise ValueError(f"sparse layers of one group keep rows as {kinds}: start vLLM with one kv_cache_dtype")
        (self.byte_floats,) = kinds
        self.packing = packing_of(layer, self.dtype, self.num_kv_heads, self.block, self.head_dim, self.byte_floats)
        zone_page = near_page(page, unit, self.packing)
        self.zones = engine_zones(settings, zone_page, unit, self.block, self.vllm_config.model_config.max_model_len)
        self.loaded = None if self.vllm_config.kv_transfer_config is None else LoadedRows(unit, self.block)
        for impl in self.sparse:
            impl.packing, impl.shape = self.packing, (self.num_kv_heads, self.block, 2 * self.head_dim)
            impl.near, impl.rows_dtype, impl.byte_floats = zone_page, self.dtype, self.byte_floats
        self.indexed = any(isinstance(impl.selector, PageSelector) for impl in self.sparse)

    def _say(self, settings: Settings, why: dict[str, str | None]) -> None:
        entries = [entry_bytes(impl.selector, self.num_kv_heads, self.head_dim, self.dtype) for impl in self.sparse]
        places = (self.vllm_config.cache_config.num_gpu_blocks or 0) * self.block // self.zones.unit
        dense = {reason for reason in why.values() if reason is not None}
        logger.info(
            "sparseattn: %s, sink %d, window %d, sequences above %d rows, in %d of %d layers%s; blocks of %d (%s); "
            "index %.0f MiB",
            settings.label,
            settings.sink,
            settings.window,
            settings.above,
            len(self.sparse),
            len(why),
            f" (dense: {', '.join(sorted(dense))})" if dense else "",
            self.block,
            self.isa,
            sum(entries) * places / 2**20,
        )

    def build(self, *given: Any, **named: Any) -> CPUAttentionMetadata:
        stock = super().build(*given, **named)
        if self.settings is None:
            return stock
        common = next(
            metadata for metadata in (*given, *named.values()) if isinstance(metadata, CommonAttentionMetadata)
        )
        self.written(stock)
        if self.loaded is not None:
            self._undo_loaded(stock, self.loaded)
        due, served = None, None
        if stock.max_seq_len > self.settings.above:
            due, served = self._due(stock), self._served(stock, common)
        if due is None and served is None:
            return stock
        fields = {field.name: getattr(stock, field.name) for field in dataclasses.fields(stock)}
        return SparseCPUMetadata(**fields, due=due, served=served)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        """Of steps of a draft model alone: its rows are in layers of their own, so that no entry is undone."""
        return super().build(0, common_attn_metadata, fast_build=True)

    def written(self, stock: CPUAttentionMetadata) -> None:
        """Take note of the entries of which a step writes a row: what the index holds of them is no longer so."""
        slots = stock.slot_mapping[: stock.num_actual_tokens].numpy()
        self._undo(slots[slots >= 0] // self.zones.unit)

    def _undo_loaded(self, stock: CPUAttentionMetadata, loaded: LoadedRows) -> None:
        """Take note of the entries of rows that a connector may have loaded, those of shared prefixes among them."""
        starts, rows = stock.query_start_loc.numpy(), stock.seq_lens.numpy()
        runner = self._running()
        names = None if runner is None else adapters.request_names(runner, len(rows))
        if names is not None:  # else a step of random rows, before an engine serves
            self._undo(loaded.places(names, starts[1:] - starts[:-1], rows, stock.block_table.numpy()))

    def _undo(self, places: Any) -> None:
        """Let the entries at `places` `[n]` be made anew when they are needed."""
        if len(places):
            self._know(int(places.max()))
            self.made[places] = False

    def _know(self, place: int) -> None:
        """Make room for what is known of a place: compiled code looks there unasked."""
        if place >= len(self.made):
            self.made = np.concatenate([self.made, np.zeros(2 * (place + 1) - len(self.made), np.bool_)])

    def _due(self, stock: CPUAttentionMetadata) -> Tensor | None:
        """`[2,n]`: entries to be made in this step, of long sequences, whether they decode or are read, and where their
        rows begin in the sequence; None: none."""
        if self.settings is None or not self.indexed:
            return None
        self._know((int(stock.block_table.max()) + 1) * (self.zones.block // self.zones.unit) - 1)
        due = cpu_tables.due(
            stock.seq_lens.numpy(), stock.block_table.numpy(), self.settings.above, self.zones.unit, self.zones.block,
            self.made,
        )  # fmt: skip
        return torch.from_numpy(due) if due.size else None

    def _served(self, stock: CPUAttentionMetadata, common: CommonAttentionMetadata) -> ServedRequests | None:
        settings = self.settings
        if settings is None or not stock.causal:
            return None
        starts, rows = stock.query_start_loc.numpy(), stock.seq_lens.numpy()
        within = adapters.prefilling(common, len(rows))
        prompts = None if within is None else within.numpy()
        asks = self._request_choices(len(rows))
        dense = None if asks is None else asks.dense
        ours = sparse_tokens(starts, rows, prompts, settings.above, adapters.verified(self.vllm_config), dense)
        if ours is None:
            return None
        own, zone = ours.rows, self.zones
        one_each = ours.every and len(own) == len(rows)
        blocks_of = stock.block_table if one_each else stock.block_table[torch.from_numpy(ours.requests)]
        table, always, tails = cpu_tables.tables(
            own,
            blocks_of.numpy(),
            zone.page,
            zone.unit,
            zone.block,
            zone.first,
            zone.window,
            int(own.max()),
            zone.recent,
        )
        rest = None
        if not ours.every:
            fewer = torch.from_numpy(np.where(ours.whole, starts[1:] - starts[:-1], rows))
            rest = dataclasses.replace(stock, seq_lens=fewer, scheduler_metadata=adapters.schedule(self, stock, fewer))
        choice = (table >= 0).sum(1) * zone.unit
        always_read = ((always >= 0).sum(1) - 1) * zone.page + tails
        tokens, table, always, tails = (torch.from_numpy(part) for part in (ours.tokens, table, always, tails))
        served = ServedRequests(tokens, len(own), ours.every, table, always, tails, rest, choice, always_read, own)
        if asks is not None:
            if (asks.budgets[ours.requests] >= 0).any():
                served.budgets = asks.budgets[ours.requests]
            self._tell(asks.tickets[ours.requests], served)
        return served

    def _request_choices(self, count: int) -> RequestChoices | None:
        """Return what the requests of a step ask; None: nothing."""
        if self.settings is None or (runner := self._running()) is None:
            return None
        if (arguments := adapters.extra_args(runner, count)) is None:
            return None
        settings = self.settings
        return request_choices(arguments, settings.shape[0], settings.per_request, settings.max_budget)

    def _running(self) -> Any:
        """Return the engine's object that runs its steps; None: no engine calls."""
        if self.runner is None:
            return None
        if (runner := self.runner()) is None:
            if (runner := adapters.runner_around(self)) is None:
                self.runner = None
                return None
            self.runner = weakref.ref(runner)
        return runner

    def _tell(self, tickets: Any, served: ServedRequests) -> None:
        """Count a step for those who asked with a ticket."""
        if not tickets.any():
            return
        layers = collections.Counter((impl.page, impl.pages) for impl in self.sparse)
        read = sum(count * served.read_each(page, pages) for (page, pages), count in layers.items())
        counts, tokens = per_request.of_process(), int(self is first_of(self.vllm_config))
        for ticket, own_read, rows in zip(tickets.tolist(), read.tolist(), served.rows.tolist(), strict=True):
            if ticket:
                counts.add(ticket, tokens, own_read, rows * len(self.sparse))


class SparseCPUImpl(CPUAttentionBackendImpl):
    """One layer: the stock backend's, but for requests that a step serves sparsely."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.unable = why_dense(self, self.attn_type, self.head_size)
        self.full = False  # whether it is of full attention, sparse or one of the first
        self.sparse = False
        self.counter: Counter | None = None
        self.rows_dtype = torch.float32  # of rows that are read, and of the cache:
        self.byte_floats: torch.dtype | None = None  # see `read_as`

    def use(self, name: str, settings: Settings | None, dense: str | None, heads: Heads | None) -> None:
        """See `SparseCPUBuilder.use`; `dense`: why it stays so, None where it is sparse from now on; `heads`: which of
        the layer's it has, None for all."""
        self.store: Store | None = None
        self.cache: BlockCache | None = None
        self.packing = ""
        self.sparse = settings is not None and dense is None
        self.full = self.sparse or dense in (EARLY, PLANNED, UNFIT)
        self.counter, self.index = Counter.of_process(), extract_layer_index(name)
        if settings is not None and dense is None:
            context = LayerContext(self.index, heads=heads, scale=self.scale)
            self.selector, self.pages = settings.make(self.index).for_layer(context), settings.pages(self.index)
            self.single = isinstance(self.selector, PageSelector) and self.selector.page == 1
            self.page, self.unit = settings.shape
            self.on_mismatch = settings.on_mismatch
            self.looked = False  # whether the cache is known to be what the self-test's was like
            self.costs: tuple[int, int, int, int, int, int] | None = None  # once the cache is known, see `costs_of`
            self.group: list[SparseCPUImpl] = [self]  # layers that serve every step that this one serves
            self.counting: tuple[Any, Any, list[Any]] | None = None  # layer numbers, which kind each is of, the kinds

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *more: Any,
        **named: Any,
    ) -> Tensor:
        metadata = attn_metadata
        if self.sparse and not self.looked:
            self._look(kv_cache)
        if not self.sparse or not isinstance(metadata, SparseCPUMetadata):
            if metadata is not None and self.full and self.counter is not None:
                self.counter.add(self.index, dense_steps=1)
            return super().forward(layer, query, key, value, kv_cache, metadata, output, *more, **named)
        assert self.counter is not None
        if self.store is None and isinstance(self.selector, PageSelector):
            self.store = self.index_of(kv_cache)
        if metadata.due is not None and self.store is not None:
            places, first = metadata.due
            self.store.update_from(self._rows_of(layer, kv_cache), places, first)
            self.counter.add(self.index, entries_made=len(places))
        served = metadata.served
        if served is None or served.rest is not None:
            dense = metadata if served is None else served.rest
            super().forward(layer, query, key, value, kv_cache, dense, output, *more, **named)
            self.counter.add(self.index, dense_steps=1)
        if served is None:
            return output
        pages, cache = served.pages(self.near, self.unit), self._rows_of(layer, kv_cache)
        if self.store is None:
            scores = torch.empty(served.count, self.num_kv_heads, 0)
            attend_blocks(query, output, cache, pages, scores, self.pages, self.scale)
        elif self.single:
            queries = query[: served.count] if served.in_order else query[served.tokens]
            ids = self._rows(queries.view(served.count, self.num_kv_heads, -1, self.head_size), served)
            attend_rows(query, output, cache, pages, ids, self.scale, means=self.store.means)
        else:
            self.store.attend(query, output, cache, pages, served.most(self.page, self.pages), self.scale)
        served.layers += 1
        if served.layers >= len(self.group):  # once a step: between two layers every line takes longer
            served.layers = 0
            self._count(served, kv_cache)
        return output

    def _rows_of(self, layer: Any, kv_cache: Tensor) -> BlockCache:
        """Return the layer's rows, the same object as long as they lie where they lay, at the same scales."""
        cache = self.cache
        moved = cache is None or cache.packed.data_ptr() != kv_cache.data_ptr()
        if self.byte_floats is not None and cache is not None:
            moved |= (cache.key_scale, cache.value_scale) != adapters.scales(layer)
        if moved or cache is None:
            cache = self.cache = read_as(layer, kv_cache, self.packing, self.rows_dtype, self.byte_floats)
        return cache

    def _rows(self, grouped: Tensor, served: ServedRequests) -> Tensor:
        """`[R,Hs,S]`: the rows that the requests choose, see `Store.best`; those of one budget together."""
        assert self.store is not None
        if served.budgets is None:
            return self.store.best(grouped, served.table, self.pages)
        most = served.most(1, self.pages)
        parts = []
        for budget in sorted({*most.tolist()}):
            which = torch.from_numpy((most == budget).nonzero()[0])
            parts.append((which, self.store.best(grouped[which], served.table[which], budget)))
        ids = parts[0][1].new_full((served.count, *parts[-1][1].shape[1:]), -1)
        for which, part_rows in parts:
            ids[which, :, : part_rows.shape[2]] = part_rows
        return ids

    def _look(self, kv_cache: Tensor) -> None:
        """Compare the cache with the self-test's once it is there, which is later than the self-test."""
        if not kv_cache.numel():
            return
        self.looked = True
        held = self.rows_dtype if self.byte_floats is None else torch.uint8
        if kv_cache.shape[1:] == self.shape and kv_cache[0, 0].is_contiguous() and kv_cache.dtype == held:
            return
        self.sparse = False
        self.group.remove(self)  # of the builder too; if it was the last to run, its first step stays uncounted
        heads, block, double = self.shape
        own = f"of {held} and shape [blocks,{heads},{block},{double}] as in the self-test"
        found = f"of {kv_cache.dtype}, shape {list(kv_cache.shape)} and strides {list(kv_cache.stride())}"
        why = f"a layer's cache is {found}, not {own}"
        mismatch.met(self.on_mismatch, ValueError(why))

    def _count(self, served: ServedRequests, kv_cache: Tensor) -> None:
        """Count a step of all layers of the group, whose caches are of one form."""
        assert self.counter is not None
        if self.counting is None or len(self.counting[0]) != len(self.group):
            costs = [impl.costs_of(kv_cache) for impl in self.group]
            kinds = list(dict.fromkeys(costs))
            layers, which = [impl.index for impl in self.group], [kinds.index(cost) for cost in costs]
            self.counting = np.array(layers), np.array(which), kinds
        layers, which, kinds = self.counting
        self.counter.add_step(layers, np.stack([served.counts(*kind) for kind in kinds])[which])

    def costs_of(self, kv_cache: Tensor) -> tuple[int, int, int, int, int, int]:
        """Return what `ServedRequests.counts` takes; `kv_cache`: the layer's or one of the same form."""
        if self.costs is None:
            heads, size = self.num_kv_heads, self.head_size
            entry = entry_bytes(self.selector, heads, size, self.rows_dtype)
            row = 2 * heads * size * kv_cache.element_size()
            query = kv_cache.new_empty(1, heads, self.num_heads // heads, size, dtype=self.rows_dtype)
            once = self.selector.bytes_once(query) if isinstance(self.selector, PageSelector) else 0
            self.costs = self.page, self.pages, self.unit, row, entry, once * heads
        return self.costs

    def index_of(self, kv_cache: Tensor) -> Store:
        """Beside a cache, which is there with the first call."""
        assert isinstance(self.selector, PageSelector)
        count, heads, block, double = kv_cache.shape
        places, given = count * block // self.unit, (heads, double // 2, self.rows_dtype, kv_cache.device)
        if isinstance(self.selector, BlockTails):
            return TailedStore(self.selector, places, *given)
        return Store(self.selector, places, *given)


def first_of(vllm_config: Any) -> SparseCPUBuilder:
    """Return the builder of an engine that has its first sparse layer: each group of layers has one of its own."""
    builders = [builder for builder in BUILDERS if builder.sparse and builder.vllm_config is vllm_config]
    return min(builders, key=lambda builder: min(impl.index for impl in builder.sparse))


def check(settings: Settings | None) -> list[SparseCPUBuilder]:
    """Those that settings would be of; nothing changes.

    Raises:
        RuntimeError: there is no engine in this process that was started with the plug-in.
        ValueError: settings that do not fit.
    """
    builders = [builder for builder in BUILDERS if builder.impls]  # others are of stock engines
    if not builders:
        raise RuntimeError("no engine of this process was started with sparseattn's settings")
    for builder in builders:
        builder.plan(settings)
    return builders


def switch(settings: Settings | None) -> None:
    """Lets the engines of this process serve by other settings, or as stock; indexes are made anew from their caches.

    Raises:
        RuntimeError, ValueError: see `check`; then nothing has changed.
    """
    for builder in check(settings):
        builder.use(settings)
