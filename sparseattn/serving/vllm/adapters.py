"""The names of vLLM's internals that the plug-in stands on, and what differs between versions of them.

vLLM promises none of these names between its minor releases (a contract for attention plug-ins is proposed in its RFC
57566). So the rest of the plug-in takes them from here and names no version. Whether they still mean what they meant
is not looked up but tried, by `self_test`.

- 0.27: the CPU backend's module does not have `get_layers_from_vllm_config`, which `vllm.config` has in every version.
- 0.27, 0.28: a layer's `impl` holds the instruction set by which rows are packed; from 0.29 on the layer does. So rows
  are written by the layer's own call, and steps are planned by the builder's, which has it in every version.
- 0.27, 0.28: a metadata builder takes the size of blocks from the cache's configuration, later from the specification
  of its group's cache, which has it in every version.
- `CommonAttentionMetadata` gains and loses fields with every release: a step of ours fills those that are there.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from sparseattn.core.context import Heads
from sparseattn.serving.vllm.defaults import BYTE_FLOATS

__all__ = [
    "Attention",
    "CommonAttentionMetadata",
    "FullAttentionSpec",
    "extract_layer_index",
    "get_current_vllm_config",
    "get_layers_from_vllm_config",
    "logger",
]

logger = init_logger("vllm.sparseattn")


def block_rows(builder: Any) -> int:
    """Rows of a block of the builder's layers."""
    return int(builder.kv_cache_spec.block_size)


def byte_floats(layer: Any) -> torch.dtype | None:
    """Return the 8-bit float dtype that a layer keeps rows as, which need not be its engine's; None: the model's."""
    name = BYTE_FLOATS.get(layer.kv_cache_dtype)
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def scales(layer: Any) -> tuple[float, float]:
    """Return what a layer's keys and values of 8-bit floats are to be multiplied by."""
    return float(layer._k_scale_float), float(layer._v_scale_float)


def write(layer: Any, keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Lets vLLM write rows into a cache as a layer of it packs them.

    Args:
        layer: of the engine.
        keys, values: `[n,H,D]`.
        cache: of the layer's layout, `[blocks,H,block,2*D]` as far as we know.
        slots: `[n]` int64, where each row goes, counted over all blocks.
    """
    layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)


def schedule(builder: Any, metadata: Any, rows: Tensor) -> Tensor:
    """vLLM's plan of a step's attention, as if its requests had so many `rows` `[R]` int32."""
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(rows),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=rows,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=metadata.causal,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


def step(starts: Tensor, rows: Tensor, blocks: Tensor, slots: Tensor, prefilling: Tensor) -> CommonAttentionMetadata:
    """vLLM's description of a step, as a metadata builder is given it.

    Args:
        starts: `[R+1]` int32, where each request's new rows begin among all new rows.
        rows: `[R]` int32, of each request, the new ones among them.
        blocks: `[R,M]` int32, the block table.
        slots: `[T]` int64, where each new row lies.
        prefilling: `[R]` bool, which requests are within their prompts.
    """
    given: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": rows,
        "seq_lens_cpu_upper_bound": rows,
        "num_reqs": len(rows),
        "num_actual_tokens": len(slots),
        "max_query_len": int(starts.diff().max()),
        "max_seq_len": int(rows.max()),
        "block_table_tensor": blocks,
        "slot_mapping": slots,
        "is_prefilling": prefilling,
        "causal": True,
    }
    names = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in names})


def prefilling(common: CommonAttentionMetadata, count: int) -> Tensor | None:
    """`[count]` bool, which requests of a step are within their prompts; None: this engine does not say."""
    return None if common.is_prefilling is None else common.is_prefilling[:count]


def runner_around(builder: Any) -> Any:
    """Return the engine's object that runs steps, of a call that came from it; None: there is none, as in a test.

    No builder is told of it, and nothing that a builder is given names the requests of a step.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not builder and hasattr(owner, "input_batch") and hasattr(owner, "requests"):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def request_names(runner: Any, count: int) -> list[str] | None:
    """Return the names of a step's `count` requests; None: it is no step of theirs, such as one of random tokens."""
    names: list[str] = runner.input_batch.req_ids
    return names[:count] if len(names) >= count else None


def extra_args(runner: Any, count: int) -> list[dict[str, Any] | None] | None:
    """Return what each of a step's `count` requests was given as `extra_args` (`vllm_xargs`); None: see
    `request_names`."""
    if (names := request_names(runner, count)) is None:
        return None
    sampling = (runner.requests[name].sampling_params for name in names)
    return [None if params is None else params.extra_args for params in sampling]


def verified(vllm_config: Any) -> int:
    """Return the new tokens that a request decodes in a step, at most: one, and those that a draft proposed."""
    draft = vllm_config.speculative_config
    return 1 if draft is None else 1 + int(draft.num_speculative_tokens or 0)


def is_of_draft(name: str, vllm_config: Any) -> bool:
    """Whether a layer is a draft model's."""
    draft = vllm_config.speculative_config
    return draft is not None and draft.method == "draft_model" and name.startswith("draft_model.")


def layers_of(vllm_config: Any, names: list[str] | None = None) -> dict[str, Any]:
    """Return the attention layers of this process, by name."""
    return dict(get_layers_from_vllm_config(vllm_config, Attention, names))


def heads_here(vllm_config: Any, count: int) -> Heads | None:
    """Which of a layer's KV heads the `count` of this process are; None: all."""
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    if ranks == 1:
        return None
    first = get_tensor_model_parallel_rank() * total // ranks
    return Heads(tuple(range(first, first + count)), total)


def attended(
    impl: Any, layer: Any, query: Tensor, keys: Tensor, values: Tensor, cache: Tensor, metadata: Any
) -> Tensor:
    """`[T,H*G,D]`: what a layer's `impl` makes of a step whose rows are in the cache."""
    output = torch.full_like(query, float("nan"))
    impl.forward(layer, query, keys, values, cache, metadata, output=output)
    return output
