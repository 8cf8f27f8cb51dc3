"""Tiny random models of the families that have an index of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

IDS: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
COMMON: dict[str, Any] = {"hidden_size": 64, "max_position_embeddings": 512, "initializer_range": 0.3, **IDS}
LATENT: dict[str, Any] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "head_dim": 16,
    "index_topk": 12,
    "index_head_dim": 32,
    "index_n_heads": 2,
    **COMMON,
}
SHARED = ["full", "shared", "full"]  # the second layer reads what the first chose
DOTS_LAYERS = ["sliding_attention", "indexed_attention", "indexed_attention"]
MINIMAX: dict[str, Any] = {
    "intermediate_size": 32,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 8,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    **COMMON,
}
QSA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,  # each release has a name of its own for the latter
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "mrope_section": [4, 2, 2],
    },
    **COMMON,
}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MISTRAL: dict[str, Any] = {
    "text_config": {
        **{name: value for name, value in LATENT.items() if name != "q_lora_rank"},
        "indexer_types": SHARED,
    },
    "vision_config": {**PIXTRAL, "intermediate_size": 32, "image_size": 28, "patch_size": 14},
}
# Family -> names of its config and of its model, and what is its own.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "minimax_m3_vl": ("MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", MINIMAX),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", QSA),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {**LATENT, "first_k_dense_replace": 1}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM", {**LATENT, "indexer_types": SHARED}),
    "axk2": ("AXK2Config", "AXK2ForCausalLM", LATENT),
    "hy_v4": ("HYV4Config", "HYV4ForCausalLM", {**LATENT, "indexer_types": SHARED, "hc_mult": 2}),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {**LATENT, "layer_types": DOTS_LAYERS, "sliding_window": 16, "shared_experts_intermediate_size": 32},
    ),
    "mistral_large4": ("MistralLarge4Config", "MistralLarge4ForConditionalGeneration", MISTRAL),
}


GLM5_NEXT = "glm5_next"  # which is refused, so that laws of `FAMILIES` leave it out
FOLDED: dict[str, Any] = {
    "text_config": {
        **{name: value for name, value in LATENT.items() if name != "head_dim"},
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] + ["full_attention"] * 3,
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense"] * 4,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64},
    **{
        f"{kind}_{what}token_id": IDS["vocab_size"] - 1
        for kind in ("image", "video")
        for what in ("", "start_", "end_")
    },
}
REFUSED = {GLM5_NEXT: ("Glm5NextConfig", "Glm5NextForConditionalGeneration", FOLDED)}
# The releases of transformers from which on what a family keeps can be followed; before, tests are of the refusal.
FOLLOWED = {"qwen4_exp": (5, 21), **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"), (5, 18))}
RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))


def followed(family: str) -> bool:
    """Whether the installed transformers keeps what `native=True` reads of a family."""
    return FOLLOWED.get(family, RELEASE) <= RELEASE


def native(family: str, implementation: str = "eager", *, follow: bool = True, **changes: Any) -> Any:
    """A model of a family, skipping where the installed transformers does not know it, or cannot be followed in it."""
    config, kind, own = (FAMILIES | REFUSED)[family]
    if follow and not followed(family):
        pytest.skip(f"{family} of transformers {transformers.__version__} is refused")
    modules = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    model = getattr(modules, kind)(getattr(modules, config)(**own | changes)).eval()
    model.set_attn_implementation(implementation)
    model.generation_config.eos_token_id = IDS["vocab_size"]  # never
    return model


def inputs(batch: int = 1, padding: int = 0, tokens: int = 70) -> dict[str, Tensor]:
    """Random ids, of which prompt lookup finds some again; the last sequence begins with padding."""
    ids = torch.randint(3, 96, (batch, tokens), generator=torch.Generator().manual_seed(1))
    ids[:, -6:] = ids[:, 10:16]
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def densely(model: Any) -> Any:
    """Let every layer attend to all rows: its index is taken away, or chooses everything."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if indexer is None:
            continue
        if hasattr(indexer, "block_topk"):
            indexer.token_budget, indexer.block_topk = 512, 512 // indexer.compress_ratio
        elif hasattr(indexer, "topk_blocks"):  # nothing depends on it where there is none
            module.indexer = None
        else:
            indexer.index_topk = 512
    return model
