"""Estimated tails in an engine: means of groups stand for the rows that a query does not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import LENGTHS, SPARSE, TOKENS, ask, check_counts, engine, layers, llama, prompts

from sparseattn.serving.vllm import cpu, self_test
from sparseattn.serving.vllm.settings import parse

TAILS = (
    "tailed:inner=lowbit,rows=64",
    "tailed",
    "tailed:inner=lowbit,rows=128",
    "tailed:inner=[quest:page=32],rows=64",
)


@pytest.mark.parametrize("selector", TAILS)
def test_full_budget_is_stock_where_no_row_is_left_for_a_mean(tmp_path: Path, selector: str) -> None:
    model, asked = llama(tmp_path), prompts(*LENGTHS)
    with engine(model, None) as llm:
        expected = ask(llm, asked, TOKENS)
    with engine(model, {**SPARSE, "selector": selector}) as llm:
        found = ask(llm, asked, TOKENS)
        assert found.tokens == expected.tokens
        check_counts(found, full=True)
        cpu.switch(parse({**SPARSE, "selector": selector, "budget": 64}))
        llm.reset_prefix_cache()
        few = ask(llm, asked, TOKENS)
        check_counts(few, full=False)
        assert few.tokens != expected.tokens


def test_the_self_test_sees_means_of_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes, as the engine starts; with means that are off it does not."""
    from sparseattn.serving.vllm.mean_index import TailedStore

    with engine(llama(tmp_path), {**SPARSE, "selector": "tailed:inner=lowbit,rows=64"}) as llm:
        builder = next(one for one in cpu.BUILDERS if one.sparse)
        update = TailedStore.update_from

        def wrong(store: Any, cache: Any, places: torch.Tensor) -> None:
            update(store, cache, places)
            store.means.values.copy_(store.means.values.roll(1, 1))

        monkeypatch.setattr(TailedStore, "update_from", wrong)
        with pytest.raises(ValueError, match="a sparse step is off from attention over the rows that it names"):
            self_test.check(builder)
        assert any(layer.impl.sparse for layer in layers(llm).values())


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("tailed:zone=0.5", "leave zone out"),
        ("tailed:inner=[quest:page=8],rows=8", "groups are a multiple of 16 rows, got 8"),
        ("tailed:inner=moments", "has another kind of index"),
        ("tailed:inner=querypq", "codes are made for one prompt"),
        ("retroinfer", "has another kind of index"),
    ],
)
def test_tails_that_an_engine_cannot_have_are_refused(selector: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse({**SPARSE, "selector": selector})
