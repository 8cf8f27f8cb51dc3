"""Lossless generation of more kinds of model, by every method; and caches that it refuses, as they do not go back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparseattn.models.cache_argument import cache_argument  # noqa: E402
from sparseattn.models.errors import ModelError  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from sparseattn.selectors.abilities import Evicts  # noqa: E402
from sparseattn.selectors.methods import METHODS  # noqa: E402
from sparseattn.selectors.registry import make_selector  # noqa: E402
from tests.models.lossless_runs import dense, dense_once, lossless, whole  # noqa: E402
from tests.models.tiny import COMMON, SMALL, ending, padded, prompt, random_model, sharing_keys  # noqa: E402

QUEST = "quest:page=4"
SETTINGS: dict[str, dict[str, Any]] = {"gemma3n": {"dense_layers": [1, 3]}}  # layers that share their keys
FAMILIES = ["mixtral", "qwen2_moe", "gemma3n", "llama3", "yarn", "cohere", "glm4"]


@functools.cache
def _model(family: str) -> Any:
    return ending(sharing_keys() if family == "gemma3n" else random_model(family))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, None])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_more_models(family: str, budget: int | None) -> None:
    """Mixtures of experts, layers that share keys, RoPE of other kinds; drafts of all rows are all accepted."""
    model, settings = _model(family), SMALL | SETTINGS.get(family, {})
    for inputs in (whole(prompt()), padded()):
        out = lossless(model, inputs, QUEST, budget, 4, settings=settings)
        assert torch.equal(out.sequences, dense_once(model, inputs))
        assert out.stats.drafted > 0
        if budget is None:
            assert out.stats.acceptance > 0.99


# What these ask for is not there: a file of anchors, the layer before, artefacts for such a layer.
ASKING = {"kascade", "infinigen", "kmeans", "saap", "moments"}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - ASKING))
def test_every_method_drafts_or_is_refused(method: str) -> None:
    """As it is by default, one sequence and several, each draft choosing and the first for all."""
    model, selector = _model("llama"), make_selector(method)
    settings = {"sink": 2, "window": 8}
    if selector.find(Evicts):
        with pytest.raises(ValueError, match="drops rows for good, which full attention would have to read"):
            lossless(model, whole(prompt()), method, 8, 4, settings=settings)
        return
    budget = max(8, getattr(selector, "span", 8))
    for inputs in (whole(prompt()), padded()):
        for once in (False, True):
            out = lossless(model, inputs, method, budget, 4, settings=settings, choose_once=once)
            assert torch.equal(out.sequences, dense_once(model, inputs))
            assert out.stats.drafted > 0


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["given", "static", "offloaded_static"])
def test_static_caches_are_refused(how: str) -> None:
    model = _model("llama")
    asked = {"cache_implementation": how}
    if how == "given":
        asked = cache_argument(transformers.StaticCache(config=model.config, max_cache_len=128))
    with pytest.raises(ValueError, match=r"keep their rows in a SparseCache.* got a StaticCache"):
        lossless(model, whole(prompt()), QUEST, 8, 2, **asked)


def test_caches_that_offload_are_refused() -> None:
    """As no SparseCache would do what was asked for; one of `sealed_device` does."""
    model = _model("llama")
    with pytest.raises(ValueError, match=r"a cache that offloads was asked for: .* give Lossless sealed_device"):
        lossless(model, whole(prompt()), QUEST, 8, 2, cache_implementation="offloaded")
    out = lossless(model, whole(prompt()), QUEST, 8, 2, settings=SMALL | {"sealed_device": "cpu"})
    assert torch.equal(out.sequences, dense_once(model, whole(prompt())))


HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "jamba": ("Jamba", {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 4}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_only_layers": [0, 1, 2],
            **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
        },
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),
    "mamba": ("Mamba", {"state_size": 4}),
}


@functools.cache
def _hybrid(name: str) -> Any:
    kind, own = HYBRIDS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON | own)
    return ending(getattr(transformers, f"{kind}ForCausalLM")(config).eval())


@pytest.mark.parametrize("draft", [0, 3])
@pytest.mark.parametrize("name", ["jamba", "lfm2", "qwen3_next"])
def test_layers_with_a_state_are_refused(name: str, draft: int) -> None:
    """At the first turn and behind a turn of `generate`: a convolution's state says that it crops once it is there."""
    model = _hybrid(name)
    sentence = r"layer 0 of \w+ForCausalLM keeps a state that does not go back \(LinearAttentionLayer\)"
    with pytest.raises(ModelError, match=sentence):
        lossless(model, whole(prompt()), QUEST, 8, draft)
    with SparseCache(model, QUEST, 8, **SMALL) as cache:
        first = dense(model, whole(prompt()), max_new_tokens=3, **cache_argument(cache))
        turn = whole(torch.cat([first, prompt(16, seed=3)], 1))
        before = cache.get_seq_length()
        with pytest.raises(ModelError, match=sentence):
            lossless(model, turn, None, None, draft, cache=cache)
        assert cache.get_seq_length() == before
        again = dense(model, turn, max_new_tokens=3, **cache_argument(cache))
    assert again.shape[1] == turn["input_ids"].shape[1] + 3


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(ModelError, match="MambaForCausalLM runs no softmax attention"):
        lossless(_hybrid("mamba"), whole(prompt()), QUEST, 8, 3)
