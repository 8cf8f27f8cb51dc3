"""An engine with the plug-in says what stock vLLM says, where no row is left out, whatever the engine does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    LAYERS,
    LENGTHS,
    SPARSE,
    TOKENS,
    Answer,
    ask,
    check_counts,
    decoded,
    engine,
    gemma,
    layers,
    llama,
    prompts,
    with_tokenizer,
)

from sparseattn.serving.vllm.settings import parse


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`models(make, ...)`: the folder of a model, made once."""
    made: dict[object, Path] = {}

    def folder(make: Callable[..., Path], *given: Any) -> Path:
        key = (make, *given)
        if key not in made:
            made[key] = make(tmp_path_factory.mktemp(make.__name__), *given)
        return made[key]

    return folder


@pytest.fixture(scope="module")
def stock(models: Callable[..., Path]) -> Callable[..., Answer]:
    """What stock vLLM answers to the requests of `LENGTHS`, asked once for each engine."""
    known: dict[object, Answer] = {}

    def answer(model: Path, **given: Any) -> Answer:
        key = (model, *sorted(given.items()))
        if key not in known:
            with engine(model, None, **given) as llm:
                known[key] = ask(llm, prompts(*LENGTHS), TOKENS)
            assert known[key].stats.sparse_steps == known[key].stats.dense_steps == 0, "it is not stock"
        return known[key]

    return answer


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every step served sparsely, None for nothing."""
    from sparseattn.serving.vllm.cpu import SparseCPUBuilder

    seen: list[Any] = []
    build = SparseCPUBuilder.build

    def watched(builder: Any, *given: Any, **named: Any) -> Any:
        metadata = build(builder, *given, **named)
        if builder.settings is not None:  # a stock engine has our builder too
            seen.append(getattr(metadata, "served", None))
        return metadata

    monkeypatch.setattr(SparseCPUBuilder, "build", watched)
    return seen


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
        {"enable_prefix_caching": False, "block_size": 32},
    ],
    ids=lambda given: ",".join(given) or "plain",
)
def test_full_budget_is_stock_in_batches_that_mix_prefill_and_decoding(
    models: Callable[..., Path], stock: Callable[..., Answer], steps: list[Any], given: dict[str, Any]
) -> None:
    model = models(llama)
    expected = stock(model, **given)
    with engine(model, SPARSE, **given) as llm:
        steps.clear()  # those of the self-test
        found = ask(llm, prompts(*LENGTHS), TOKENS)
    assert found.tokens == expected.tokens
    check_counts(found, full=True)
    assert found.stats.sparse_steps == (LAYERS - 1) * decoded(LENGTHS, TOKENS)
    served = [step for step in steps if step is not None]
    assert any(step.rest is not None and step.count > 1 for step in served), "some batches are mixed"
    assert any(step.rest is None for step in served), "some are not"
    assert any(step is None for step in steps)


def test_every_method_and_setting_is_stock_at_full_budget_and_alone_as_in_a_batch_below(
    models: Callable[..., Path], stock: Callable[..., Answer]
) -> None:
    """One engine, whose settings are switched. A window of every row is the full budget of a method without pages."""
    from sparseattn.serving.vllm.cpu import switch

    model = models(llama)
    expected, asked = stock(model), prompts(*LENGTHS)
    gc.collect()  # `switch` finds every engine of this process
    with engine(model, SPARSE) as llm:

        def answer(few: int | None = None, **changed: Any) -> Answer:
            switch(parse({**SPARSE, **changed}))
            llm.reset_prefix_cache()
            return ask(llm, asked[:few], TOKENS[:few])

        for changed in (
            {"selector": "quest:page=32,group=each", "dense_layers": 0},
            {"selector": "quest", "sink": 0, "window": 1, "above": 0},
            {"selector": "quest:page=16,group=softmax", "sink": 100, "window": 70},
            {"selector": "lowbit:page=16"},
            {"selector": "lowbit:bits=4,rows=128,page=64,group=each"},
            {"selector": "window", "budget": 1, "window": 2000},
        ):
            found = answer(**changed)
            assert found.tokens == expected.tokens, changed
            check_counts(found, full=True)
        for selector in ("quest", "quest:group=each", "lowbit:page=16", "window"):
            changed = {"selector": selector, "budget": 64}
            found = answer(**changed)
            assert found.tokens != expected.tokens, "what is left out matters to this model"
            check_counts(found, full=False)
            alone = answer(1, **changed)
            assert alone.tokens[0] == found.tokens[0], selector
            check_counts(alone, full=False)
        switch(None)
        llm.reset_prefix_cache()
        found = ask(llm, asked, TOKENS)
        assert found.tokens == expected.tokens
        assert found.stats.sparse_steps == 0
        # What stock wrote and cached is read by the next method without being written again: its index is made of that.
        first = [ids[:512] for ids in asked if len(ids) > 512]
        switch(parse({**SPARSE, "budget": 64}))
        hit = ask(llm, first)
        assert hit.engine["vllm:prefix_cache_hits"] >= 256 * len(first)
        check_counts(hit, full=False)
        llm.reset_prefix_cache()
        assert ask(llm, first).tokens == hit.tokens


def test_heads_of_other_sizes_and_numbers(models: Callable[..., Path], stock: Callable[..., Answer]) -> None:
    """80 channels, of which vLLM packs 16 rows at a time, and one KV head for five query heads."""
    model = models(llama, 5, 1, 80)
    expected = stock(model)
    with engine(model, SPARSE) as llm:
        found = ask(llm, prompts(*LENGTHS), TOKENS)
    assert found.tokens == expected.tokens
    check_counts(found, full=True)


@pytest.fixture(scope="module")
def several(models: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """Cached prefixes, several samples and beams: what stock vLLM answers, and at full and at small budget ours."""
    model = models(with_tokenizer)
    whole = prompts(600)[0]
    shared = [
        whole[:kept] + tail for kept, tail in zip((600, 400, 130, 500), prompts(1, 60, 90, 5, seed=1), strict=True)
    ]
    told: dict[str, dict[str, Any]] = {}
    for name, llm in at_three_budgets(model, skip_tokenizer_init=False, max_logprobs=16):
        told[name] = {
            "cold": ask(llm, [whole]),
            "prefix": ask(llm, shared),
            "samples": sampled(llm, shared[:2]),
            "beams": beams(llm, shared[:2]),
        }
        llm.reset_prefix_cache()
        told[name]["anew"] = ask(llm, shared[1:2])
    return told


def at_three_budgets(model: Path, **given: Any) -> Iterator[tuple[str, Any]]:
    """A stock engine, and one of ours at full budget and then at a small one, by their names."""
    from sparseattn.serving.vllm.cpu import switch

    with engine(model, None, **given) as llm:
        yield "stock", llm
    gc.collect()  # `switch` finds every engine of this process
    with engine(model, SPARSE, **given) as llm:
        yield "full", llm
        switch(parse({**SPARSE, "budget": 64}))
        llm.reset_prefix_cache()
        yield "small", llm


def sampled(llm: Any, asked: list[list[int]]) -> Answer:
    """By torch's own generator: with one of a request's, vLLM 0.32 stops at prompts in parts on a CPU."""
    torch.manual_seed(5)
    return ask(llm, asked, n=3, temperature=1.0)


def beams(llm: Any, asked: list[list[int]]) -> Answer:
    from vllm.sampling_params import BeamSearchParams

    from sparseattn.serving.vllm.counters import stats

    before = stats()
    found = llm.beam_search(
        [{"prompt_token_ids": ids} for ids in asked], BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    )
    return Answer([[beam.tokens for beam in one.sequences] for one in found], [], stats() - before)


def test_prompts_whose_prefix_is_cached(several: dict[str, dict[str, Any]]) -> None:
    for name in ("full", "small"):
        found = several[name]["prefix"]
        assert found.engine["vllm:prefix_cache_hits"] >= 512 + 384 + 128 + 384
        check_counts(found, full=name == "full")
        assert several[name]["anew"].engine["vllm:prefix_cache_hits"] == 0
        assert several[name]["anew"].tokens[0] == found.tokens[1], "entries of a cached block are those of a new one"
    assert several["full"]["prefix"].tokens == several["stock"]["prefix"].tokens
    assert several["full"]["cold"].tokens == several["stock"]["cold"].tokens


def test_several_samples_of_a_request(several: dict[str, dict[str, Any]]) -> None:
    found = several["full"]["samples"]
    assert found.tokens == several["stock"]["samples"].tokens
    assert all(len({tuple(sample) for sample in of_one}) == 3 for of_one in found.tokens)
    check_counts(found, full=True)
    check_counts(several["small"]["samples"], full=False)


def test_beams_are_stock_at_any_budget(several: dict[str, dict[str, Any]]) -> None:
    """vLLM asks for each token of a beam by a request of its own, whose rows are cached or prefilled: none decodes."""
    for name in ("full", "small"):
        found = several[name]["beams"]
        assert found.tokens == several["stock"]["beams"].tokens
        assert found.stats.sparse_steps == 0
        assert found.stats.dense_steps > 0


def test_preempted_requests(models: Callable[..., Path]) -> None:
    """Eight blocks for requests that want more: some lose theirs to others, and are computed again."""
    model, asked = models(llama), prompts(250, 240, 260, 200, 300, 110)
    tokens = (120, 150, 140, 90, 100, 160)
    with engine(model, None, num_gpu_blocks_override=9) as llm:
        expected = ask(llm, asked, tokens)
    with engine(model, SPARSE, num_gpu_blocks_override=9) as llm:
        found = ask(llm, asked, tokens)
    assert found.engine["vllm:num_preemptions"] == expected.engine["vllm:num_preemptions"] > 1
    assert found.tokens == expected.tokens
    check_counts(found, full=True)


@pytest.mark.parametrize("apart", [True, False], ids=["groups", "one group"])
def test_layers_with_windows_stay_stock(models: Callable[..., Path], steps: list[Any], apart: bool) -> None:
    """Two kinds of layers, in cache groups of their own or in one, of which the first of full attention stays dense."""
    kinds = ("sliding", "full", "sliding", "full", "full")
    model, asked = models(gemma, kinds), prompts(*LENGTHS[:5])
    given = {"disable_hybrid_kv_cache_manager": not apart}
    with engine(model, None, **given) as llm:
        expected = ask(llm, asked, TOKENS[:5])
    with engine(model, SPARSE, **given) as llm:
        steps.clear()
        found = ask(llm, asked, TOKENS[:5])
        assert [layer.impl.sparse for layer in layers(llm).values()] == [False, False, False, True, True]
    assert found.tokens == expected.tokens
    check_counts(found, full=True)
    assert found.stats.sparse_steps == 2 * decoded(LENGTHS[:5], TOKENS[:5])
    if not apart:  # a step is built once: the three layers of full attention count, those with windows do not
        alone = [step is not None and step.rest is None for step in steps]
        assert found.stats.dense_steps == 3 * len(steps) - 2 * sum(alone)


def test_bfloat16(models: Callable[..., Path]) -> None:
    """Near-ties fall either way in 16 bits: logprobs are compared, of the tokens before answers part."""
    model, asked = models(llama), prompts(*LENGTHS)
    told = {}
    for name, llm in at_three_budgets(model, dtype="bfloat16"):
        told[name] = ask(llm, asked, TOKENS)
    check_counts(told["full"], full=True)
    check_counts(told["small"], full=False)

    def compare(name: str) -> tuple[int, float]:
        """Tokens before answers part, and how far their logprobs are off."""
        agreed, off = 0, 0.0
        for i in range(len(asked)):
            pairs = list(zip(told["stock"].tokens[i][0], told[name].tokens[i][0], strict=True))
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
            a, b = (torch.tensor(told[how].logprobs[i][0][:same]) for how in ("stock", name))
            agreed, off = agreed + same, max(off, float((a - b).abs().max())) if same else off
        return agreed, off

    agreed, off = compare("full")
    assert agreed > 0.5 * sum(TOKENS)
    assert off < 0.1
    assert compare("small")[1] > 0.5, "what is left out shows"
