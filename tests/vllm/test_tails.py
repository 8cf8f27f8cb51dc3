"""Estimated tails in an engine: means of groups stand for the rows that a query does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import LENGTHS, SPARSE, TOKENS, ask, check_counts, engine, layers, llama, prompts, switched

from sparseattn.serving.vllm import cpu, self_test
from sparseattn.serving.vllm.settings import parse

TAILS = (
    "tailed:inner=lowbit,rows=64",
    "tailed",
    "tailed:inner=lowbit,rows=128",
    "tailed:inner=[quest:page=32],rows=64",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("llama"))


def test_full_budget_is_stock_where_no_row_is_left_for_a_mean(model: Path) -> None:
    """Each method in one engine, whose settings are switched."""
    asked = prompts(*LENGTHS)
    with engine(model, None) as llm:
        expected = ask(llm, asked, TOKENS)
    with engine(model, {**SPARSE, "selector": TAILS[0]}) as llm:
        for selector in TAILS:
            if selector != TAILS[0]:
                switched(llm, {**SPARSE, "selector": selector})
            found = ask(llm, asked, TOKENS)
            assert found.tokens == expected.tokens, selector
            check_counts(found, full=True)
            few = ask(switched(llm, {**SPARSE, "selector": selector, "budget": 64}), asked, TOKENS)
            check_counts(few, full=False)
            assert few.tokens != expected.tokens, selector


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
def test_drafts_budgets_of_requests_and_heads_apart_have_tails_too(model: Path) -> None:
    """A request gets the tokens that it gets alone, whatever is decoded beside it; a draft changes none of them."""
    asked = prompts(*LENGTHS[:4])
    draft = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    methods = ("tailed:inner=[lowbit:group=each],rows=64", "tailed:inner=[quest:page=32,group=each]")
    first, second = ({**SPARSE, "selector": selector, "budget": 64} for selector in methods)
    told = []
    with engine(model, first) as llm:
        for few in (first, second):
            if few is second:
                switched(llm, few)
            told.append(together := ask(llm, asked))
            assert ask(llm, asked[:1]).tokens == together.tokens[:1]
            wide = ask(llm, asked, extra_args={"sparseattn_budget": 1024})
            cpu.switch(parse({**few, "budget": 1024}))
            assert ask(llm, asked).tokens == wide.tokens != together.tokens
    with engine(model, first, speculative_config=draft) as llm:
        assert ask(llm, asked).tokens == told[0].tokens
        assert ask(switched(llm, second), asked).tokens == told[1].tokens


def test_an_entry_may_hold_several_of_the_inner_method(model: Path) -> None:
    """Pages of 32 in groups of 128: choices are the inner's own, and bytes count both."""
    from sparseattn.serving.vllm.page_index import entry_bytes
    from sparseattn.serving.vllm.settings import servable

    made = servable("tailed:inner=[quest:page=32],rows=128")
    assert (made.page, made.unit) == (32, 128)
    inner = servable("quest:page=32")
    bytes_of_inner = entry_bytes(inner, 2, 64, torch.bfloat16)
    assert entry_bytes(made, 2, 64, torch.bfloat16) == 4 * bytes_of_inner + 2 * 2 * 64 * 2
    asked = prompts(*LENGTHS[:2])
    with engine(model, {**SPARSE, "selector": "tailed:inner=[quest:page=32],rows=128", "budget": 64}) as llm:
        layer = next(layer for layer in layers(llm).values() if layer.impl.sparse)
        ask(llm, asked)
        store = layer.impl.store
        table = torch.tensor([[3, 0, -1]], dtype=torch.int32)
        query = torch.randn(1, 2, 2, 64)
        inner_table = torch.tensor([[12, 13, 14, 15, 0, 1, 2, 3, -1, -1, -1, -1]], dtype=torch.int32)
        found, expected = store.scores(query, table), store.selector.scores_at(query, store.entries, inner_table)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["auto", "fp8_e5m2"])
def test_tails_in_16_and_8_bits_pass_the_self_test(model: Path, kind: str) -> None:
    """It compares with attention over the named rows and means made apart."""
    if kind != "auto" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM keeps caches of 8 bits on processors with AVX-512")
    few = {**SPARSE, "selector": "tailed:inner=lowbit,rows=64", "budget": 64}
    with engine(model, few, dtype="bfloat16", kv_cache_dtype=kind) as llm:
        check_counts(ask(llm, prompts(*LENGTHS[:2])), full=False)


def test_the_self_test_sees_means_of_other_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, as the engine starts; with means that are off it does not."""
    from sparseattn.serving.vllm.mean_index import TailedStore

    with engine(model, {**SPARSE, "selector": "tailed:inner=lowbit,rows=64"}) as llm:
        builder = next(one for one in cpu.BUILDERS if one.sparse)
        update = TailedStore.update_from

        def wrong(store: Any, cache: Any, places: torch.Tensor, first: torch.Tensor) -> None:
            update(store, cache, places, first)
            store.means.values.copy_(store.means.values.roll(1, 1))

        monkeypatch.setattr(TailedStore, "update_from", wrong)
        with pytest.raises(ValueError, match="a sparse step is off from attention over the rows that it names"):
            self_test.check(builder)
        assert any(layer.impl.sparse for layer in layers(llm).values())


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("tailed:zone=0.5", "leave zone out"),
        ("tailed:inner=[quest:page=8],rows=64", "pages are a multiple of 16 rows, got 8"),
        ("tailed:inner=lowbit,rows=8", "groups are a multiple of 16 rows, got 8"),
        ("tailed:inner=moments", "has another kind of index"),
        ("tailed:inner=querypq", "codes are made for one prompt"),
        ("retroinfer", "has another kind of index"),
    ],
)
def test_tails_that_an_engine_cannot_have_are_refused(selector: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse({**SPARSE, "selector": selector})
