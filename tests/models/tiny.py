"""Tiny random models of several families, prompts for them, and what generation gives with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn.models.cache_argument import cache_argument  # noqa: E402

COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "mistral": ("Mistral", {"sliding_window": 16}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "query_pre_attn_scalar": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,  # tied, random ones repeat a token for ever, whatever attention gives
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "cohere": ("Cohere", {"use_qk_norm": True}),
    "glm4": ("Glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoX", {}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
    ),
}
SMALL = {"sink": 2, "window": 8, "seal": 16}  # sealing, in the first tokens and again
NEW = 24


def random_model(family: str, **changes: Any) -> Any:
    """A model of the family with random weights."""
    name, own = (FAMILIES | MIXTURES)[family]
    config_class = transformers.Gemma3TextConfig if name == "Gemma3" else getattr(transformers, f"{name}Config")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config_class(**COMMON | own | changes)).eval()


def small(family: str, **changes: Any) -> Any:
    """A model of the family that generates: to the last token asked for, and Mistral over the whole context."""
    return ending(random_model(family, **({"sliding_window": None} if family == "mistral" else {}) | changes))


def ending(model: Any) -> Any:
    """The model, which generates to the last token asked for, and is told how to pad."""
    model.generation_config.eos_token_id = 256  # beyond the vocabulary: 5.2's prompt lookup cannot do without one
    model.generation_config.pad_token_id = 0
    return model


def sharing_keys() -> Any:
    """A model whose last layer reads the keys and values of layer 1."""
    config = transformers.Gemma3nTextConfig(
        **COMMON | {"num_hidden_layers": 4},
        head_dim=16,
        sliding_window=16,
        layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=256,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    return transformers.Gemma3nForCausalLM(config).eval()


def prompt(tokens: int = 60, batch: int = 1, seed: int = 1) -> Tensor:
    """Random ids, the last of which repeat earlier ones, so that prompt lookup finds drafts."""
    ids = torch.randint(1, 256, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    ids[:, -6:] = ids[:, 10:16]
    return ids


def padded(lengths: tuple[int, ...] = (60, 41, 23)) -> dict[str, Tensor]:
    ids = prompt(max(lengths), len(lengths))
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - n for n in lengths]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens `[B,T]` and logits `[n,B,V]`, or the beams' scores."""
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    if "attention_mask" not in inputs:
        inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    out = model.generate(**inputs, return_dict_in_generate=True, output_logits=True, **cache_argument(cache), **options)
    scores = out.sequences_scores[None] if out.get("sequences_scores") is not None else torch.stack(out.logits)
    return out.sequences, scores


def added(model: Any, cache: Any, ids: Tensor, new: int = 8) -> list[int]:
    """Tokens that a prompt is continued by."""
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), **options)
    return out[0, ids.shape[1] :].tolist()


def same(given: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(given[0], expected[0])
    torch.testing.assert_close(given[1], expected[1], rtol=0, atol=1e-4)


def plain(model: Any) -> Any:
    return transformers.DynamicCache(config=model.config)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "chunked": {"prefill_chunk_size": 16},
    "lookup": {"prompt_lookup_num_tokens": 4},
}
