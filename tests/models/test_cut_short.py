"""Passes that end before their end, by Ctrl-C or an error, and models that change under a cache: never wrong tokens."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from sparseattn import KVCache, decode, make_selector  # noqa: E402
from sparseattn.models.cache_argument import cache_argument  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache, restore  # noqa: E402
from tests.models.interrupts import Interrupt  # noqa: E402
from tests.models.tiny import SMALL, added, plain, prompt, small  # noqa: E402

SETTINGS: dict[str, Any] = {"selector": "quest:page=4", "budget": 8, **SMALL}


@pytest.fixture(scope="module")
def llama() -> Any:
    return small("llama")


def moments(count: int) -> list[int]:
    """Calls within one `generate`, by a seed: half of them in its first pass."""
    model, chance = small("llama"), random.Random(40)
    with SparseCache(model, **SETTINGS) as cache:
        added(model, cache, prompt(), 6)  # what is done once in a process is done
    with SparseCache(model, **SETTINGS) as cache, Interrupt() as once:
        added(model, cache, prompt(), 1)
    with SparseCache(model, **SETTINGS) as cache, Interrupt() as whole:
        added(model, cache, prompt(), 6)
    first = [chance.randrange(1, once.calls) for _ in range(count // 2)]
    return first + [chance.randrange(once.calls, whole.calls) for _ in range(count - len(first))]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C in a generator's end
@pytest.mark.parametrize("count", [14, pytest.param(100, marks=pytest.mark.slow)])
def test_ctrl_c_at_any_moment_is_followed_by_a_right_generate(llama: Any, count: int) -> None:
    dense = added(llama, plain(llama), prompt(), 6)
    with SparseCache(llama, **SETTINGS) as cache:
        expected = added(llama, cache, prompt(), 6)
        calls = cache.stats().sparse_calls
    interrupted, torn = 0, list[str]()
    for moment in moments(count):
        with SparseCache(llama, **SETTINGS) as cache:
            try:
                with Interrupt(moment):
                    came = added(llama, cache, prompt(), 6)
            except KeyboardInterrupt:
                interrupted += 1
            else:  # within a destructor, say, which Python lets nothing out of
                assert came == expected, moment
            with SparseCache(llama, **SETTINGS) as other:  # while the first is still there
                assert added(llama, other, prompt(), 6) == expected, moment
            held = cache.get_seq_length()
            try:
                cache.crop(0)
                left = cache.get_seq_length()
                assert left <= held
            except RuntimeError as error:  # rows were being stored
                torn.append(str(error))
                cache.reset()
                left = 0
            written = torch.cat([prompt(), torch.tensor([expected])], 1)
            if left in (0, prompt().shape[1]):  # the rows of a prompt are those of any other
                assert (
                    added(llama, cache, prompt() if not left else written[:, : left + 1], 6 - bool(left))
                    == (expected[bool(left) :])
                ), moment
        assert llama.config._attn_implementation == "sdpa"
        assert added(llama, plain(llama), prompt(), 6) == dense, moment
        with SparseCache(llama, **SETTINGS) as cache:
            assert added(llama, cache, prompt(), 6) == expected, moment
            assert cache.stats().sparse_calls == calls
    assert interrupted > count * 9 / 10
    assert all("make a new SparseCache" in said for said in torn)
    assert len(torn) < count / 2, "most leave a cache that can go back"


def test_a_dead_cache_is_refused_behind_its_block(llama: Any) -> None:
    with pytest.raises(KeyboardInterrupt), SparseCache(llama, **SETTINGS) as cache, Interrupt(2000):
        added(llama, cache, prompt(), 6)
    with pytest.raises((RuntimeError, ValueError), match="SparseCache"):
        added(llama, cache, prompt(), 6)


class Fault(Exception):
    pass


def failing(model: Any, layer: int, at: int) -> Any:
    """A hook that fails in the `at`-th call of a layer's MLP."""
    seen = 0

    def hook(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise Fault

    return model.model.layers[layer].mlp.register_forward_hook(hook)


def step(model: Any, cache: Any, token: Tensor) -> Tensor:
    with torch.no_grad():
        return model(token, **cache_argument(cache)).logits[:, -1]


def test_layers_of_unequal_length_are_refused_and_cropping_mends_them(llama: Any) -> None:
    ids, last = prompt(), torch.tensor([[5]])
    with SparseCache(llama, **SETTINGS) as cache:
        step(llama, cache, ids)
        before = cache.clone()
        expected = step(llama, before, last)
    with SparseCache(llama, **SETTINGS) as cache:
        step(llama, cache, ids)
        handle = failing(llama, 1, 1)
        with pytest.raises(Fault):
            step(llama, cache, last)
        handle.remove()
        n = ids.shape[1]
        lengths = ", ".join([str(n + 1)] * 2 + [str(n)] * (len(cache.layers) - 2))
        with pytest.raises(RuntimeError, match=rf"its layers hold {lengths} tokens: crop\(0\) goes back to the {n}"):
            step(llama, cache, last)
        cache.crop(0)
        assert cache.get_seq_length() == n
        assert torch.equal(step(llama, cache, last), expected)


def test_a_prompt_that_was_cut_short_starts_anew(llama: Any) -> None:
    with SparseCache(llama, **SETTINGS) as cache:
        expected = step(llama, cache, prompt())
    with SparseCache(llama, **SETTINGS) as cache:
        handle = failing(llama, 0, 1)
        with pytest.raises(Fault):
            step(llama, cache, prompt())
        handle.remove()
        with pytest.raises(RuntimeError, match=r"reset\(\) it"):
            step(llama, cache, prompt())
        cache.reset()
        assert torch.equal(step(llama, cache, prompt()), expected)


def test_a_model_of_another_dtype_in_mid_conversation_is_refused() -> None:
    model = small("llama")
    with SparseCache(model, **SETTINGS) as cache:
        step(model, cache, prompt())
        model.to(torch.float64)
        with pytest.raises(ValueError, match=r"float32.*float64"):
            step(model, cache, torch.tensor([[5]]))
        model.to(torch.float32)
        assert step(model, cache, torch.tensor([[5]])).isfinite().all()


def test_a_copy_of_a_prepared_model_is_restored_and_decodes(llama: Any) -> None:
    dense = added(llama, plain(llama), prompt(), 6)
    with SparseCache(llama, **SETTINGS) as cache:
        expected = added(llama, cache, prompt(), 6)
        twin = copy.deepcopy(llama)
    restore(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert added(twin, plain(twin), prompt(), 6) == dense
    with SparseCache(twin, **SETTINGS) as cache:
        assert added(twin, cache, prompt(), 6) == expected
        assert cache.stats().sparse_calls
    assert added(llama, plain(llama), prompt(), 6) == dense


def test_a_cache_does_not_take_its_model_into_a_pickle(llama: Any) -> None:
    with (
        SparseCache(llama, **SETTINGS) as cache,
        pytest.raises(TypeError, match=r"not pickled, as its model would go with it: clone\(\)"),
    ):
        pickle.dumps(cache)


@pytest.mark.parametrize("spec", ["pqcache:subspaces=2,bits=4", "twostage", "tailed", "topp", "rocketkv", "quest"])
def test_memory_returns_without_the_collector(spec: str) -> None:
    gc.collect()
    gc.disable()
    try:
        cache = KVCache(make_selector(spec), sink=2, window=4, seal=64)
        cache.append(*torch.randn(2, 1, 2, 300, 16))
        decode(torch.randn(1, 2, 2, 16), cache, 32)
        gone = weakref.ref(cache.selector), weakref.ref(cache)
        del cache
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_a_crop_that_is_refused_changes_nothing(llama: Any) -> None:
    """Though a layer of transformers comes before one whose rows are sealed."""
    ids = prompt(60)
    with SparseCache(llama, "quest:page=4", 8, dense_layers=1, **SMALL) as cache:
        step(llama, cache, ids)
        step(llama, cache, ids[:, :1])  # which seals
        with pytest.raises(ValueError, match=r"only the newest \[\d+\] are not sealed yet"):
            cache.crop(-55)
        assert {layer.get_seq_length() for layer in cache.layers} == {61}
        step(llama, cache, ids[:, :3])
