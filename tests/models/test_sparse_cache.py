"""Generation through a SparseCache: at exhaustive settings what the dense model generates, in every mode."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import CASES, Buckets, Case, Heaviest, by_name, drawn

transformers = pytest.importorskip("transformers")

from sparseattn import SAAP, Exact, Mass, Quest, RetrievalAttention, Selector, SparQ  # noqa: E402
from sparseattn.models.cache_argument import cache_argument, cache_name  # noqa: E402
from sparseattn.models.capture import capture  # noqa: E402
from sparseattn.models.load import ModelError  # noqa: E402
from sparseattn.models.prefill import Prefill  # noqa: E402
from sparseattn.models.sparse_cache import SparseCache, restore  # noqa: E402
from sparseattn.selectors.abilities import LooksAhead  # noqa: E402
from tests.models.tiny import (  # noqa: E402
    COMMON,
    MODES,
    NEW,
    SMALL,
    YARN,
    generate,
    padded,
    plain,
    prompt,
    same,
    sharing_keys,
    small,
)

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "phi3")]


@pytest.fixture(params=["llama", "gemma3", *SLOW], scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return small(request.param)


@pytest.fixture
def llama() -> Any:
    return small("llama")


def _skip_without_rollback(model: Any) -> None:
    if model.config.model_type.startswith("gemma3") and not hasattr(transformers.Cache, "activate_past_recording"):
        pytest.skip("this release of transformers cannot roll sliding layers back")


def _skip_wrong_chunks(model: Any, inputs: dict[str, Tensor]) -> None:
    whole, chunked = (generate(model, plain(model), inputs, **options) for options in ({}, MODES["chunked"]))
    if not torch.allclose(whole[1], chunked[1], rtol=0, atol=1e-3):
        pytest.skip("this release of transformers gives chunks of a prompt wrong positions")


@pytest.mark.parametrize("mode", MODES)
def test_exhaustive_is_dense(model: Any, mode: str) -> None:
    inputs, options = {"input_ids": prompt()}, MODES[mode]
    if mode == "lookup":
        _skip_without_rollback(model)
    if mode == "chunked":
        _skip_wrong_chunks(model, inputs)
    expected = generate(model, plain(model), inputs, **options)
    with SparseCache(model, Quest(4), None, **SMALL, rollback=4) as cache:
        same(generate(model, cache, inputs, **options), expected)
        stats = cache.stats()
        assert stats.sparse_calls >= (NEW - 1) * len(cache.sparse_layers)
        assert stats.rows == stats.context > 60
        assert all(int(layer.rows.sealed.min()) >= 36 for layer in cache.sparse_layers.values())
    same(generate(model, plain(model), inputs, **options), expected)


@pytest.mark.parametrize(
    "mode", ["beams", "chunked", *(pytest.param(one, marks=pytest.mark.slow) for one in ("greedy", "sampling"))]
)
def test_exhaustive_is_dense_in_a_padded_batch(model: Any, mode: str) -> None:
    inputs, options = padded(), MODES[mode]
    if mode == "chunked":
        _skip_wrong_chunks(model, inputs)
    expected = generate(model, plain(model), inputs, **options)
    with SparseCache(model, Quest(4), None, **SMALL) as cache:
        same(generate(model, cache, inputs, **options), expected)


def test_exhaustive_is_dense_with_an_assistant(model: Any) -> None:
    assistant, inputs = copy.deepcopy(model), {"input_ids": prompt()}
    with torch.no_grad():  # mostly, but not always, of the model's opinion
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    options = {"assistant_model": assistant, "num_assistant_tokens": 4}
    _skip_without_rollback(model)
    expected = generate(model, plain(model), inputs)
    with SparseCache(model, Quest(4), None, **SMALL, rollback=32) as cache:  # drafts grow while they are accepted
        tokens, _ = generate(model, cache, inputs, **options)
        assert torch.equal(tokens, expected[0])
        assert cache.get_seq_length() == 60 + NEW - 1


@pytest.mark.parametrize("apart", [None, "cpu"])
def test_several_turns_on_one_cache(model: Any, apart: str | None) -> None:
    _turns(model, Quest(4), padded(), apart)


@pytest.mark.parametrize(
    ("selector", "batch", "apart"),
    [
        *((Buckets(), "padded", None), (Buckets(), "one", "cpu"), (Exact(), "padded", "cpu")),
        *(
            pytest.param(*given, marks=pytest.mark.slow)
            for given in (
                (Buckets(), "one", None),
                (Buckets(), "padded", "cpu"),
                (Exact(), "one", None),
                (Exact(), "one", "cpu"),
                (Exact(), "padded", None),
            )
        ),
    ],
    ids=str,
)
def test_several_turns_over_rows_in_any_order(llama: Any, selector: Selector, batch: str, apart: str | None) -> None:
    _turns(llama, selector, padded() if batch == "padded" else {"input_ids": prompt()}, apart)


def _turns(model: Any, selector: Selector, inputs: dict[str, Tensor], apart: str | None) -> None:
    follow = torch.randint(1, 256, (len(inputs["input_ids"]), 11))
    pad = torch.ones_like(follow)
    if len(follow) > 1:
        pad[1, :4] = 0  # a question shorter than the others, padded in the middle of the conversation
    results = []
    with SparseCache(model, selector, None, **SMALL, sealed_device=apart) as sparse:
        for cache in (sparse, None):
            if cache is None:
                restore(model)
                cache = plain(model)
            given, turns = dict(inputs), []
            for _ in range(3):
                tokens, logits = generate(model, cache, given, max_new_tokens=9)
                turns.append((tokens, logits))
                mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
                given = {
                    "input_ids": torch.cat([tokens, follow * pad], 1),
                    "attention_mask": torch.cat([mask, mask.new_ones(len(mask), 9), pad], 1),
                }
            results.append(turns)
    for ours, dense in zip(*results, strict=True):
        same(ours, dense)
    stats = sparse.stats()
    assert stats.layers[1].dense_calls == 3, "each turn's prompt was prefilled"
    assert stats.layers[1].sparse_calls == 3 * 8


@by_name([case for case in CASES if case.exhaustive and not case.make().find(LooksAhead)], few=True)
def test_every_selector_generates_as_the_dense_model(case: Case, llama: Any) -> None:
    inputs = padded((60, 41))
    expected = generate(llama, plain(llama), inputs)
    assert case.exhaustive is not None  # infinigen's, of what models do not tell, is refused
    with SparseCache(llama, case.exhaustive(), None, sink=2, window=8, seal=32) as cache:
        same(generate(llama, cache, inputs), expected)


# -- small budgets -----------------------------------------------------------------------------------------------------


def feed(model: Any, cache: SparseCache, ids: Tensor, sizes: list[int], **inputs: Any) -> Tensor:
    """Logits `[B,T,V]` of ids that come in passes of these sizes."""
    out = []
    for part in ids.split(sizes, 1):
        with torch.no_grad():
            out.append(model(input_ids=part, use_cache=True, **cache_argument(cache), **inputs).logits)
    return torch.cat(out, 1)


def test_a_question_is_fed_token_by_token_from_a_position(llama: Any) -> None:
    ids = prompt(80)
    settings = {"selector": Quest(4), "budget": 8, **SMALL}
    singly = SparseCache(llama, **settings)
    expected = feed(llama, singly, ids, [60] + [1] * 20)
    fed = SparseCache(llama, **settings, sparse_from=60)
    prefilled = SparseCache(llama, **settings)
    for sizes in ([80], [60, 20], [30, 40, 10]):
        fed.reset()
        torch.testing.assert_close(feed(llama, fed, ids, sizes), expected, rtol=0, atol=1e-4)
    other = feed(llama, prefilled, ids, [80])
    assert (other[:, 60:] - expected[:, 60:]).abs().max() > 1e-2, "a prefilled question reads every row"
    assert (fed.protocol, prefilled.protocol) == ("fed from 60", "prefilled")
    assert (fed.stats().sparse_calls, prefilled.stats().sparse_calls) == (3 * 20 * 3, 0)
    assert "fed from 60" in str(fed.stats())


def test_the_positions_of_a_padded_question_are_columns(llama: Any) -> None:
    inputs = padded((60, 41))
    settings = {"selector": Exact(), "budget": 8, **SMALL, "sparse_from": 50}
    cache = SparseCache(llama, **settings)
    at = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    logits = feed(llama, cache, inputs["input_ids"], [60], attention_mask=inputs["attention_mask"], position_ids=at)
    for b, length in enumerate((60, 41)):
        alone = SparseCache(llama, **settings | {"sparse_from": length - 10})
        expected = feed(llama, alone, inputs["input_ids"][b : b + 1, -length:], [length])
        torch.testing.assert_close(logits[b, -length:], expected[0], rtol=0, atol=1e-4)


def test_drafts_are_decoded_sparsely_and_taken_back(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    settings = {"selector": Exact(), "budget": 8, "sink": 2, "window": 8, "rollback": 4}
    expected = generate(llama, SparseCache(llama, **settings), inputs)
    cache = SparseCache(llama, **settings)
    for step in (4, 2):
        cache.reset()
        same(generate(llama, cache, inputs, prompt_lookup_num_tokens=step), expected)
    dense = generate(llama, SparseCache(llama, dense_layers=3), inputs)
    assert (dense[1] - expected[1]).abs().max() > 0.01, "a budget of 8 tells sparse from dense"
    layer = cache.stats().layers[0]
    assert layer.dense_calls == 2, "the prompt, twice"
    assert layer.sparse_calls > 2 * (NEW - 1), "drafts that were rejected count too"


def test_more_drafts_than_window_and_rollback_are_kept_unsealed(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    expected = generate(llama, plain(llama), inputs)
    cache = SparseCache(llama, Exact(), None, sink=2, window=1, seal=1)
    same(generate(llama, cache, inputs, prompt_lookup_num_tokens=20), expected)
    layer = cache.sparse_layers[0]
    assert layer.sparse_calls > NEW - 1, "drafts were rejected"
    assert 5 < layer.rows.rollback < 20
    assert int(layer.rows.sealed.min()) > 50


def test_chunks_padding_and_beams_choose_alike_at_a_small_budget(llama: Any) -> None:
    settings = {"selector": Exact(), "budget": 8, **SMALL, "seal": 1}
    inputs = padded((60, 41))
    tokens, logits = generate(llama, SparseCache(llama, **settings), inputs)
    cache = SparseCache(llama, **settings)
    at = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    for start in range(0, 60, 7):
        part = slice(start, start + 7)
        given = {"attention_mask": inputs["attention_mask"][:, : part.stop], "position_ids": at[:, part]}
        last = feed(llama, cache, inputs["input_ids"][:, part], [min(7, 60 - start)], **given)[:, -1]
    torch.testing.assert_close(last, logits[0], rtol=0, atol=1e-4)
    longer = {"input_ids": tokens[:, :61], "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 1)], 1)}
    chunked = generate(llama, cache, longer, max_new_tokens=NEW - 1)
    same(chunked, (tokens, logits[1:]))
    for b, length in enumerate((60, 41)):
        alone = generate(llama, SparseCache(llama, **settings), {"input_ids": inputs["input_ids"][b : b + 1, -length:]})
        assert torch.equal(alone[0][0, -NEW:], tokens[b, -NEW:])
        torch.testing.assert_close(alone[1][:, 0], logits[:, b], rtol=0, atol=1e-4)


def test_counters(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    with SparseCache(llama, "exact", 8, sink=2, window=8, seal=1, dense_layers=[1]) as cache:
        generate(llama, cache, inputs)
        stats = cache.stats()
        assert [layer.selector for layer in stats.layers] == ["exact", None, "exact"]
        assert [layer.sparse_calls for layer in stats.layers] == [NEW - 1, 0, NEW - 1]
        assert [layer.dense_calls for layer in stats.layers] == [1, NEW, 1]
        assert (stats.sparse_calls, stats.dense_calls) == (2 * (NEW - 1), NEW + 2)
        assert stats.rows == 2 + 8 + 8
        assert stats.context == 60 + NEW / 2
        assert str(stats).startswith("46 sparse attention calls, 18.0 of 72.0 rows read (25.0 %); 26 dense ones")
        twin = cache.clone()
        assert twin.stats().sparse_calls == 0
        generate(llama, cache, {"input_ids": torch.cat([inputs["input_ids"], prompt(NEW)], 1)}, max_new_tokens=2)
        assert cache.stats().sparse_calls > stats.sparse_calls


def test_selectors_and_budgets_by_layer(llama: Any) -> None:
    mapping = {0: "exact", "default": Quest(4)}
    with SparseCache(llama, mapping, {1: 0.5, "default": 16}, **SMALL) as cache:
        labels = [repr(layer.rows.selector) for layer in cache.sparse_layers.values()]
        assert labels == [repr(Exact()), repr(Quest(4)), repr(Quest(4))]
        assert [layer.parts[0].budget for layer in cache.sparse_layers.values()] == [16, 0.5, 16]
        generate(llama, cache, {"input_ids": prompt()})
        rows = [layer.rows for layer in cache.stats().layers]
        assert max(rows[0], rows[2]) < 35 < rows[1]
    for wrong, words in (
        ({0: "exact"}, "layer 1 is missing"),
        ({7: "exact", "default": "quest"}, "7 is none of them"),
        ({1: "exact", "default": "quest"}, "1 is none of them"),
    ):
        with pytest.raises(ValueError, match=words):
            SparseCache(llama, wrong, 16, dense_layers=[1] if 1 in wrong else 0)


# -- one prefill, many methods -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "batch"),
    [
        *(("llama", "padded"), ("gemma3", "one")),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in (("llama", "one"), ("gemma3", "padded"))),
    ],
)
def test_one_prefill_serves_many_methods(family: str, batch: str) -> None:
    model = small(family)
    inputs = padded((60, 41)) if batch == "padded" else {"input_ids": prompt()}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    held = Prefill(model, ids[:, :-1], None if mask is None else mask[:, :-1], chunk=16)
    for selector, settings in (
        (Quest(4), {}),
        (RetrievalAttention(8, 4, 4, guides=5), {}),
        (Heaviest(20), {}),
        (Exact(), {"dense_layers": 1}),
        (Exact(), {"dense_layers": 3}),
    ):
        options = {**SMALL, **settings, "sparse_from": 59}
        expected = generate(model, SparseCache(model, selector, 8, **options), inputs, max_new_tokens=6)
        cache = held.cache(selector, 8, **options)
        for branch in (cache.clone(), copy.deepcopy(cache), cache):
            same(generate(model, branch, inputs, max_new_tokens=6), expected)
        sealed = held.cache(selector, 8, **options)
        sealed.seal()  # a token earlier than the first decoded one would
        indexed = [layer.rows.sealed.tolist() for layer in sealed.sparse_layers.values()]
        first = generate(model, sealed.clone(), inputs, max_new_tokens=6)
        same(generate(model, sealed, inputs, max_new_tokens=6), first)
        assert all(max(rows) >= 40 for rows in indexed)
    assert held.tokens == 59
    restore(model)
    with torch.no_grad():
        at = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)[:, :-1]
        dense = model(ids[:, :-1], attention_mask=None if mask is None else mask[:, :-1], position_ids=at).logits[:, -1]
    torch.testing.assert_close(held.logits, dense, rtol=0, atol=1e-4)


def test_clones_at_other_budgets(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    base = Prefill(llama, prompt()[:, :-1], queries=False).cache("exact", 4, **SMALL)
    for budget, text in ((4, "4"), (16, "16"), (0.2, "20%"), (None, "all")):
        expected = generate(llama, SparseCache(llama, "exact", budget, **SMALL, sparse_from=59), inputs)
        same(generate(llama, base.clone(budget=budget), inputs), expected)
        same(generate(llama, base.clone(budget=text), inputs), expected)
    everything = generate(llama, SparseCache(llama, "exact", None, **SMALL, sparse_from=59), inputs)
    same(generate(llama, base.clone(budget="mass:1"), inputs), everything)
    same(generate(llama, base.clone(budget=Mass(1.0)), inputs), everything)
    with pytest.raises(ValueError, match=r"layer 0: random does not estimate .*mass:0.9"):
        SparseCache(llama, "random", "mass:0.9", **SMALL)
    with pytest.raises(ValueError, match="layer 0: a budget is at least 1 row, got 0"):
        base.clone(budget=0)
    with pytest.raises(ValueError, match="the cache to copy from holds 0 of them"):
        Prefill(llama, prompt(), queries=False).cache("retrieval", 8)


@pytest.mark.parametrize("batch", [{"input_ids": prompt()}, padded()], ids=["one", "padded"])
def test_a_next_prompt_reads_the_same_whether_dropped_rows_are_freed(llama: Any, batch: dict[str, Tensor]) -> None:
    """Its tokens attend densely, to what is held."""
    cache = SparseCache(llama, Heaviest(9), 8, **SMALL)
    told, _ = generate(llama, cache, batch)
    more = torch.cat([told, prompt(30, len(told), seed=2)], 1)
    mask = torch.ones_like(more)
    if "attention_mask" in batch:
        mask[:, :60] = batch["attention_mask"]
    whole = cache.clone()
    assert cache.compact() > 0
    kept, free = (sum(layer.rows.nbytes["kv"] for layer in one.sparse_layers.values()) for one in (whole, cache))
    assert free < kept / 2
    inputs = {"input_ids": more, "attention_mask": mask}
    same(generate(llama, cache, inputs), generate(llama, whole, inputs))
    with pytest.raises(ValueError, match="no layer's selector drops rows"):
        SparseCache(llama, "quest", 16).compact()


# -- the model and what is refused -------------------------------------------------------------------------------------


def test_the_model_is_given_back(llama: Any) -> None:
    llama.set_attn_implementation("eager")
    inputs = {"input_ids": prompt()}
    expected = generate(llama, plain(llama), inputs)
    with SparseCache(llama, "quest", None, **SMALL) as outer:
        with SparseCache(llama, "exact", None, **SMALL) as inner:
            same(generate(llama, inner, inputs), expected)
        same(generate(llama, outer, inputs), expected)
        with pytest.raises(RuntimeError, match=r"prepared for sparse attention and was run with a DynamicCache"):
            llama.generate(inputs["input_ids"], max_new_tokens=2)
        with pytest.raises(RuntimeError, match=r"was run with no cache"):
            llama(inputs["input_ids"], use_cache=False)
        with pytest.raises(ModelError, match="routed already"):
            capture(llama, inputs["input_ids"], "unused")
    assert llama.config._attn_implementation == "eager"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in llama.modules())
    same(generate(llama, plain(llama), inputs), expected)
    outer.reset()
    with pytest.raises(RuntimeError, match="has its own attention back"):
        generate(llama, outer, inputs)
    with pytest.raises(ValueError, match="no selector is called"):
        SparseCache(llama, "qest")
    assert llama.config._attn_implementation == "eager", "a refused SparseCache leaves no trace"
    foreign, cache = small("llama"), SparseCache(llama, "quest")
    SparseCache(foreign, "quest")
    with pytest.raises(RuntimeError, match="a SparseCache that was not made for it"):
        generate(foreign, cache, inputs)


def test_a_pass_finds_its_cache_by_keyword_and_by_position(llama: Any) -> None:
    """Without a warning, and under the older name with the one that transformers itself gives since 5.24."""
    ids, logits = prompt(), []
    names = list(inspect.signature(llama.model.forward).parameters)
    before = [None] * names.index(cache_name())
    with SparseCache(llama, "exact", **SMALL) as cache, torch.no_grad():
        logits.append(llama.model(ids, *before[1:], cache.clone()).last_hidden_state)
        logits.append(llama.model(ids, **cache_argument(cache.clone())).last_hidden_state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            logits.append(llama.model(ids, past_key_values=cache.clone()).last_hidden_state)
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])
        with pytest.raises(RuntimeError, match=rf"run with no cache: pass {cache_name()}=a SparseCache"):
            llama(ids)


def test_a_failed_pass_does_not_leak_into_the_next(llama: Any) -> None:
    cache = SparseCache(llama, "exact", None, **SMALL)
    with pytest.raises(ModelError, match="no gradients"):
        llama(prompt(), use_cache=True, **cache_argument(cache))
    with pytest.raises(RuntimeError, match="outside a pass"):
        llama.model.layers[0].self_attn(torch.randn(1, 2, 64), position_embeddings=(torch.ones(1, 2, 16),) * 2)
    cache.reset()
    expected = small("llama")
    same(
        generate(llama, cache, {"input_ids": prompt()}),
        generate(expected, plain(expected), {"input_ids": prompt()}),
    )


def test_a_used_cache_says_what_it_holds_and_stays_as_it_is(llama: Any) -> None:
    ids, last = prompt(), torch.tensor([[5]])

    def given(tokens: Tensor, real: Tensor | None = None) -> Any:
        mask = torch.ones_like(tokens) if real is None else real.long()
        return lambda: generate(llama, cache, {"input_ids": tokens, "attention_mask": mask}, max_new_tokens=4)

    with SparseCache(llama, "exact", None, **SMALL) as cache, torch.no_grad():
        whole, _ = given(ids)()
        generate_was_given = "this cache holds 63 tokens, and generate was given {}: give it those ids and the new ones"
        for refused, words in (
            (given(ids), generate_was_given.format(60)),
            (given(whole[:, :63]), generate_was_given.format(63)),
            (given(ids[:, 10:30]), generate_was_given.format(20)),
            (given(ids, torch.arange(60)[None] > 3), generate_was_given.format(60)),
            (given(whole.repeat(2, 1)), "this cache holds 1 sequence, and the pass brings 2: "),
            (lambda: llama(last.repeat(3, 1), **cache_argument(cache)), "holds 1 sequence, and the pass brings 3: "),
            (
                lambda: llama(last, position_ids=torch.tensor([[9]]), **cache_argument(cache)),
                "this cache holds 63 tokens, and the position_ids of new ones begin at 9: they begin at 63 or",
            ),
        ):
            with pytest.raises(ModelError, match=words):
                refused()
        expected = given(whole)()
        assert cache.get_seq_length() == 67, "nothing was stored, and no pass was cut short"
        cache.crop(-4)
        cache.batch_repeat_interleave(2)
        same(given(whole.repeat(2, 1))(), tuple(x.repeat_interleave(2, dim) for dim, x in enumerate(expected)))


def test_what_generate_comes_upon_at_its_second_token_is_refused_before_the_prefill(llama: Any) -> None:
    ids = prompt(batch=2)
    mask = torch.ones_like(ids)
    mask[1, -7:] = 0
    with SparseCache(llama, "exact", None, **SMALL) as cache, torch.no_grad():
        with pytest.raises(ModelError, match=r"padded on the right, .*: pad it on the left"):
            generate(llama, cache, {"input_ids": ids, "attention_mask": mask})
        with pytest.raises(ModelError, match=r"use_cache=False lets generate bring all tokens again.*leave it out"):
            generate(llama, cache, {"input_ids": ids}, use_cache=False)
        assert cache.get_seq_length() == 0
        at = (mask.cumsum(1) - 1).clamp(min=0)  # what goes on itself from the last real position
        llama(ids, attention_mask=mask, position_ids=at, logits_to_keep=1, **cache_argument(cache))
        step = {"attention_mask": torch.cat([mask, torch.ones(2, 1)], 1), "position_ids": at[:, -1:] + 1}
        llama(torch.tensor([[5], [5]]), **step, **cache_argument(cache))
        assert [layer.rows.lengths.tolist() for layer in cache.sparse_layers.values()] == [[61, 54]] * 3


def test_autocast_gives_keys_and_values_of_two_dtypes(llama: Any) -> None:
    words = "autocast gives keys and values of two dtypes, float32 and bfloat16: load the model in bfloat16, or leave"
    with SparseCache(llama, Quest(4), None, **SMALL) as cache, torch.no_grad():
        for tokens in (prompt(), prompt()[:, :1], prompt()[:, :8]):
            with pytest.raises(ModelError, match=words), torch.autocast("cpu", torch.bfloat16):
                llama(tokens, **cache_argument(cache))
            if cache.get_seq_length():
                cache.crop(0)
            else:
                cache.reset()
                llama(prompt(), **cache_argument(cache))


def test_a_caller_of_update_is_told_whose_it_is(llama: Any) -> None:
    rows = torch.randn(2, 1, 2, 1, 16)
    cache = SparseCache(llama, "exact", **SMALL)
    with pytest.raises(RuntimeError, match=r"update\(\) is called by a pass of the model .* run the model with"):
        cache.update(*rows, 0)
    cache.restore()
    with pytest.raises(RuntimeError, match="has its own attention back"):
        cache.update(*rows, 0)


def test_rows_in_host_memory_are_offloaded_already(llama: Any) -> None:
    with SparseCache(llama, "exact", **SMALL) as cache:
        for _ in range(2):
            cache.offload(0)
            cache.layers[0].prefetch()
            generate(llama, cache, {"input_ids": prompt()}, max_new_tokens=2)
            cache.reset()


def test_a_selector_knows_how_many_layers_the_model_has(llama: Any) -> None:
    """PyramidKV's last layer then has the least of the budget."""
    with SparseCache(llama, "pyramidkv", 390) as cache:
        read = [layer.parts[0].rows.selector.allowed(390) for layer in cache.sparse_layers.values()]
        assert read == [390, 200, 10]


def test_what_is_refused(llama: Any) -> None:
    for arguments, words in (
        ({"selector": 3}, "got 3"),
        ({"budget": 0}, "layer 0: a budget is at least 1 row"),
        ({"budget": 8}, "less than one span"),
        ({"budget": "8"}, "layer 0: .*less than one span"),
        ({"budget": "eight"}, "layer 0: a budget is rows .*got 'eight'"),
        ({"selector": "bridge:neighbours=999999999"}, "neighbours is 65,536 or less .* got 999,999,999"),
        (
            {"selector": "infinigen"},
            "layer 0: .* goes by the input of the layer before, which layers of a model are not",
        ),
        ({"selector": "pyramidkv:layers=32"}, "layer 0: .* is for a model of 32 layers, and this one has 3"),
        ({"dense_layers": 4}, "0 to 3"),
        ({"dense_layers": [3]}, "0 to 3"),
        ({"sparse_from": -1}, "got -1"),
        ({"seal": 8}, "seal is at least the unit"),
        ({"selector": "saap:artefact=reference"}, r"layer 0: .* is for 2 KV heads with 4 query heads each of size 64"),
        ({"selector": "saap"}, r"layer 0: no artefact that ships \(reference, smollm2\) is for a layer with a RoPE"),
        ({"impl": "fast"}, "layer 0: impl is one of"),
        ({"sealed_device": "cuda"}, "sealed_device is None"),
    ):
        with pytest.raises(ValueError, match=words):
            SparseCache(llama, **arguments)
        assert llama.config._attn_implementation == "sdpa"
    llama.train()
    cache = SparseCache(llama, "exact")
    with pytest.raises(RuntimeError, match="eval"):
        generate(llama, cache, {"input_ids": prompt()})
    llama.eval()
    with pytest.raises(ModelError, match=r"attention_mask \[B,T\]"), torch.no_grad():
        llama(prompt(), attention_mask=torch.zeros(1, 1, 60, 60), **cache_argument(cache))
    with pytest.raises(ModelError, match="no weights to put out"):
        generate(llama, cache, {"input_ids": prompt()}, output_attentions=True)
    weighing = other("Llama", attn_implementation="eager", output_attentions=True)
    with pytest.raises(ModelError, match="no weights to put out"), torch.no_grad():
        weighing(prompt(), **cache_argument(SparseCache(weighing, "exact")))
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(llama, cache, {"input_ids": prompt()}, cache_implementation="static")


def other(name: str, **changes: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**COMMON | changes)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def test_a_layer_of_another_scale_tells_its_selector_and_a_shape_it_cannot_serve_is_refused(llama) -> None:
    """With every channel kept and a tail, what is read and what is not weigh as the layer's own scale says."""
    model = copy.deepcopy(llama)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2
    with SparseCache(model, SparQ(1 << 20, mean=True), 16, **SMALL) as cache:
        assert generate(model, cache, {"input_ids": prompt()}) is not None  # else the tail would be refused
        selector = cache.layers[0].rows.selector
        assert selector.layer_context.scale == pytest.approx(2 * model.config.head_dim**-0.5)

    class Never(Exact):
        def check_shape(self, heads: int, group: int, size: int) -> None:
            raise ValueError(f"never of {heads} heads of {group} by {size}")

    with pytest.raises(ValueError, match=r"layer 0: never of \d+ heads of \d+ by \d+"):
        SparseCache(llama, Never())


def test_models_that_sparse_attention_does_not_compute() -> None:
    with pytest.raises(ModelError, match=r"layer 1 .* soft-caps its logits"):
        SparseCache(other("Gemma2", head_dim=16, sliding_window=16))
    with pytest.raises(ModelError, match=r"layer 1 .* adds a learned sink"):
        SparseCache(other("GptOss", head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=16))
    with pytest.raises(ModelError, match="no layer that attends to the whole context"):
        SparseCache(other("Mistral", sliding_window=16))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    )
    with pytest.raises(ModelError, match="encoder-decoder"):
        SparseCache(t5)
    mixed = other("FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8)
    with pytest.raises(ModelError, match=r"and keeps keys and values alone, .*: its cache has 3 \w+$"):
        SparseCache(mixed)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_models_whose_tokens_attend_to_later_ones_are_refused(implementation: str) -> None:
    def bert(**changes: Any) -> Any:
        config = transformers.BertGenerationConfig(**COMMON | changes, attn_implementation=implementation)
        return transformers.BertGenerationDecoder(config).eval()

    gemma = transformers.Gemma3TextConfig(**COMMON, head_dim=16, use_bidirectional_attention=True)
    gemma._attn_implementation = implementation
    for model in (bert(), transformers.Gemma3ForCausalLM(gemma).eval()):
        with pytest.raises(ModelError, match=r"^layer 0 of \w+ attends to later tokens too, only causal models are"):
            SparseCache(model)
        assert model.config._attn_implementation == implementation
    with SparseCache(bert(is_decoder=True)) as cache:
        assert len(cache.sparse_layers) == 3


def test_a_causal_mask_counts_where_layers_are_said_not_to_be_causal() -> None:
    sizes = {"encoder_layers": 3, "decoder_layers": 3, "decoder_attention_heads": 4, "d_model": 64, "pad_token_id": 0}
    names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    config = transformers.BigBirdPegasusConfig(**{name: COMMON[name] for name in names}, **sizes, decoder_ffn_dim=64)
    model, inputs = transformers.BigBirdPegasusForCausalLM(config).eval(), {"input_ids": prompt()}
    assert not model.model.decoder.layers[0].self_attn.is_causal
    expected = generate(model, plain(model), inputs)
    with SparseCache(model, "exact", None, **SMALL) as cache:
        same(generate(model, cache, inputs), expected)


def test_layers_that_share_keys_stay_dense() -> None:
    model, inputs = sharing_keys(), {"input_ids": prompt()}
    with pytest.raises(ModelError, match=r"layer 1 .* shares its keys with other layers \(all of 1, 3\)"):
        SparseCache(model)
    expected = generate(model, plain(model), inputs)
    with SparseCache(model, "exact", None, **SMALL, dense_layers=[1]) as cache:
        assert list(cache.sparse_layers) == [0]
        same(generate(model, cache, inputs), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),  # its forward goes past its base_model
        # its head is called decoder; its configuration takes no None for a token
        (
            "ModernBertDecoder",
            {"layer_types": ["full_attention"] * 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 255},
        ),
    ],
)
def test_models_that_are_built_otherwise(name: str, changes: dict[str, Any]) -> None:
    model, inputs = other(name, **changes), padded((60, 41))
    expected = generate(model, plain(model), inputs)
    with SparseCache(model, "exact", None, **SMALL) as cache:
        same(generate(model, cache, inputs), expected)
        with pytest.raises(RuntimeError, match=r"was run with a DynamicCache"):
            model.generate(inputs["input_ids"], max_new_tokens=2)


def test_a_model_in_bfloat16() -> None:
    model, inputs = small("llama").to(torch.bfloat16), padded((60, 41))
    expected = generate(model, plain(model), inputs, max_new_tokens=1)[1]
    with SparseCache(model, Quest(4), None, **SMALL, sparse_from=50) as cache:
        logits = generate(model, cache, inputs, max_new_tokens=1)[1]
        assert all(layer.rows.keys.dtype == torch.bfloat16 for layer in cache.sparse_layers.values())
    assert (logits - expected).norm() < 0.03 * expected.norm()


def test_a_mask_may_not_say_otherwise_of_tokens_that_are_held(llama: Any) -> None:
    held = padded((20, 12))
    ids = torch.full((2, 1), 7)
    mask = torch.cat([held["attention_mask"], torch.ones_like(ids)], 1)
    hidden, shown = mask.clone(), mask.clone()
    hidden[0, 4:9], shown[1, 2] = 0, 1
    with SparseCache(llama, "exact", None, **SMALL) as cache, torch.no_grad():
        llama(**held, **cache_argument(cache))
        for told, words in (
            (hidden, "hides 5 that came as real"),
            (shown, "shows 1 that came as padding"),
            (None, "shows 8 that came as padding"),
        ):
            with pytest.raises(ModelError, match=f"attention_mask {words}: they stay what they were"):
                llama(input_ids=ids, attention_mask=told, **cache_argument(cache))
        with pytest.raises(ModelError, match="is of 3 sequences, and 2 are given"):
            llama(input_ids=ids, attention_mask=torch.ones(3, 21), **cache_argument(cache))
        llama(input_ids=ids, attention_mask=mask, **cache_argument(cache))
    with SparseCache(llama, "exact", None, **SMALL) as cache, torch.no_grad():  # nothing was padding
        llama(input_ids=held["input_ids"], **cache_argument(cache))
        with pytest.raises(ModelError, match="hides 10 that came as real"):
            llama(input_ids=ids, attention_mask=hidden[:1].expand(2, -1), **cache_argument(cache))


def test_an_early_exit_is_refused_and_leaves_all_layers(llama: Any) -> None:
    inputs = {"input_ids": prompt()}
    before = generate(llama, plain(llama), inputs)
    refused = pytest.raises(ModelError, match="assistant_early_exit drafts with the model's first 1 layers")
    with SparseCache(llama, "exact", None, **SMALL) as cache, refused:
        generate(llama, cache, inputs, assistant_early_exit=1)
    assert llama.config.num_hidden_layers == len(llama.model.layers)
    same(generate(llama, plain(llama), inputs), before)


def test_sliding_layers_stay_as_they_are() -> None:
    model = small("gemma3")
    with SparseCache(model, "exact", 8, **SMALL) as cache:
        assert list(cache.sparse_layers) == [1]
        assert [type(cache.layers[i]).__name__ for i in (0, 2)] == ["DynamicSlidingWindowLayer"] * 2
        assert "1 of 3 layers sparse" in repr(cache)


def test_selectors_are_given_the_layers_own_rope() -> None:
    yarn = small("llama", rope_parameters=YARN)
    with SparseCache(yarn, drawn(SAAP, False, probes=2), 16, **SMALL) as cache:
        ropes = [layer.rows.selector.layer_context.rope for layer in cache.sparse_layers.values()]
        assert all(rope is not None and rope.scaling > 1.1 for rope in ropes)
        generate(yarn, cache, {"input_ids": prompt()})


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_that_follow_the_length_are_refused_by_what_needs_fixed_ones(kind: str) -> None:
    if kind == "dynamic":
        dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        model = small("llama", rope_parameters=dynamic, max_position_embeddings=64)
    else:
        longrope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 48,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "partial_rotary_factor": 1.0,
        }
        model = small(
            "phi3",
            rope_parameters=longrope,
            partial_rotary_factor=1.0,
            max_position_embeddings=192,
            original_max_position_embeddings=48,
        )
    with pytest.raises(ValueError, match="whose frequencies change with the length"):
        SparseCache(model, drawn(SAAP, False))
    inputs = {"input_ids": prompt()}
    expected = generate(model, plain(model), inputs)
    if kind == "longrope":  # Phi-3's generate drops a cache of fewer tokens than it takes to need the long frequencies
        with SparseCache(model, Exact(), None) as cache, pytest.raises(RuntimeError, match="was run with no cache"):
            generate(model, cache, inputs)
    cache = Prefill(model, inputs["input_ids"][:, :-1]).cache(Exact(), None, **SMALL)
    same(generate(model, cache, inputs), expected)


def test_import_registers_nothing() -> None:
    code = """
import importlib.util, sys
sys.modules["transformers"] = None
try:
    import sparseattn.models.sparse_cache
except ImportError as error:
    assert "pip install 'sparseattn[transformers]'" in str(error), error
else:
    raise AssertionError("transformers was not needed")
del sys.modules["transformers"]
import sparseattn.models.sparse_cache, sparseattn.models.prefill
for registry in ("transformers.modeling_utils", "transformers.masking_utils"):  # of attention and of masks
    assert importlib.util.find_spec(registry)
    assert registry not in sys.modules, f"{registry} is not even imported"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_editing_a_cache(llama: Any) -> None:
    inputs, half = padded((60, 41, 23)), NEW // 2
    expected = generate(llama, SparseCache(llama, "exact", 8, **SMALL), inputs)
    cache = SparseCache(llama, "exact", 8, **SMALL, rollback=4, dense_layers=[1])
    generate(llama, cache, inputs, max_new_tokens=half)
    cache.crop(-3)
    assert cache.get_seq_length() == 60 + half - 4
    cache.crop(60 + half - 5)  # what older releases of transformers mean: as many stay
    assert [cache.get_seq_length(i) for i in range(3)] == [60 + half - 5] * 3
    cache.crop(0)
    index = torch.tensor([2, 0])
    twice = cache.clone()
    for edited, edit in ((cache, cache.batch_select_indices), (twice, twice.reorder_cache)):
        edit(index)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, NEW)], 1)[index]
        given = expected[0][index]
        held = edited.get_seq_length()
        ids, mask = given[:, : held + 1], mask[:, : held + 1]
        tokens, _ = generate(llama, edited, {"input_ids": ids, "attention_mask": mask.long()}, max_new_tokens=1)
        assert tokens.shape == (2, held + 2)
    repeated = Prefill(llama, **inputs).cache("exact", 8)
    repeated.batch_repeat_interleave(2)
    assert next(iter(repeated.sparse_layers.values())).rows.lengths.tolist() == [60, 60, 41, 41, 23, 23]


def test_settings_of_papers_are_arguments(llama: Any) -> None:
    for paper in (Quest.paper(4), {**RetrievalAttention.paper(), "sink": 8, "window": 16}):
        with SparseCache(llama, **paper, budget=16) as cache:
            generate(llama, cache, {"input_ids": prompt()})
            assert cache.stats().sparse_calls == 3 * (NEW - 1)
