"""Engines of vLLM in this process on small random models, and what they answered and counted."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from sparseattn.core.activity import Activity
from sparseattn.serving.vllm.counters import stats

VOCABULARY = 512
LAYERS = 4
LENGTHS = (700, 300, 40, 520, 129, 260, 90, 333)  # of prompts
TOKENS = (24, 60, 70, 24, 8, 40, 24, 30)  # the third request becomes long enough to be sparse while it decodes
FULL = 1 << 20  # a budget for every row
SPARSE: dict[str, Any] = {"selector": "quest", "budget": FULL, "sink": 4, "window": 32, "dense_layers": 1, "above": 100}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,  # so that prompts are filled in parts, beside requests that decode
    "kv_cache_memory_bytes": 24 << 20,
    "disable_log_stats": False,
    "seed": 0,
}


def llama(
    folder: Path, heads: int = 4, kv_heads: int = 2, size: int = 64, layers: int = LAYERS, words: int = VOCABULARY
) -> Path:
    """A random Llama whose every token depends on attention to far rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=words, hidden_size=32 * heads, intermediate_size=256, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=size, max_position_embeddings=4096,
        bos_token_id=None, eos_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    return _saved(LlamaForCausalLM, config, folder)


def gemma(folder: Path, kinds: Sequence[str]) -> Path:
    """A random Gemma 3, whose layers with windows see 64 rows; `kinds`: "sliding" or "full" for each layer."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=len(kinds),
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, sliding_window=64,
        layer_types=[f"{kind}_attention" for kind in kinds], query_pre_attn_scalar=16, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, initializer_range=0.15,
    )  # fmt: skip
    return _saved(Gemma3ForCausalLM, config, folder)


def with_tokenizer(folder: Path) -> Path:
    """The model `llama` with a word for each token, which beams ask for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return llama(folder)


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = kind(config)
    for name, weight in model.named_parameters():
        if "post_" in name and "norm" in name and kind.__name__.startswith("Gemma"):
            weight.data.fill_(3.0)  # else the embedding outweighs the layers, and each token is said again
    model.save_pretrained(folder)
    return folder


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of so many tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@dataclass
class Answer:
    """What an engine said to some requests, and what it counted meanwhile.

    Args:
        tokens: of each sample of each request.
        logprobs: of the token with the highest, likewise.
        stats: the plug-in's counters.
        engine: vLLM's counters.
    """

    tokens: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    stats: Activity
    engine: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def engine(model: Path, sparse: dict[str, Any] | None, apart: bool = False, **given: Any) -> Iterator[LLM]:
    """An engine with settings of the plug-in, or stock; `given` over `ENGINE`. `apart`: in processes of its own."""
    additional = {} if sparse is None else {"sparseattn": sparse}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # vLLM looks at every name
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(apart)))
        # vLLM collects five times while it starts, over all that imports left: half of its five seconds. Where it
        # starts, its shutdown undoes this. What an earlier engine left goes first, or it would stay among the builders.
        plugin = sys.modules.get("sparseattn.serving.vllm.cpu")  # a test keeps it from being loaded
        if plugin is not None and plugin.BUILDERS:
            gc.collect()
        gc.freeze()
        try:
            llm = LLM(model=str(model), additional_config=additional, **{**ENGINE, **given})
        except BaseException:
            gc.unfreeze()
            raise
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def ask(llm: LLM, asked: list[list[int]], tokens: int | Sequence[int] = 24, **sampling: Any) -> Answer:
    """Answers of so many tokens, or of as many for each request, greedily unless `sampling` says otherwise."""
    before, metrics = stats(), counted(llm)
    each = [tokens] * len(asked) if isinstance(tokens, int) else tokens
    common = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 1, **sampling}
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in asked],
        [SamplingParams(max_tokens=most, **common) for most in each],
        use_tqdm=False,
    )
    samples = [one.outputs for one in outputs]
    return Answer(
        [[list(sample.token_ids) for sample in several] for several in samples],
        [
            [[max(p.logprob for p in at.values()) for at in one.logprobs or ()] for one in several]
            for several in samples
        ],
        stats() - before,
        {name: count - metrics[name] for name, count in counted(llm).items()},
    )


def switched(llm: LLM, sparse: dict[str, Any] | None) -> LLM:
    """The engine with other settings of the plug-in, None for stock's, and no prompt in its cache: as a new engine.

    Its builders pass the self-test anew, as where an engine starts. Every engine of this process is switched.
    """
    from sparseattn.serving.vllm import cpu
    from sparseattn.serving.vllm.settings import parse

    gc.collect()  # `switch` finds engines that ended too, until they are collected
    cpu.switch(None if sparse is None else parse(sparse))
    assert llm.reset_prefix_cache()
    return llm


def counted(llm: LLM) -> dict[str, int]:
    """vLLM's counters."""
    return {metric.name: int(metric.value) for metric in llm.get_metrics() if type(metric).__name__ == "Counter"}


def layers(llm: LLM) -> dict[str, Any]:
    """The engine's attention layers by name."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    return dict(worker.model_runner.compilation_config.static_forward_context)


def decoded(lengths: Sequence[int], tokens: Sequence[int], above: int = SPARSE["above"]) -> int:
    """Tokens that are decoded in sequences above so many rows; the first token of each is the prompt's."""
    return sum(length + at > above for length, most in zip(lengths, tokens, strict=True) for at in range(1, most))


def check_counts(answer: Answer, full: bool) -> None:
    """That it decoded sparsely, and read every row or not."""
    ran = answer.stats
    assert ran.sparse_steps > 0, ran
    if full:
        assert ran.rows_read == ran.rows_held > 0, ran
    else:
        assert 0 < ran.rows_read < ran.rows_held, ran
