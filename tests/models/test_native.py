"""Models with an index of their own: decoded by its choice as they decode themselves, and by selectors instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseattn import Selection, attend
from sparseattn.kernels.attend_latents import attend_latents
from sparseattn.models.cache_argument import cache_argument
from sparseattn.models.capture import capture
from sparseattn.models.error_sensitivity import observe
from sparseattn.models.errors import ModelError
from sparseattn.models.lossless import generate_lossless
from sparseattn.models.native_choice import check_lists
from sparseattn.models.prefill import Prefill
from sparseattn.models.sparse_cache import SparseCache, restore
from sparseattn.training import train_index
from sparseattn.training.index_run import IndexRecipe
from tests.models.tiny import MODES, SMALL, generate, plain, same, small
from tests.models.tiny_native import FAMILIES, RELEASE, densely, inputs, native

SLOW = pytest.mark.slow
QUICK = ("minimax_m3_vl", "qwen4_exp", "glm_moe_dsa")
# Implementation, sequences and padding of the last of them, and the families that are tried quickly so.
RUNS = [("eager", 1, 0, ("qwen4_exp",)), ("eager", 2, 9, ("glm_moe_dsa",)), ("sdpa", 1, 0, ())]
RUNS.append(("sdpa", 2, 9, ("minimax_m3_vl",)))
EACH_RUN = [
    pytest.param(family, *run, marks=[] if family in quick else SLOW)
    for *run, quick in RUNS
    for family in FAMILIES
    if (family, run[0]) != ("hy_v4", "sdpa")  # which has none
]
QUICK_MODES = [("minimax_m3_vl", "lookup"), ("glm_moe_dsa", "chunked")]
EACH_MODE = [
    pytest.param(family, mode, marks=[] if (family, mode) in QUICK_MODES else SLOW)
    for family in FAMILIES
    for mode in MODES
    if mode != "greedy" and (family, mode) != ("qwen4_exp", "lookup")  # linear attention does not go back
]


@pytest.mark.parametrize(("family", "implementation", "batch", "padding"), EACH_RUN)
def test_native_is_the_model_itself(family: str, implementation: str, batch: int, padding: int) -> None:
    model, given = native(family, implementation), inputs(batch, padding)
    expected = generate(model, plain(model), given)
    with SparseCache(model, native=True) as cache:
        same(generate(model, cache, given), expected)
        stats = cache.stats()
        assert stats.sparse_calls == 23 * len(cache.sparse_layers) > 0
        assert stats.rows < 0.4 * stats.context  # so that the law says something
    dense = generate(densely(model), plain(model), given)
    assert (dense[1][0] - expected[1][0]).abs().max() > 0.1  # and the choice matters


@pytest.mark.parametrize(("family", "mode"), EACH_MODE)
def test_native_in_every_mode(family: str, mode: str) -> None:
    model = native(family)
    expected = generate(model, plain(model), inputs(), **MODES[mode])
    with SparseCache(model, native=True) as cache:
        same(generate(model, cache, inputs(), **MODES[mode]), expected)


@pytest.mark.parametrize("family", ["minimax_m3_vl", "glm_moe_dsa"])
def test_native_goes_back_and_on(family: str) -> None:
    model, given = native(family), inputs()["input_ids"]
    with SparseCache(model, native=True) as cache, torch.no_grad():
        model(given[:, :-2], **cache_argument(cache))
        twin = cache.clone()
        first = [model(one, **cache_argument(cache)).logits for one in given[:, -2:].split(1, 1)]
        cache.crop(-2)
        again = [model(one, **cache_argument(cache)).logits for one in given[:, -2:].split(1, 1)]
        other = [model(one, **cache_argument(twin)).logits for one in given[:, -2:].split(1, 1)]
        assert all(map(torch.equal, again, other))
        assert all(map(torch.equal, first, again))
        assert cache.get_seq_length() == twin.get_seq_length() == given.shape[1]
        for budget in (8, None):
            with pytest.raises(ValueError, match="leave budget out"):
                cache.clone(budget=budget)
        cache.reset()
        model(given[:, :-2], **cache_argument(cache))
        torch.testing.assert_close(model(given[:, -2:-1], **cache_argument(cache)).logits, again[0])


@torch.no_grad()
@pytest.mark.parametrize("family", ["minimax_m3_vl", "qwen4_exp", "glm_moe_dsa"])
def test_native_behind_a_dense_prefill(family: str) -> None:
    """As where the index chooses everything in the prompt, and as ever behind it."""
    model, given = native(family), inputs()["input_ids"]
    prompt = Prefill(model, given[:, :60])
    with prompt.cache(native=True) as cache:
        ours = torch.cat([model(one, **cache_argument(cache)).logits for one in given[:, 60:].split(1, 1)], 1)
    restore(model)
    cache = plain(model)
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    names = ("topk_blocks", "index_topk", "token_budget", "block_topk")
    before = [{name: getattr(one, name) for name in names if hasattr(one, name)} for one in indexers]
    for one in indexers:
        vars(one).update({name: 256 for name in names if hasattr(one, name)})
    model(given[:, :60], **cache_argument(cache))
    for one, own in zip(indexers, before, strict=True):
        vars(one).update(own)
    theirs = torch.cat([model(one, **cache_argument(cache)).logits for one in given[:, 60:].split(1, 1)], 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["minimax_m3_vl", "glm_moe_dsa"])
def test_native_after_a_pass_that_was_cut_short(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = native(family), inputs(2)
    expected = generate(model, plain(model), given)
    last = model.model.layers[2].self_attn
    own, calls = last.indexer.forward, []

    def broken(*args: Any, **options: Any) -> Tensor:
        calls.append(own(*args, **options))  # whose keys are stored by now
        if len(calls) in (1, 7):
            raise RuntimeError("broken")
        return calls[-1]

    with SparseCache(model, native=True) as cache:
        monkeypatch.setattr(last.indexer, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, cache, given)
        cache.crop(0)
        with pytest.raises(RuntimeError, match="broken"):
            generate(model, cache, given)
        with pytest.raises(RuntimeError, match="cut short"):
            generate(model, cache, given)
        cache.crop(0)
        assert cache.get_seq_length() == 70 + 4
        cache.crop(-4)
        following = model(given["input_ids"][:, -1:], attention_mask=_longer(given), **cache_argument(cache)).logits
        cache.reset()
        same(generate(model, cache, given), expected)
    cache = plain(model)
    model(**given, **cache_argument(cache))
    again = model(given["input_ids"][:, -1:], attention_mask=_longer(given), **cache_argument(cache)).logits
    torch.testing.assert_close(following, again, rtol=0, atol=1e-4)


def _longer(given: dict[str, Tensor]) -> Tensor:
    """The mask with another token."""
    return torch.nn.functional.pad(given["attention_mask"], (0, 1), value=1)


@pytest.mark.parametrize("dense", [[1], [0, 2]])
def test_layers_that_stay_as_they_are_follow_their_index(dense: list[int]) -> None:
    model, given = native("glm_moe_dsa"), inputs()
    expected = generate(model, plain(model), given)
    with SparseCache(model, native=True, dense_layers=dense) as cache:
        same(generate(model, cache, given), expected)
        assert set(cache.sparse_layers) == {0, 1, 2} - set(dense)


@pytest.mark.parametrize(
    ("mode", "padding"),
    [("greedy", 9), *(pytest.param("chunked", padding, marks=SLOW) for padding in (0, 9))],
)
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in FAMILIES if name != "hy_v4"],  # sinks
)
def test_a_selector_instead_of_the_index(family: str, mode: str, padding: int) -> None:
    """At exhaustive settings it is dense attention without the index."""
    follow = family == "qwen4_exp" or RELEASE < (5, 17)  # where an index cannot be left out either
    model = native(family, "sdpa" if padding else "eager", follow=follow)
    given = inputs(2, padding)
    with SparseCache(model, "quest:page=4", None, **SMALL) as cache:
        exhaustive = generate(model, cache, given, **MODES[mode])
        assert cache.stats().sparse_calls == 23 * len(cache.sparse_layers) > 0
    with SparseCache(model, "quest:page=4", 8, **SMALL) as cache:
        few = generate(model, cache, given, **MODES[mode])
    expected = generate(densely(model), plain(model), given, **MODES[mode])
    same(exhaustive, expected)
    torch.testing.assert_close(few[1][0], expected[1][0], rtol=0, atol=1e-4)  # of the prompt's last token
    assert not torch.allclose(few[1][1], expected[1][1], atol=1e-2)


def test_an_index_trained_on_traces_of_the_model(tmp_path: Path) -> None:
    """Its file says which RoPE the layers apply, and so must the model, whose index takes no far positions."""
    model, given = native("minimax_m3_vl"), inputs()
    text = torch.randint(3, 96, (1, 256), generator=torch.Generator().manual_seed(0))
    capture(model, text, tmp_path / "trace.safetensors", layers=[1, 2])
    train_index([tmp_path / "trace.safetensors"], tmp_path / "made.safetensors", IndexRecipe("indexer", steps=2))
    made, chooser = f"indexer:artefact={tmp_path / 'made.safetensors'}", model.model.layers[1].self_attn.indexer
    chooser.forward = wrapped = chooser.forward  # as where hooks of accelerate are in its place
    with SparseCache(model, made, None, dense_layers=[0], **SMALL) as cache:
        assert vars(chooser)["forward"] is wrapped
        assert {layer.rope.rotated for layer in cache.prepared.layers.values() if layer.rope} == {8}
        exhaustive = generate(model, cache, given, max_new_tokens=4)
        assert "forward" not in vars(model.model.layers[2].self_attn.indexer)
    same(exhaustive, generate(densely(model), plain(model), given, max_new_tokens=4))


def test_a_prompt_once_for_many_selectors() -> None:
    model, given = native("minimax_m3_vl"), inputs()
    prompt = Prefill(model, given["input_ids"][:, :-1])
    cache = prompt.cache("quest:page=4", None, **SMALL)
    shared = generate(model, cache, given, max_new_tokens=6)
    alone = generate(model, SparseCache(model, "quest:page=4", None, **SMALL), given, max_new_tokens=6)
    assert torch.equal(shared[0], alone[0])
    with pytest.raises(ModelError, match=r"layer 1 .* not left as it is"):
        prompt.cache("quest:page=4", dense_layers=[1])


def test_latents_are_keys_and_values_in_one() -> None:
    draw = torch.Generator().manual_seed(0)
    query, latents = torch.randn(2, 3, 24, generator=draw), torch.randn(2, 40, 24, generator=draw)
    rows = torch.stack([torch.randperm(40, generator=draw)[:9] for _ in range(2)])
    rows[1, 3] = -1
    values = latents.clone()
    values[..., 16:] = 0
    expected = attend(query[:, None], latents[:, None], values[:, None], Selection.tokens(rows[:, None]), scale=0.3)[0]
    given = latents.clone()
    unnamed = torch.ones(2, 40, dtype=torch.bool)
    unnamed.scatter_(1, rows.clamp(min=0), False)
    given[0][unnamed[0]] = torch.nan
    out = attend_latents(query, given, rows.where(rows >= 0, -1), 16, 0.3)
    torch.testing.assert_close(out, expected[:, 0, :, :16])
    sinks = torch.randn(3, generator=draw)
    lse = attend(query[:, None], latents[:, None], values[:, None], Selection.tokens(rows[:, None]), scale=0.3)[1]
    share = torch.sigmoid(lse[:, 0] - sinks)[..., None]
    torch.testing.assert_close(attend_latents(query, given, rows, 16, 0.3, sinks), out * share)
    assert not attend_latents(query, latents, torch.full((2, 4), -1), 16, 0.3).any()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"selector": "quest"}, "leave selector out"),
        ({"budget": 64}, "leave budget out"),
        ({"rows": "kivi"}, "leave rows out"),
        ({"sink": 16}, "leave sink out"),
        ({"window": 256}, "leave window out"),
        ({"budget": None}, "index chooses what is read: leave budget out"),
        ({"seal": None}, "no row is ever sealed, .*: leave seal out"),
        ({"rollback": 4}, "leave rollback out"),
        ({"trusted": {"mine"}}, "leave trusted out"),
        ({"check": True}, "no selector is there .*: leave check out"),
        ({"impl": "gather"}, "layer 0: latents .* by torch alone: leave impl out"),
    ],
)
def test_what_does_not_go_with_native(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SparseCache(native("glm_moe_dsa"), native=True, **settings)


def test_a_native_layer_runs_the_implementation_named_or_none() -> None:
    model, given = native("minimax_m3_vl"), inputs(2, 9)
    with pytest.raises(ValueError, match="layer 1: impl is one of reference"):
        SparseCache(model, native=True, impl="flash")
    expected = generate(model, plain(model), given)
    with SparseCache(model, native=True, impl="reference") as cache:
        same(generate(model, cache, given), expected)


def test_models_that_native_refuses() -> None:
    with pytest.raises(ModelError, match="no layer with an index of its own"):
        SparseCache(small("llama"), native=True)
    with pytest.raises(ModelError, match="adds a learned sink"):
        SparseCache(native("hy_v4"), "quest")
    model = native("glm_moe_dsa")
    model.model.layers[1].self_attn.kv_b_proj = torch.nn.Sequential(model.model.layers[1].self_attn.kv_b_proj)
    with pytest.raises(ModelError, match=r"layer 1 .* projects latents by Sequential"):
        SparseCache(model, native=True)
    ids = inputs()["input_ids"]
    model = native("minimax_m3_vl")
    with pytest.raises(ModelError, match="gradients of full attention say nothing"):
        observe(Prefill(model, ids[:, :60]), ids[0, 60:].tolist())
    restore(model)
    with pytest.raises(ModelError, match="full attention is not what it does"):
        generate_lossless(native("minimax_m3_vl"), ids, "quest", 16, max_new_tokens=4, do_sample=False)
    model = native("glm_moe_dsa")
    weight = model.model.layers[1].self_attn.kv_b_proj
    weight.weight = torch.nn.Parameter(weight.weight.to(torch.float8_e4m3fn), requires_grad=False)
    weight.forward = lambda rows: torch.nn.functional.linear(rows, weight.weight.float())
    with pytest.raises(ModelError, match=r"layer 1 .* keeps the projection of latents as float8_e4m3fn on cpu"):
        SparseCache(model, native=True)
    model = native("glm_moe_dsa")
    own = model.model.layers[2].self_attn
    own.expand_kv = lambda latents, turned: [2 * x for x in type(own).expand_kv(own, latents, turned)]
    with pytest.raises(ModelError, match="in another way than MLA"):
        SparseCache(model, native=True)


def test_lists_for_some_of_the_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="layer 1 chooses for 4 of its 2 KV heads"):
        check_lists(1, 4, 2)
