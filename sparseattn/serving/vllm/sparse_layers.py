"""Which attention layers of an engine decode sparsely, by one rule for every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparseattn.serving.vllm.adapters import Attention, extract_layer_index, is_of_draft, layers_of
from sparseattn.serving.vllm.engine_checks import nothing_sparse
from sparseattn.serving.vllm.settings import Settings

# Why a layer that could be sparse is not.
EARLY = "it is one of the first of full attention"
DRAFTS = "it is a draft model's"
PLANNED = "the plan leaves it dense"
UNFIT = "this vLLM did not pass the self-test"


def plan_layers(
    settings: Settings, vllm_config: Any, why_dense_layer: Callable[[Attention, Any], str | None]
) -> dict[str, str | None]:
    """Why each attention layer of this process stays dense, by name; None where it is sparse.

    The model's first `dense_layers` of full attention stay dense, where those of an earlier pipeline rank count, and
    those that a plan leaves dense.

    Args:
        settings: of the engine.
        vllm_config: its configuration.
        why_dense_layer: says of a layer, given the configuration, why a backend cannot serve it sparsely; None: it can.

    Raises:
        ValueError: every layer of the model would stay dense, or a plan says nothing of one.
    """
    layers = layers_of(vllm_config)
    why = {
        name: DRAFTS if is_of_draft(name, vllm_config) else why_dense_layer(layer, vllm_config)
        for name, layer in layers.items()
    }
    full = [name for name, reason in why.items() if reason is None]
    parallel = vllm_config.parallel_config
    before, _ = vllm_config.model_config.get_layers_start_end_indices(parallel)
    for name in full[: max(settings.dense_layers - before, 0)]:
        why[name] = EARLY
    for name in full:
        if why[name] is None and settings.is_dense(extract_layer_index(name)):
            why[name] = PLANNED
    if parallel.pipeline_parallel_size == 1 and all(why.values()):
        raise ValueError(nothing_sparse(settings, "; ".join(f"{name}: {reason}" for name, reason in why.items())))
    return why
