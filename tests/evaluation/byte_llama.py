"""A random Llama whose tokens are bytes, small enough for tests of whole commands."""

from __future__ import annotations

from pathlib import Path

import torch


def save_byte_llama(path: Path) -> Path:
    """Save it in a folder, of two layers with two KV heads and 1,024 positions, and return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path
