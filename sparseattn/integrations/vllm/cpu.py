"""vLLM's attention on the CPU with sparse decoding: chosen pages are read where they lie in its packed blocks.

Everything that is not the decoding of one token of a long sequence is the stock backend's: prefill, short sequences,
layers with windows, and whatever runs unconfigured. So blocks keep the size and packing that suit its kernel. An
entry of the index is computed from the cache when its last row was written: that holds for chunked prefill, prefix hits
(whole blocks), recycled blocks and preempted requests alike.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
    get_layers_from_vllm_config,
)

from sparseattn.integrations.vllm.counters import Counter
from sparseattn.integrations.vllm.engine import settings_of, why_dense
from sparseattn.integrations.vllm.plan import Zones
from sparseattn.integrations.vllm.settings import Settings
from sparseattn.integrations.vllm.store import Store
from sparseattn.kernels import blocks
from sparseattn.selectors.paged import PageSelector

logger = init_logger("vllm.sparseattn")


def check_shape(settings: Settings, block: int) -> None:
    """ValueError where pages do not fit blocks, or registers."""
    page, unit, _ = settings.shape
    if page % 16:
        raise ValueError(f"on a CPU, pages are a multiple of 16 rows, got {page} from {settings.selector!r}")
    if block % unit:
        raise ValueError(
            f"a block of the engine holds whole entries of the index: {settings.selector!r} has entries of {unit} rows "
            f"and this engine blocks of {block}; start vLLM with a --block-size that is a multiple of {unit}"
        )


def packing_of(isa: str, dtype: torch.dtype, heads: int, block: int, size: int) -> str:
    """The packing of a cache, seen by letting the engine write rows and reading them.

    Raises:
        ValueError: a packing that is not known.
    """
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 2 * block, heads, size, generator=draw).to(dtype)
    for packing in blocks.PACKINGS:
        cache = torch.zeros(2, heads, block, 2 * size, dtype=dtype)
        halves = cache.view(2, heads, 2 * block, size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(rows[0], rows[1], *halves, torch.arange(2 * block), isa)
        read = [part(cache, packing, torch.arange(2), block) for part in (blocks.keys, blocks.values)]
        if all(torch.equal(a.transpose(1, 2).flatten(0, 1), b) for a, b in zip(read, rows, strict=True)):
            return packing
    raise ValueError(
        f"the packing of vLLM's cache for {isa!r} with {dtype} is not known: sparseattn reads "
        f"{' and '.join(blocks.PACKINGS)}"
    )


def warm_up(dtype: torch.dtype, packing: str, queries: int, heads: int, block: int, size: int, zones: Zones) -> None:
    """Compiles what a step runs, for this engine's dtype: it takes seconds the first time."""
    cache = torch.zeros(1, heads, block, 2 * size, dtype=dtype)
    query = torch.zeros(1, queries, size, dtype=dtype)
    place = torch.zeros(1, 1, dtype=torch.int32)
    scores = torch.zeros(1, heads, zones.unit // zones.page)
    tails = torch.ones(1, dtype=torch.int32)
    blocks.attend(
        query, torch.empty_like(query), cache, packing, zones.page, zones.unit, place, tails, place, scores, 1,
        torch.zeros(1, dtype=torch.int64), 1.0,
    )  # fmt: skip


class SparseCPUBackend(CPUAttentionBackend):
    """The stock backend, or where an engine is configured ours."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CPUAttentionBackendImpl if settings_of(get_current_vllm_config()) is None else SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SparseCPUBuilder


@dataclass
class Served:
    """The requests that decode sparsely in a step, and what they may read.

    Args:
        tokens: `[R]` int64, their rows of the query.
        count: R.
        in_order: whether these are the first R.
        table, always, tails: see `blocks.attend`.
        rest: metadata of the other requests, in which ours attend to one row; None: there are no others.
        read, held: rows that a KV head reads and has, in all.
    """

    tokens: Tensor
    count: int
    in_order: bool
    table: Tensor
    always: Tensor
    tails: Tensor
    rest: CPUAttentionMetadata | None
    read: int
    held: int


@dataclass
class SparseMetadata(CPUAttentionMetadata):
    """The stock metadata, with what sparse layers need.

    Args:
        finished: `[n]` int64, entries whose last row is written in this step; None: there are none.
        served: None: no request decodes sparsely.
    """

    finished: Tensor | None = None
    served: Served | None = None


class SparseCPUBuilder(CPUAttentionMetadataBuilder):
    """Makes the tables of a step, once for all layers of a group."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.settings = settings_of(vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.sparse = [
            name for name, layer in layers.items() if isinstance(layer.impl, SparseCPUImpl) and layer.impl.take(name)
        ]
        if self.settings is None or not self.sparse:
            return
        page, unit, self.budget = self.settings.shape
        self.zones = Zones(page, unit, self.block_size, self.settings.sink, self.settings.window)
        check_shape(self.settings, self.block_size)
        packing = packing_of(self.isa, self.dtype, self.num_kv_heads, self.block_size, self.head_dim)
        warm_up(self.dtype, packing, self.num_heads, self.num_kv_heads, self.block_size, self.head_dim, self.zones)
        logger.info(
            "sparseattn: %s, budget %d, sink %d, window %d, sequences above %d rows, in %d layers; blocks of %d (%s)",
            self.settings.selector,
            self.settings.budget,
            self.settings.sink,
            self.settings.window,
            self.settings.above,
            len(self.sparse),
            self.block_size,
            self.isa,
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.settings is None or not self.sparse:
            return stock
        metadata = SparseMetadata(**{field.name: getattr(stock, field.name) for field in dataclasses.fields(stock)})
        metadata.finished = self.finished(stock)
        metadata.served = self._served(stock, common_attn_metadata)
        return metadata

    def finished(self, stock: CPUAttentionMetadata) -> Tensor | None:
        """`[n]`: entries whose last row a step writes; None: none."""
        unit = self.zones.unit
        slots = stock.slot_mapping[: stock.num_actual_tokens]
        places = slots[((slots + 1) % unit == 0) & (slots >= 0)] // unit
        return places if len(places) else None

    def _served(self, stock: CPUAttentionMetadata, common: CommonAttentionMetadata) -> Served | None:
        settings, starts, rows = self.settings, stock.query_start_loc, stock.seq_lens
        if settings is None or stock.max_seq_len <= settings.above or not stock.causal:
            return None
        ours = (starts.diff() == 1) & (rows > settings.above)
        if common.is_prefilling is not None:  # a prompt's last token that comes alone is no decoding
            ours &= ~common.is_prefilling[: len(ours)]
        which = ours.nonzero()[:, 0]
        count = len(which)
        if not count:
            return None
        every = count == len(ours)
        own, table = (rows, stock.block_table) if every else (rows[which], stock.block_table[which])
        most = int(own.max())
        entries = self.zones.entries(own, table, most)
        always, tails = self.zones.always(own, table)
        rest = None
        if not every:
            fewer = torch.where(ours, 1, rows)
            rest = dataclasses.replace(stock, seq_lens=fewer, scheduler_metadata=self._schedule(stock, fewer))
        zone = self.zones
        pages = (entries >= 0).sum(1) * (zone.unit // zone.page)
        near = ((always >= 0).sum(1) - 1) * zone.page + tails
        read = int((pages.clamp(max=self.budget) * zone.page + near).sum())
        tokens = starts[:-1][which].long()
        return Served(tokens, count, every, entries, always, tails, rest, read, int(own.sum()))

    def _schedule(self, stock: CPUAttentionMetadata, rows: Tensor) -> Tensor:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(rows),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            seq_lens=rows,
            dtype=self.dtype,
            query_start_loc=stock.query_start_loc,
            causal=stock.causal,
            sliding_window_size=self.window_size,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class SparseCPUImpl(CPUAttentionBackendImpl):
    """One layer: the stock backend's, but for requests that a step serves sparsely."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        settings = settings_of(get_current_vllm_config())
        assert settings is not None  # or vLLM would have been given the stock class
        self.settings: Settings = settings
        self.dense = why_dense(self, self.attn_type, self.head_size)
        self.sparse = False
        self.store: Store | None = None
        self.packing = ""
        self.counter: Counter | None = None

    def take(self, name: str) -> bool:
        """Learns which layer it is; whether it is to be sparse."""
        layer = extract_layer_index(name)
        if self.dense is None and layer < self.settings.dense_layers:
            self.dense = f"it is one of the first {self.settings.dense_layers} layers"
        self.sparse = self.dense is None
        self.selector = self.settings.make().for_layer(layer)
        self.page, self.unit, self.pages = self.settings.shape
        self.counter = Counter.of_process()
        return self.sparse

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        metadata = attn_metadata
        if not self.sparse or not isinstance(metadata, SparseMetadata):
            if metadata is not None and self.dense is not None and self.counter is not None:
                self.counter.add(dense_calls=1)
            return super().forward(
                layer, query, key, value, kv_cache, metadata, output, output_scale, output_block_scale
            )
        assert self.counter is not None
        if not self.packing:
            self._begin(layer, kv_cache)
        if metadata.finished is not None and self.store is not None:
            keys = blocks.keys(kv_cache, self.packing, metadata.finished, self.unit)
            self.store.update(metadata.finished, keys)
            self.counter.add(entries_made=len(metadata.finished))
        served = metadata.served
        if served is None or served.rest is not None:
            dense = metadata if served is None else served.rest
            super().forward(layer, query, key, value, kv_cache, dense, output, output_scale, output_block_scale)
            self.counter.add(dense_calls=1)
        if served is None:
            return output
        heads, size = self.num_kv_heads, self.head_size
        asked = query[: served.count] if served.in_order else query[served.tokens]
        grouped = asked.view(served.count, heads, -1, size)
        if self.store is None:
            scores = torch.empty(served.count, heads, 0)
        else:
            scores = self.store.scores(grouped, served.table)
        blocks.attend(
            query, output, kv_cache, self.packing, self.page, self.unit, served.always, served.tails, served.table,
            scores, self.pages, served.tokens, self.scale,
        )  # fmt: skip
        self.counter.add(sparse_calls=served.count, rows_read=served.read * heads, rows_held=served.held * heads)
        return output

    def _begin(self, layer: Any, kv_cache: Tensor) -> None:
        """The first call with a cache: makes the index beside it."""
        count, heads, block, double = kv_cache.shape
        self.packing = packing_of(layer.isa, kv_cache.dtype, heads, block, double // 2)
        if isinstance(self.selector, PageSelector):
            places = count * block // self.unit
            self.store = Store(self.selector, places, heads, double // 2, kv_cache.dtype, kv_cache.device)
