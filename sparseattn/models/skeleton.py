"""A model with the attention of a published one and next to no weights, for what only the shape decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL = 8  # tokens, and channels of an MLP
UNUSED = ("model_type", "quantization_config", "torch_dtype")


def skeleton(config: Mapping[str, Any]) -> Any:
    """Return a causal LM of random weights with the layers, heads and head_dim of a config, and one channel per head.

    Args:
        config: fields of a config.json of transformers, as in `data/models.json`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    heads = config["num_attention_heads"]
    fields = {name: value for name, value in config.items() if name not in UNUSED}
    fields |= {"head_dim": config.get("head_dim") or config["hidden_size"] // heads, "hidden_size": heads}
    fields |= {"vocab_size": SMALL, "intermediate_size": SMALL}
    if "moe_intermediate_size" in config:
        fields["moe_intermediate_size"] = SMALL
    tokens = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields, **tokens))
    return made.eval()
