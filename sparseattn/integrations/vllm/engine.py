"""What an engine must be for us to serve with it: version, configuration and layers, refused at start in a sentence."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sparseattn.integrations.vllm.installed import DISTRIBUTIONS, SERIES
from sparseattn.integrations.vllm.settings import Settings, configured


def why_not_version() -> str | None:
    """Why the installed vLLM is not served, in a sentence; None: it is. Its cache is known of one series alone."""
    found = next((found for name in DISTRIBUTIONS if (found := _version(name)) is not None), None)
    if found is not None and found.startswith(f"{SERIES}."):
        return None
    given = "this vLLM is of no installed distribution" if found is None else f"this is vLLM {found}"
    return f"sparseattn serves with vLLM {SERIES}, whose cache it knows, and {given}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def settings_of(vllm_config: Any) -> Settings | None:
    """The settings of an engine's configuration, checked against it; None where there are none.

    Raises:
        ValueError: settings that `settings.parse` refuses, or an engine that cannot be served.
    """
    settings = configured(vllm_config.additional_config)
    if settings is None:
        return None
    if why := why_not_version():
        raise ValueError(why)
    if vllm_config.kv_transfer_config is not None:
        raise ValueError(
            "sparseattn keeps an index of every block, and KV connectors write blocks behind its back: start vLLM "
            "without --kv-transfer-config"
        )
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "speculative decoding verifies several tokens a step, which stays dense, so that nothing would be sparse: "
            "start vLLM without --speculative-config, or without sparseattn"
        )
    if vllm_config.cache_config.cache_dtype.startswith("fp8"):
        raise ValueError(
            f"an FP8 cache is not served sparsely, got kv_cache_dtype {vllm_config.cache_config.cache_dtype}"
        )
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("context parallelism splits a sequence over ranks, which sparseattn does not serve")
    if vllm_config.model_config.is_hybrid and vllm_config.cache_config.mamba_cache_mode == "align":
        raise ValueError(
            "with mamba_cache_mode=align vLLM copies blocks for prefixes that end within one, behind the back of "
            "sparseattn's index: start vLLM with --no-enable-prefix-caching"
        )
    return settings


def why_dense(impl: Any, attn_type: str, size: int) -> str | None:
    """Why a layer with vLLM's attention `impl` stays dense; None: it may be sparse."""
    reasons = {
        "it is no decoder's self-attention": attn_type != "decoder",
        "it has a sliding window": impl.sliding_window not in (-1, None, (-1, -1)),
        "it shares another layer's keys": impl.kv_sharing_target_layer_name is not None,
        "it caps its logits": bool(impl.logits_soft_cap),
        "it adds ALiBi slopes": impl.alibi_slopes is not None,
        "it has attention sinks of its own": impl.sinks is not None,
        f"its heads have {size} channels, no multiple of 16": size % 16 != 0,
    }
    return next((why for why, true in reasons.items() if true), None)
