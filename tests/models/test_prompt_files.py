"""A context prefilled once is decoded again from its file, token for token."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from sparseattn import Exact, LowBit, Quest, Selector, SnapKV  # noqa: E402
from sparseattn.cache.prompt_files import FORMAT, VERSION, WHAT, PromptFileError  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache  # noqa: E402
from sparseattn.utils.tensor_files import load_tensors, save_tensors  # noqa: E402
from tests.models.tiny import SMALL, YARN, generate, padded, prompt, same, sharing_keys, small  # noqa: E402


def turn(model: Any, cache: SparseCache, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What a question behind the prompt is answered."""
    ids = inputs["input_ids"]
    follow = torch.randint(1, 256, (len(ids), 9), generator=torch.Generator().manual_seed(5))
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    given = {"input_ids": torch.cat([ids, follow], 1), "attention_mask": torch.cat([mask, torch.ones_like(follow)], 1)}
    return generate(model, cache, given)


SELECTORS: dict[str, Selector] = {"quest": Quest(4), "snapkv": SnapKV(20), "lowbit": LowBit(rows=16)}
FAST = [
    ("quest", "llama", "padded"),
    ("quest", "gemma3", "one"),
    ("snapkv", "gemma3", "padded"),
    ("lowbit", "llama", "one"),
]
OTHERS = [given for given in product(SELECTORS, ("llama", "gemma3", "qwen3"), ("one", "padded")) if given not in FAST]


@pytest.mark.parametrize(
    ("method", "family", "batch"), [*FAST, *(pytest.param(*given, marks=pytest.mark.slow) for given in OTHERS)]
)
def test_a_saved_prompt_is_answered_alike(method: str, family: str, batch: str, tmp_path: Path) -> None:
    selector = SELECTORS[method]
    inputs = padded() if batch == "padded" else {"input_ids": prompt()}
    settings: dict[str, Any] = {**SMALL, "seal": 32, "dense_layers": [0] if family == "llama" else 0}
    with SparseCache(small(family), selector, 12, **settings) as cache:
        for path in ("prefilled", "decoded"):  # behind the prompt alone, and behind a first answer
            generate(cache.model, cache, inputs, max_new_tokens=1 if path == "prefilled" else 20)
            cache.save(tmp_path / path)
            taken = cache._tokens()
            held = dict(inputs) if path == "prefilled" else {"input_ids": prompt(taken, len(inputs["input_ids"]))}
            if path == "decoded" and "attention_mask" in inputs:
                more = torch.ones(len(held["input_ids"]), taken - inputs["attention_mask"].shape[1], dtype=torch.int64)
                held["attention_mask"] = torch.cat([inputs["attention_mask"], more], 1)
            expected = turn(cache.model, cache, held)
            with SparseCache(small(family), selector, 12, **settings) as fresh:
                same(turn(fresh.model, fresh.load(tmp_path / path), held), expected)
                assert fresh.get_seq_length() == cache.get_seq_length()
            cache.reset()


def test_what_is_another_models_is_refused(tmp_path: Path) -> None:
    model, path, settings = small("llama"), tmp_path / "prompt", {**SMALL}
    with SparseCache(model, Quest(4), 12, **settings) as cache:
        with pytest.raises(RuntimeError, match="empty"):
            cache.save(path)
        generate(model, cache, {"input_ids": prompt()}, max_new_tokens=2)
        cache.save(path)
        with pytest.raises(ValueError, match="61 tokens"):
            cache.load(path)
        with pytest.raises(PromptFileError, match=r"SparseCache\.load reads it"):
            type(cache.sparse_layers[0].rows)(Quest(4)).load(path)
    other = small("llama")
    with torch.no_grad():
        next(iter(other.parameters())).mul_(2)
    refused: list[tuple[Any, Selector, dict[str, Any], str]] = [
        (other, Quest(4), settings, "written with other weights, .* of fingerprint"),
        (small("llama").bfloat16(), Quest(4), settings, r"model in torch\.float32, and this one is in torch\.bfloat16"),
        (small("llama"), Exact(), settings, "an index of quest, here it would be exact"),
        (small("llama"), Quest(4), {**settings, "sink": 6}, "sink=2, and this cache has sink=6"),
        (small("llama"), Quest(4), {**settings, "dense_layers": 1}, "was sparse when it was written, and is dense"),
    ]
    for mine, selector, own, said in refused:
        with SparseCache(mine, selector, 12, **own) as cache:
            with pytest.raises(PromptFileError, match=said):
                cache.load(path)
            assert cache.get_seq_length() == 0


def test_layers_that_share_keys_are_saved_too(tmp_path: Path) -> None:
    model, inputs, settings = sharing_keys(), {"input_ids": prompt()}, {**SMALL, "dense_layers": [1]}
    with SparseCache(model, Quest(4), 12, **settings) as cache:
        generate(model, cache, inputs, max_new_tokens=1)
        cache.save(tmp_path / "prompt")
        loaded = SparseCache(model, Quest(4), 12, **settings).load(tmp_path / "prompt")
        same(turn(model, loaded, inputs), turn(model, cache, inputs))


def test_a_model_of_another_rope_is_refused(tmp_path: Path) -> None:
    """The weights are the same. Files of earlier releases say nothing of RoPE, and are taken as before."""
    path, mine, other = tmp_path / "prompt", small("llama"), small("llama", rope_parameters=YARN)
    with SparseCache(mine, Quest(4), 12, **SMALL, dense_layers=[0]) as cache:
        generate(mine, cache, {"input_ids": prompt()}, max_new_tokens=2)
        cache.save(path)
    metadata, tensors = load_tensors(path, FORMAT, VERSION, WHAT)
    said = json.loads(metadata["said"])
    with SparseCache(other, Quest(4), 12, **SMALL, dense_layers=[0]) as cache:
        for layer in range(3):
            with pytest.raises(PromptFileError, match=rf"layer {layer} were turned by .* scaling 1\).* scaling 1\.139"):
                cache.load(path)
            del said["layers"][layer]["rope"]
            save_tensors(path, tensors, {**metadata, "said": json.dumps(said)})
        assert cache.load(path).get_seq_length() == 61


def test_many_questions_are_asked_of_one_file(tmp_path: Path) -> None:
    """A clone of a loaded cache is asked as a clone of the cache that was saved."""
    model = small("llama")
    with SparseCache(model, Quest(4), 12, **SMALL) as cache:
        generate(model, cache, {"input_ids": prompt()}, max_new_tokens=1)
        cache.save(tmp_path / "prompt")
        loaded = SparseCache(model, Quest(4), 12, **SMALL).load(tmp_path / "prompt")
        for seed in (1, 2):
            ids = torch.cat([prompt(), prompt(30, seed=seed)], 1)
            same(
                generate(model, loaded.clone(), {"input_ids": ids}), generate(model, cache.clone(), {"input_ids": ids})
            )
