"""Models to generate with: of random weights by shape, twins of other attentions that share weights, and prompts."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm import SHAPE
from sparseattn.evaluation.tasks.filler import made_up
from sparseattn.evaluation.tasks.tokens import Tokens

SHAPES: dict[str, dict[str, Any]] = {  # of models with random weights
    "8b": {  # Llama 3.1 8B
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
    },
    "small": SHAPE,  # that vLLM is timed with too (`benchmarks.vllm`)
    "tiny": {  # for a look at whether it runs
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131_072,
    },
}


def with_attention(model: Any, implementation: str) -> Any:
    """A second model of the same weights, which are not copied, with another of transformers' attentions."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation(implementation)
    return twin


def without_attention(model: Any) -> Any:
    """A second model of the same weights, whose layers attend to nothing (`decoding.no_attention`)."""
    from transformers import AttentionInterface

    from benchmarks.decoding import no_attention

    AttentionInterface.register("no_attention", no_attention)
    return with_attention(model, "no_attention")


def random_model(shape: str, layers: int | None, dtype: torch.dtype, device: str) -> Any:
    """A Llama of random weights, the same at every call, made where it is to run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(**settings, dtype=dtype, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def prompt(tokenizer: Any, vocabulary: int | None, count: int) -> Tensor:
    """`[1,count]`: made-up sentences, or for a model of random weights random tokens of its `vocabulary`."""
    if vocabulary is not None:
        return torch.randint(vocabulary, (1, count), generator=torch.Generator().manual_seed(0))
    tokens, sentence = Tokens(tokenizer), made_up(random.Random(0))
    ids = list(tokens.start)
    while len(ids) < count:
        ids += tokens.ids("".join(f"{sentence()} " for _ in range(1000)))
    return torch.tensor([ids[:count]])
