"""What an engine must be for us to serve with it: version, configuration and layers, refused at start in a sentence."""

from __future__ import annotations

from typing import Any

from sparseattn.core.no_effect import idle_above, refuse
from sparseattn.serving.vllm import mismatch
from sparseattn.serving.vllm.above import AUTO
from sparseattn.serving.vllm.block_tails import BlockTails
from sparseattn.serving.vllm.defaults import ABOVE, BYTE_FLOATS
from sparseattn.serving.vllm.installed import why_not_on_cuda, why_not_version
from sparseattn.serving.vllm.settings import Settings, configured

FULL = "full_attention"  # as transformers calls a layer's kind
DRAFTS = ("ngram", "draft_model")  # methods of speculative decoding that were tried, on CPUs
WHOLE = ("auto", "float32", "float16", "bfloat16")  # numbers of a cache as vLLM calls them
KINDS = {FULL, "sliding_attention", "chunked_attention", "linear_attention"}


def settings_of(vllm_config: Any) -> Settings | None:
    """Return the settings of an engine's configuration, checked against it; None where there are none.

    Raises:
        ValueError: settings that `settings.parse` refuses, or an engine that cannot be served.
        Mismatch: a configuration that is not as this knows it, unless the settings say to serve as stock.
    """
    settings = configured(getattr(vllm_config, "additional_config", None))
    if settings is None:
        return None
    if why := why_not_version():
        raise ValueError(why)
    try:
        _check_engine(vllm_config, settings)
    except (AttributeError, TypeError) as error:  # another vLLM may name its settings otherwise
        mismatch.met(settings.on_mismatch, error)
        return None
    return settings


def _check_engine(vllm_config: Any, settings: Settings) -> None:
    """ValueError for an engine that cannot be served."""
    cache, device = vllm_config.cache_config, vllm_config.device_config.device_type
    if getattr(cache, "kv_offloading_size", None):
        why = "vLLM itself offloads the cache of GPUs alone"
        if device != "cpu":
            why = f"on {device} sparseattn's index does not notice rows that come back"
        raise ValueError(f"{why}: start vLLM without --kv-offloading-size")
    if vllm_config.kv_transfer_config is not None and device != "cpu":
        raise ValueError(
            f"on CPUs sparseattn's index notices rows that a KV connector loads, and on {device} it does not: start "
            f"vLLM without --kv-transfer-config"
        )
    check_requests(settings, device)
    draft = vllm_config.speculative_config
    if draft is not None and device != "cpu":
        raise ValueError(
            f"drafts are verified sparsely on CPUs alone, got the method {draft.method!r} on {device}: start vLLM "
            f"without --speculative-config"
        )
    if draft is not None and draft.method not in DRAFTS:
        raise ValueError(
            f"drafts of the method {draft.method!r} were not tried with sparseattn: give --speculative-config a "
            f"method of {', '.join(DRAFTS)}, or start without it"
        )
    kept = cache.cache_dtype
    if kept not in WHOLE and (device != "cpu" or kept not in BYTE_FLOATS):
        raise ValueError(
            f"sparseattn reads keys and values as floats of the model's type, and on CPUs as those of 8 bits "
            f"({', '.join(BYTE_FLOATS)}): start vLLM with kv_cache_dtype auto, got kv_cache_dtype {kept} on {device}"
        )
    if kept in BYTE_FLOATS and getattr(cache, "kv_cache_dtype_skip_layers", None):
        raise ValueError(
            f"with a cache of 8 bits all layers have it, got kv_cache_dtype {kept} and layers that skip it: start vLLM "
            f"without --kv-cache-dtype-skip-layers"
        )
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 and device == "cpu":
        raise ValueError(
            f"pipeline parallelism ends vLLM's own CPU engine at its first step, with sparseattn and without: start it "
            f"without --pipeline-parallel-size, got {parallel.pipeline_parallel_size}"
        )
    if getattr(parallel, "use_ubatching", False):
        raise ValueError(
            "dual-batch overlap makes two plans of a step, which sparseattn does not: start without --enable-dbo"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("context parallelism splits a sequence over ranks, which sparseattn does not serve")
    if settings.shape[0] == 1 and device != "cpu":
        raise ValueError(
            f"single rows are read on CPUs alone, and {settings.called!r} chooses them: on CUDA serve pages, such as "
            f"quest:page=16"
        )
    if device != "cpu" and any(isinstance(made, BlockTails) for made in settings.each()):
        raise ValueError(f"tails are estimated on CPUs alone, got {settings.called!r} on {device}: serve its inner one")
    _check_measured(vllm_config, settings)
    drafts = draft is not None and vllm_config.model_config is draft.draft_model_config
    if vllm_config.model_config is not None and not drafts:  # None: no model is served by this configuration
        _check_model(vllm_config, settings)


def check_requests(settings: Settings, device: str) -> None:
    """ValueError for a limit of what requests ask, on a device where they may ask nothing."""
    if settings.max_budget is not None and device != "cpu":
        raise ValueError(
            f"requests choose a budget of their own on CPUs alone, so that --max-budget {settings.max_budget} limits "
            f"nothing on {device}: leave it out"
        )


def _check_measured(vllm_config: Any, settings: Settings) -> None:
    """ValueError for an engine that cannot measure `above`."""
    if not settings.measured:
        return
    if vllm_config.parallel_config.tensor_parallel_size > 1 or vllm_config.device_config.device_type != "cpu":
        raise ValueError(
            f"above {AUTO} is measured on CPUs, by one process for all heads: give a number of rows, such as {ABOVE}"
        )


def check_platform(device: str, backend: Any) -> None:
    """ValueError where vLLM would not ask our backend on a device of a type, so that nothing would be sparse.

    Args:
        device: "cpu", "cuda" or another of vLLM's.
        backend: the attention backend that vLLM was told to take, None for its own choice.
    """
    if device == "cpu":
        return
    if device != "cuda":
        raise ValueError(f"sparseattn serves on CPUs and, experimentally, on CUDA, and this vLLM runs on {device}")
    if getattr(backend, "name", backend) != "CUSTOM":
        raise ValueError("on CUDA sparseattn is vLLM's backend CUSTOM: start vLLM with --attention-backend CUSTOM")
    if why := why_not_on_cuda():
        raise ValueError(why)


def _check_model(vllm_config: Any, settings: Settings) -> None:
    """ValueError for a model of which nothing would be sparse, as far as its configuration tells."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if model.use_mla:
        raise ValueError(
            "this model's attention is MLA, whose cache of latents sparseattn does not read: start vLLM without it"
        )
    if model.runner_type == "pooling":
        raise ValueError("this model decodes nothing (it is run for pooling), so that nothing would be sparse")
    if model.is_attention_free:
        raise ValueError("this model has no attention, so that nothing would be sparse: start vLLM without sparseattn")
    if cache.enable_prefix_caching and cache.mamba_cache_mode == "align":
        raise ValueError(
            "vLLM copies blocks of models with Mamba layers for cached prefixes, and the index of a copy would be "
            "missing: start vLLM with --no-enable-prefix-caching"
        )
    if not model.is_hybrid:  # or vLLM still chooses larger blocks
        check_shape(settings, cache.block_size)
    kinds = getattr(model.hf_text_config, "layer_types", None)
    if kinds and set(kinds) <= KINDS and not model.disable_sliding_window:
        full = list(kinds).count(FULL)
    else:  # each may be; what they are is seen when they are made
        full = model.get_total_num_hidden_layers()
    if settings.dense_layers >= full:
        raise ValueError(nothing_sparse(settings, f"it has {full} of full attention"))
    refuse(idle_above(settings.above, model.max_model_len, "the longest sequence of this engine (max_model_len)"))


def check_shape(settings: Settings, block: int) -> None:
    """ValueError where pages do not fit blocks, or registers."""
    page, unit = settings.shape
    if page != 1 and page % 16:
        raise ValueError(
            f"in vLLM, pages are a multiple of 16 rows, or single rows, got {page} from {settings.called!r}"
        )
    if block % unit:
        raise ValueError(
            f"a block of the engine holds whole entries of the index: {settings.called!r} has entries of {unit} rows "
            f"and this engine blocks of {block}; start vLLM with a --block-size that is a multiple of {unit}"
        )


def nothing_sparse(settings: Settings, why: str) -> str:
    """Return what is said of a model without a sparse layer."""
    return (
        f"no layer of this model would be sparse with dense_layers {settings.dense_layers} ({why}): start vLLM with "
        f"fewer dense_layers, or without sparseattn"
    )


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
