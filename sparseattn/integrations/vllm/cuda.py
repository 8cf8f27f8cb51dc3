"""Sparse decoding inside vLLM on CUDA, experimental: NOT RUN ON A GPU, for none was at hand, and no speed is claimed.

`CUSTOM` among vLLM's backends: its Triton attention, of which the requests that decode one token and are longer than
`above` read what a selector chooses, by our kernels over vLLM's own block table: scores of pages, the best of them,
`attend(block_table=)`. All else is vLLM's: prompts, short requests, and layers that cannot be sparse (`why_dense`).

What is known without a GPU: under Triton's interpreter vLLM's engine serves float32 by this backend, vLLM's kernels and
ours interpreted, and gives the tokens of its CPU backend at full budget (tests/vllm/test_cuda.py); the kernels compile
for sm_80, sm_90 and sm_100 (tests/test_kernel_compile.py). What is not: 16-bit numbers inside vLLM, launches on
streams, that a CUDA graph records and replays a step, memory, several GPUs, and every time. Of CUDA graphs the test
shows only that a step's tensors keep their addresses and shapes, and that a step recorded once serves later ones.

CUDA graphs: a step of one token a request is of fixed shapes (`cuda_step.Fixed`), so that vLLM may record attention in
its graphs of decoding (`UNIFORM_SINGLE_TOKEN_DECODE`); mixed batches run outside of them. The price is that every step
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
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVQuantMode

from sparseattn.integrations.vllm.cuda_layer import SparseLayer
from sparseattn.integrations.vllm.cuda_step import Eager, Fixed, Step, decoding
from sparseattn.integrations.vllm.plan import Zones
from sparseattn.integrations.vllm.settings import KEY, Settings, configured
from sparseattn.selectors.paged import PageSelector
from sparseattn.selectors.quest import Quest
from sparseattn.selectors.window import Window

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only

GRAPHS = (Quest, Window)  # methods whose step was looked at: no shape depends on data, nothing waits


def register() -> None:
    """Makes this the backend that vLLM calls CUSTOM: `--attention-backend CUSTOM`. May be called more than once."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{SparseTritonBackend.__qualname__}")


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
class SparseMetadata(TritonAttentionMetadata):
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
        refuse(vllm_config)
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False
        logger.warning_once("sparseattn's CUDA backend is experimental: not run on a GPU")
        selector, block = settings.make(), kv_cache_spec.block_size
        indexed = isinstance(selector, PageSelector)
        page, unit = (selector.page, selector.unit) if isinstance(selector, PageSelector) else (1, 1)
        zones = Zones(page, unit, block, settings.sink, settings.window)
        self.eager = Eager(zones, settings.above, indexed)
        self.fixed: Fixed | None = None
        self.sparse = mark(vllm_config, kv_cache_spec, layer_names, settings, selector)
        self.unfitted = list(self.sparse)
        if self.sparse and self.decode_cudagraph_enabled:
            requests, most = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
            self.fixed = Fixed(zones, settings.above, requests, most, device, indexed)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: AttentionSpec) -> AttentionCGSupport:
        looked_at = type(given(vllm_config).make()) in GRAPHS
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if looked_at else AttentionCGSupport.NEVER

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SparseMetadata:
        """As of any step in the fixed buffers, with every request short, as vLLM records its own."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if self._is_fixed(common_attn_metadata):
            none = torch.zeros(common_attn_metadata.num_reqs, dtype=torch.bool)
            self._fill(common_attn_metadata, metadata, none)
        return metadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata:
        common = common_attn_metadata
        if self.unfitted:
            self._fit()
        metadata = SparseMetadata(**vars(super().build(common_prefix_len, common, fast_build)))
        if self._is_fixed(common):
            self._fill(common, metadata, decoding(common, self.eager.above))
        else:
            metadata.places, metadata.step = self.eager.places(common), self.eager.step(common, metadata)
        return metadata

    def _fit(self) -> None:
        """Allocates the index, now that the cache is there: no later, for a graph must not record it."""
        for layer in self.unfitted:
            layer.impl.sparse.fit(layer.kv_cache.split(layer.impl.head_size, dim=-1)[0])
        self.unfitted = []
        size = sum(layer.impl.sparse.bytes for layer in self.sparse)
        logger.info_once("sparseattn: the index takes %.1f MiB beside the cache", size / 2**20)

    def _is_fixed(self, common: CommonAttentionMetadata) -> bool:
        """Whether a graph may have recorded steps like this, which then reads what is filled now: never too seldom."""
        return self.fixed is not None and common.max_query_len == 1

    def _fill(self, common: CommonAttentionMetadata, metadata: SparseMetadata, sparse: Tensor) -> None:
        assert self.fixed is not None
        metadata.places, metadata.step = self.fixed.fill(common, metadata, sparse)


class SparseTritonImpl(TritonAttentionImpl):
    """One layer's attention. `sparse` is None in a dense layer, whose forward is vLLM's."""

    sparse: SparseLayer | None = None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseMetadata | None,
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
        asked = query[:count] if step.queries is None else query[step.queries]  # [n,H*G,D]
        grouped = asked.view(count, self.num_kv_heads, -1, self.head_size)
        out = self.sparse.attend(grouped, keys, values, step, self.scale).view_as(asked)
        if step.queries is not None:
            output[step.queries] = out
        else:
            assert step.sparse is not None
            output[:count] = torch.where(step.sparse[:, None, None], out, output[:count])
        return output


def given(vllm_config: VllmConfig) -> Settings:
    """The settings.

    Raises:
        ValueError: there are none, or see `parse`.
    """
    settings = configured(vllm_config.additional_config)
    if settings is None:
        example = f'{{"{KEY}": {{"selector": "quest", "budget": 2048}}}}'
        raise ValueError(f"the backend CUSTOM is sparseattn's and needs its settings: --additional-config '{example}'")
    return settings


def refuse(vllm_config: VllmConfig) -> None:
    """ValueError for an engine in which rows come or go past this backend, or a request decodes several tokens."""
    parallel = vllm_config.parallel_config
    copied = vllm_config.model_config.is_hybrid and vllm_config.cache_config.mamba_cache_mode == "align"
    unserved = {
        "a KV connector (kv_transfer_config), whose rows have no entries": vllm_config.kv_transfer_config is not None,
        "speculative decoding, whose rows are taken back": vllm_config.speculative_config is not None,
        "contexts that several devices share (context parallelism)": parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "batches in halves (enable_dbo)": parallel.use_ubatching,
        "Mamba layers with mamba_cache_mode=align, for which vLLM copies blocks": copied,
    }
    for what, holds in unserved.items():
        if holds:
            raise ValueError(f"sparseattn's CUDA backend does not serve {what}: leave out one of the two")


def why_dense(impl: Any) -> str | None:
    """Why a layer cannot read sparsely; None: it can."""
    if not isinstance(impl, SparseTritonImpl):
        return "another backend"
    reasons = {
        "no decoder's attention": impl.attn_type != AttentionType.DECODER,
        "a sliding window": impl.sliding_window != (-1, -1),
        "chunks": impl.chunk_lookback != -1,
        "the cache of another layer": impl.kv_sharing_target_layer_name is not None,
        "a soft cap": bool(impl.logits_soft_cap),
        "ALiBi": impl.alibi_slopes is not None,
        "learned sinks": impl.sinks is not None,
        "a head size above 256": impl.head_size > 256,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_dense_cache(spec: AttentionSpec, model: ModelConfig) -> str | None:
    """Why no layer of a model with a cache of this kind can."""
    if not isinstance(spec, FullAttentionSpec) or spec.sliding_window or spec.attention_chunk_size or spec.non_causal:
        return "a cache that is not of full causal attention"
    if spec.kv_quant_mode != KVQuantMode.NONE or spec.dtype != model.dtype:
        return f"a cache of {spec.dtype} in a model of {model.dtype}"
    if model.rswa_window is not None or model.is_mm_prefix_lm:
        return "a mask beyond the causal one"
    if spec.head_size != spec.head_size_v:
        return "values of another size than keys"
    return None


def mark(
    vllm_config: VllmConfig,
    spec: AttentionSpec,
    names: list[str],
    settings: Settings,
    selector: PageSelector | Window,
) -> list[Attention]:
    """Makes layers of a cache's group sparse, and says which.

    The model's first `dense_layers` of full attention stay dense; those of an earlier pipeline rank count.
    """
    model = vllm_config.model_config
    before, _ = model.get_layers_start_end_indices(vllm_config.parallel_config)
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    why = {name: why_dense(layer.impl) for name, layer in layers.items()}
    full = [name for name, reason in why.items() if reason is None]
    early = set(full[: max(settings.dense_layers - before, 0)])
    cache = why_dense_cache(spec, model)
    chosen = [name for name in names if name in full and name not in early and cache is None]
    for name in chosen:
        layers[name].impl.sparse = SparseLayer(selector, spec.block_size, settings.budget)
    reasons = {cache or why.get(name) or "the first of full attention" for name in names if name not in chosen}
    logger.info_once(
        "sparseattn: %d of %d layers decode by %s, budget %d%s",
        *(len(chosen), len(names), settings.selector, settings.budget),
        f"; dense: {', '.join(sorted(reasons))}" if reasons else "",
    )
    return [layers[name] for name in chosen]
