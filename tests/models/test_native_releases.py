"""Families and releases of transformers that keep or pass another thing than is read: each a sentence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn.models.errors import ModelError
from sparseattn.models.native_choice import choice_of
from sparseattn.models.native_index import CachedIndex, native_index
from sparseattn.models.sparse_cache import SparseCache
from tests.models.tiny import generate, plain, same
from tests.models.tiny_native import FOLLOWED, GLM5_NEXT, IDS, followed, inputs, native

BOTH: list[dict[str, Any]] = [{"native": True}, {"selector": "quest:page=4"}]


def cache_like(keys: Tensor, *places: str) -> Any:
    """A cache of transformers with one layer, which has these methods."""
    return SimpleNamespace(layers=[SimpleNamespace(keys=keys, **dict.fromkeys(places))])


def test_what_a_release_keeps_otherwise() -> None:
    """By a layer of DeepSeek-V3.2, and what caches of older releases would hold of it."""
    module = native("deepseek_v32").model.layers[0].self_attn
    keys, latents, passed = torch.zeros(1, 4, 4, 40), torch.zeros(1, 1, 4, 32), {"indices": torch.zeros(1, 4, 4).int()}
    today = CachedIndex(cache_like(latents, "update_indexer"), 0, keys, folded=False)
    assert native_index(torch.nn.Identity(), {}, today) is None
    index = native_index(module, passed, today)
    assert index is not None
    assert (index.passes, index.latent, index.unreadable, index.fixed) == ("indices", True, None, None)

    every_head = native_index(module, passed, replace(today, cache=cache_like(keys, "update_indexer")))
    assert every_head is not None
    assert "stores keys and values of every head, as releases before 5.18 do" in str(every_head.unreadable)
    assert every_head.fixed is None  # a selector may choose among them

    itself = native_index(module, passed, replace(today, cache=cache_like(latents)))
    assert itself is not None
    assert itself.fixed == itself.unreadable == "DeepseekV32Attention keeps the keys of its index to itself"

    positions = cache_like(latents, "update_indexer")
    positions.position_ids = torch.zeros(3, 1, 4)
    beside = native_index(module, passed, replace(today, cache=positions))
    assert beside is not None
    assert "beside the layers of the cache, as releases before 5.21 do" in str(beside.fixed)

    folded = native_index(module, passed, replace(today, folded=True))
    assert folded is not None
    assert (folded.unreadable, folded.fixed) == (
        None,
        "DeepseekV32Attention passes indices and folds them into its mask too",
    )


@pytest.mark.parametrize("family", list(FOLLOWED))
def test_an_older_release_is_refused(family: str) -> None:
    """Where it is installed; the law above is of all releases."""
    if followed(family):
        pytest.skip(f"{family} of the installed transformers is followed")
    words = r"cannot be followed with transformers 5\.\d+\.\d+, as .* (releases before 5|to itself)"
    with pytest.raises(ModelError, match=words):
        SparseCache(native(family, follow=False), native=True)


@pytest.mark.parametrize("settings", BOTH)
def test_a_choice_folded_into_a_mask_over_expanded_keys(settings: dict[str, Any]) -> None:
    model, given = native(GLM5_NEXT, "sdpa"), inputs()
    for dense in ([], [1]):  # layer 2 reads what layer 1 chose, and has no index of its own
        with pytest.raises(
            ModelError, match=rf"layer {1 + len(dense)} .* passes no indices and folds them into a mask"
        ):
            SparseCache(model, dense_layers=dense, **settings)
    expected = generate(model, plain(model), given)  # the model is as it was
    with SparseCache(model, dense_layers=[1, 2, 3], **settings) as cache:
        same(generate(model, cache, given), expected)
        assert not cache.sparse_layers


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_mask_of_a_layer_s_own(implementation: str) -> None:
    """Doge chooses rows and weighs them by a mask that it makes of values, and says nothing of it."""
    modules = pytest.importorskip("transformers.models.doge.modeling_doge")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = modules.DogeForCausalLM(modules.DogeConfig(**sizes, keep_window_size=16, **IDS)).eval()
    model.set_attn_implementation(implementation)
    with pytest.raises(ModelError, match="layer 0 of DogeForCausalLM makes a mask of its own, by which it may choose"):
        SparseCache(model, "quest:page=4")
    with pytest.raises(ModelError, match="no layer with an index of its own"):
        SparseCache(model, native=True)


def test_a_choice_of_another_form() -> None:
    module = native("minimax_m3_vl").model.layers[1].self_attn
    ids = torch.zeros(1, 2, 1, 3, dtype=torch.int64)
    for options, mask, words in (
        ({"indices": ids}, None, r"integers \[B,1,S\] are read"),
        ({"block_indices": ids.float()}, None, r"integers \[B,Hs,1,S\] are read"),
        ({"block_indices": ids}, torch.ones(1, 40), r"with a mask other than \[B,1,n,N\]"),
        ({}, None, "passes no indices"),
    ):
        with pytest.raises(ModelError, match=words):
            choice_of(module, options, mask, tokens=1, columns=40, padded=False)
