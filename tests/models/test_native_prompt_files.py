"""Prompt caches of models with an index of their own: rows or latents, and the keys of that index, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn.cache.prompt_files import PromptFileError
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.sparse_cache import SparseCache
from tests.models.tiny import SMALL, generate
from tests.models.tiny_native import native

INSTEAD: dict[str, Any] = {"selector": "quest:page=4", "budget": 12, **SMALL}
NATIVE: dict[str, Any] = {"native": True}
# The index shared by layers, beside sliding layers, with sinks, and with positions; and how long padding is.
FAST = [
    ("minimax_m3_vl", NATIVE, 9),
    ("glm_moe_dsa", NATIVE, 0),
    ("minimax_m3_vl", INSTEAD, 0),
    ("glm_moe_dsa", INSTEAD, 9),
]
OTHERS = [
    *((family, settings, 9 - padding) for family, settings, padding in FAST),
    *(
        (family, settings, padding)
        for family, settings in (
            ("deepseek_v32", NATIVE),
            ("dots3_note", NATIVE),
            ("dots3_note", INSTEAD),
            ("hy_v4", NATIVE),
            ("qwen4_exp", NATIVE),
        )
        for padding in (0, 9)
    ),
]
# QSA as published has layers of linear attention too, whose state no file holds.
ALL_INDEXED: dict[str, Any] = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}


def prompt(padding: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(3, 96, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def turn(model: Any, cache: SparseCache, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What a question behind what is held is answered: a chunk of a prompt, and tokens one by one."""
    held = cache.get_seq_length()
    ids = torch.randint(3, 96, (2, held + 9), generator=torch.Generator().manual_seed(5))
    more = torch.ones(2, held + 9 - given["attention_mask"].shape[1], dtype=torch.int64)
    mask = torch.cat([given["attention_mask"], more], 1)
    return generate(model, cache, {"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(
    ("family", "settings", "padding"), [*FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_a_saved_prompt_is_answered_alike(family: str, settings: dict[str, Any], padding: int, tmp_path: Path) -> None:
    changes = ALL_INDEXED if family == "qwen4_exp" else {}
    model, given = native(family, **changes), prompt(padding)
    with SparseCache(model, **settings) as cache:
        for new in (1, 20):  # behind the prompt alone, and behind a first answer
            generate(model, cache, given, max_new_tokens=new)
            cache.save(tmp_path / "prompt")
            loaded = SparseCache(model, **settings).load(tmp_path / "prompt")
            loaded.save(tmp_path / "again")
            assert (tmp_path / "again").read_bytes() == (tmp_path / "prompt").read_bytes()
            assert loaded.get_seq_length() == cache.get_seq_length()
            assert all(map(torch.equal, turn(model, loaded, given), turn(model, cache, given)))
            cache.reset()


@torch.no_grad()
@pytest.mark.parametrize("family", ["minimax_m3_vl", "glm_moe_dsa"])
def test_tokens_of_a_file_are_taken_back(family: str, tmp_path: Path) -> None:
    """Some of the tokens that the file held: what is left is a shorter prompt."""
    model, ids = native(family), prompt()["input_ids"]
    with SparseCache(model, native=True) as cache:
        model(ids[:, :50], **cache_argument(cache))
        for one in ids[:, 50:60].split(1, 1):
            model(one, **cache_argument(cache))
        cache.save(tmp_path / "prompt")
        loaded = SparseCache(model, native=True).load(tmp_path / "prompt")
        first, second = (model(ids[:, 60:61], **cache_argument(one)).logits for one in (cache, loaded))
        assert torch.equal(first, second)
        for one in (cache, loaded):
            one.crop(-9)
        first, second = (model(ids[:, 52:53], **cache_argument(one)).logits for one in (cache, loaded))
        assert torch.equal(first, second)


def test_the_index_of_the_file_is_read(tmp_path: Path) -> None:
    """So that the law above says something: without those keys the same file is answered otherwise."""
    model, given = native("glm_moe_dsa"), prompt()
    with SparseCache(model, native=True) as cache, torch.no_grad():
        model(**given, **cache_argument(cache))
        cache.save(tmp_path / "prompt")
        loaded, other = (SparseCache(model, native=True).load(tmp_path / "prompt") for _ in range(2))
        for layer in other.sparse_layers.values():
            if layer._index is not None:
                layer._index.full.neg_()
        first, second = (turn(model, one, given)[1] for one in (loaded, other))
        assert (first - second).abs().max() > 0.1


def test_what_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    model, given, path = native("minimax_m3_vl"), prompt(), tmp_path / "prompt"
    with SparseCache(model, native=True) as cache, torch.no_grad():
        with pytest.raises(RuntimeError, match="empty"):
            cache.save(path)
        model(**given, **cache_argument(cache))
        cache.save(path)
        for settings, words in (
            ({**INSTEAD, "dense_layers": [0]}, "was native when it was written, and is sparse here"),
            ({"native": True, "dense_layers": [2]}, "holds keys and values, and this layer keeps a MiniMaxM3VLSparse"),
        ):
            fresh = SparseCache(model, **settings)
            with pytest.raises(PromptFileError, match=words):
                fresh.load(path)
            assert fresh.get_seq_length() == 0
            model(**given, **cache_argument(fresh))
            if "native" in settings:
                with pytest.raises(PromptFileError, match="layer 2: a prompt cache holds keys and values"):
                    fresh.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
