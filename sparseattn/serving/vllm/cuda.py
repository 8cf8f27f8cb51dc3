"""Sparse decoding inside vLLM on CUDA, experimental: NOT RUN ON A GPU, and no speed is claimed.

`CUSTOM` among vLLM's backends: its Triton attention, of which the requests that decode one token and are longer than
`above` read what a selector chooses, by our kernels over vLLM's own block table: scores of pages, the best of them,
`attend(block_table=)`. All else is vLLM's: prompts, short requests, layers that cannot be sparse (`why_dense_layer`).

What is known without a GPU: under Triton's interpreter vLLM's engine serves float32 by this backend, vLLM's kernels and
ours interpreted, and gives the tokens of its CPU backend at full budget (tests/vllm/test_cuda.py); the kernels compile
for sm_80, sm_90 and sm_100 (tests/kernels/test_compile.py). What is not: 16-bit numbers inside vLLM, launches on
streams, that a CUDA graph records and replays a step, memory, several GPUs, and every time. Of CUDA graphs the test
shows only that a step's tensors keep their addresses and shapes, and that a step recorded once serves later ones.

CUDA graphs: a step of one token a request is of fixed shapes (`cuda_step.FixedBuffers`), so that vLLM may record
attention in its graphs of decoding (`UNIFORM_SINGLE_TOKEN_DECODE`); mixed batches run outside of them. Every step then
scores and ranks as many places as `max_model_len` has pages and runs vLLM's attention beside ours. `enforce_eager`, or
`cudagraph_mode` PIECEWISE, pays by the longest request instead. Methods whose step nobody has looked at say `NEVER`.

The index lies beside the cache, which vLLM has measured the memory for without it: Quest's takes `1 / page` of the
cache's size, to be left free by `--gpu-memory-utilization`.

vLLM's Triton attention is the base because its kernels take lengths as data: a sparse request is given to them with one
row and its output overwritten. FlashAttention 3 plans on the device ahead of a step and would have to plan twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVQuantMode

from sparseattn.selectors.baselines.window import Window
from sparseattn.selectors.pages.base import PageSelector
from sparseattn.selectors.pages.quest import Quest
from sparseattn.serving.vllm.counters import Counter
from sparseattn.serving.vllm.cuda_layer import SparseCUDALayer
from sparseattn.serving.vllm.cuda_step import Eager, FixedBuffers, Step, decoding, reads
from sparseattn.serving.vllm.engine_checks import check_shape, settings_of, why_dense
from sparseattn.serving.vllm.installed import why_not_on_cuda
from sparseattn.serving.vllm.page_index import entry_bytes
from sparseattn.serving.vllm.page_tables import engine_zones
from sparseattn.serving.vllm.settings import KEY, Settings
from sparseattn.serving.vllm.sparse_layers import plan_layers

logger = init_logger("vllm.sparseattn")

GRAPHS = (Quest, Window)  # methods whose step was looked at: no shape depends on data, nothing waits


class SparseTritonBackend(TritonAttentionBackend):
    """vLLM's Triton attention with sparse decoding. See the module."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseTritonImpl]:
        return SparseTritonImpl

    @staticmethod
    def get_builder_cls() -> type[SparseTritonBuilder]:
        return SparseTritonBuilder

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability >= DeviceCapability(8, 0)  # the least that our kernels are compiled for

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # rows that come from elsewhere would have no entries


@dataclass
class SparseCUDAMetadata(TritonAttentionMetadata):
    """vLLM's metadata of a step, as dense layers read it, and what sparse layers need beside."""

    step: Step | None = None  # None: no request reads sparsely
    places: Tensor | None = None  # [n] int64, entries to compute from the rows that this step writes


class SparseTritonBuilder(TritonAttentionMetadataBuilder):
    """Builds a step's metadata, and tells the layers which of them are sparse.

    Raises:
        ValueError: no settings, or an engine that this cannot serve.
    """

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        settings = given(vllm_config)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        logger.warning_once("sparseattn's CUDA backend is experimental: not run on a GPU")
        block, longest = kv_cache_spec.block_size, vllm_config.model_config.max_model_len
        page, unit = settings.shape
        check_shape(settings, block)
        self.zones, self.above = engine_zones(settings, page, unit, block, longest), settings.above
        indexed = any(isinstance(made, PageSelector) for made in settings.each())
        self.eager = Eager(self.zones, indexed)
        self.fixed: FixedBuffers | None = None
        self.sparse = take(vllm_config, kv_cache_spec, layer_names, settings)
        spec = kv_cache_spec
        # Of each sparse layer its number, and the bytes of an entry of its index; the numbers of the others.
        self.counted = [
            (
                extract_layer_index(layer.layer_name),
                entry_bytes(layer.impl.sparse.selector, spec.num_kv_heads, spec.head_size, spec.dtype),
            )
            for layer in self.sparse
        ]
        taken = {index for index, _ in self.counted}
        self.others = [index for name in layer_names if (index := extract_layer_index(name)) not in taken]
        self.unfitted = list(self.sparse)
        if self.sparse and self.decode_cudagraph_enabled:
            requests, most = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
            self.fixed = FixedBuffers(self.zones, requests, most, device, indexed)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        looked_at = all(type(made) in GRAPHS for made in given(vllm_config).each())
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if looked_at else AttentionCGSupport.NEVER

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SparseCUDAMetadata:
        """As of any step in the fixed buffers, with every request short, as vLLM records its own. Counts nothing."""
        common = common_attn_metadata
        none = torch.zeros(common.num_reqs, dtype=torch.bool)
        metadata = self._metadata(common, none)
        metadata.seq_lens.fill_(1)
        if self._is_fixed(common):
            self._fill(common, metadata, none)
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCUDAMetadata:
        sparse = decoding(common_attn_metadata, self.above)
        metadata = self._metadata(common_attn_metadata, sparse)
        self._count(common_attn_metadata, metadata, sparse)
        return metadata

    def _metadata(self, common: CommonAttentionMetadata, sparse: Tensor) -> SparseCUDAMetadata:
        """Of a step whose requests `sparse` `[R]`, bool on the host, decode sparsely."""
        if self.unfitted:
            self._fit()
        metadata = SparseCUDAMetadata(**vars(super().build(0, common)))
        if self._is_fixed(common):
            self._fill(common, metadata, sparse)
        else:
            metadata.places, metadata.step = self.eager.places(common), self.eager.step(common, metadata, sparse)
        return metadata

    def _fit(self) -> None:
        """Allocates the index, now that the cache is there: no later, for a graph must not record it."""
        for layer in self.unfitted:
            layer.impl.sparse.fit(layer.kv_cache.split(layer.impl.head_size, dim=-1)[0])
        self.unfitted = []
        size = sum(layer.impl.sparse.store.nbytes for layer in self.sparse if layer.impl.sparse.store is not None)
        logger.info_once("sparseattn: the index takes %.1f MiB beside the cache", size / 2**20)

    def _is_fixed(self, common: CommonAttentionMetadata) -> bool:
        """Whether a graph may have recorded steps like this, which then reads what is filled now: never too seldom."""
        return self.fixed is not None and common.max_query_len == 1

    def _fill(self, common: CommonAttentionMetadata, metadata: SparseCUDAMetadata, sparse: Tensor) -> None:
        assert self.fixed is not None
        metadata.places, metadata.step = self.fixed.fill(common, metadata, sparse)

    def _count(self, common: CommonAttentionMetadata, metadata: SparseCUDAMetadata, sparse: Tensor) -> None:
        """Return what the step's layers do, counted here: a graph that is replayed counts nothing. On the host
        alone."""
        rows, heads = common.seq_lens_cpu_upper_bound[sparse], self.kv_cache_spec.num_kv_heads
        row = 2 * heads * self.kv_cache_spec.head_size * self.kv_cache_spec.dtype.itemsize
        read = {pages: reads(self.zones, rows, pages) for pages in {layer.impl.sparse.pages for layer in self.sparse}}
        stored = int(rows.sum())
        scored = int((self.zones.sealed(rows) - self.zones.first).sum())
        dense = bool((~sparse & (common.query_start_loc_cpu.diff() > 0)).any())
        counter = Counter.of_process()
        for index in self.others:
            counter.add(index, dense_steps=1)
        for layer, (index, entry) in zip(self.sparse, self.counted, strict=True):
            counter.add(
                index,
                sparse_steps=len(rows),
                dense_steps=int(dense),
                rows_read=read[layer.impl.sparse.pages],
                rows_held=stored,
                bytes_read=read[layer.impl.sparse.pages] * row + scored * entry,
                bytes_held=stored * row,
                entries_made=0 if metadata.places is None else len(metadata.places),
            )


class SparseTritonImpl(TritonAttentionImpl):
    """One layer's attention. `sparse` is None in a dense layer, whose forward is vLLM's."""

    sparse: SparseCUDALayer | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseCUDAMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """As of vLLM's; the new rows lie in `kv_cache` `[blocks,H,block,2D]` already."""
        dense = super().forward
        if self.sparse is None or attn_metadata is None:
            rest = attn_metadata
            return dense(layer, query, key, value, kv_cache, rest, output, output_scale, output_block_scale)
        keys, values = kv_cache.split(self.head_size, dim=-1)
        self.sparse.update(keys, attn_metadata.places)
        step = attn_metadata.step
        rest = attn_metadata if step is None else step.others
        if rest is not None:
            dense(layer, query, key, value, kv_cache, rest, output, output_scale, output_block_scale)
        if step is None:
            return output
        count = len(step.blocks)
        queries = query[:count] if step.queries is None else query[step.queries]  # [n,H*G,D]
        grouped = queries.view(count, self.num_kv_heads, -1, self.head_size)
        out = self.sparse.attend(grouped, keys, values, step, self.scale).view_as(queries)
        if step.queries is not None:
            output[step.queries] = out
        else:
            assert step.sparse is not None
            output[:count] = torch.where(step.sparse[:, None, None], out, output[:count])
        return output


def given(vllm_config: VllmConfig) -> Settings:
    """Return the settings.

    Raises:
        ValueError: there are none, or an engine that cannot be served.
    """
    settings = settings_of(vllm_config)
    if why := why_not_on_cuda():
        raise ValueError(why)
    if settings is None:
        example = f'{{"{KEY}": {{"selector": "quest", "budget": 2048}}}}'
        raise ValueError(f"the backend CUSTOM is sparseattn's and needs its settings: --additional-config '{example}'")
    return settings


def why_dense_layer(layer: Attention, vllm_config: VllmConfig) -> str | None:
    """Why a layer cannot be sparse; None: it can."""
    impl, spec, model = layer.impl, layer.get_kv_cache_spec(vllm_config), vllm_config.model_config
    if not isinstance(impl, SparseTritonImpl):
        return "it has another backend"
    if not isinstance(spec, AttentionSpec):
        return "it has no cache of keys and values of its own"
    full = isinstance(spec, FullAttentionSpec) and not (spec.sliding_window or spec.attention_chunk_size)
    reasons = {
        "it attends in chunks": impl.chunk_lookback != -1,
        "its heads have more than 256 channels": impl.head_size > 256,
        "its cache is not of full causal attention": not full or spec.non_causal,
        f"its cache is of {spec.dtype} in a model of {model.dtype}": spec.kv_quant_mode != KVQuantMode.NONE
        or spec.dtype != model.dtype,
        "its values are of another size than its keys": spec.head_size != spec.head_size_v,
        "its model has a mask beyond the causal one": model.rswa_window is not None or model.is_mm_prefix_lm,
    }
    here = next((why for why, holds in reasons.items() if holds), None)
    return why_dense(impl, impl.attn_type, impl.head_size) or here


def take(
    vllm_config: VllmConfig,
    spec: AttentionSpec,
    names: list[str],
    settings: Settings,
) -> list[Attention]:
    """Make layers of a cache's group sparse, and say which."""
    layers = get_layers_from_vllm_config(vllm_config, Attention, names)
    every = plan_layers(settings, vllm_config, why_dense_layer)
    taken, reasons = [], set()
    for name, layer in layers.items():
        if (why := every[name]) is None:
            index = extract_layer_index(name)
            layer.impl.sparse = SparseCUDALayer(settings.make(index), spec.block_size, settings.pages(index))
            taken.append(layer)
        else:
            reasons.add(why)
    logger.info_once(
        "sparseattn: %d of %d layers decode by %s, where a sequence has more than %d rows%s",
        *(len(taken), len(names), settings.label, settings.above),
        f"; a layer is dense where {', or '.join(sorted(reasons))}" if reasons else "",
    )
    return taken
