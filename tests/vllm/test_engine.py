"""An engine with the plug-in says what stock vLLM says, where the budget leaves no row out, whatever the engine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import FULL, LAYERS, SPARSE, Answer, ask, check_counts, engine, gemma, layers, llama, prompts

LENGTHS = (700, 300, 40, 520, 129, 260, 90, 333)
TOKENS = (24, 60, 70, 24, 8, 40, 24, 30)  # the third request becomes long enough to be sparse while it decodes


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
            assert known[key].stats.sparse_calls == known[key].stats.dense_calls == 0, "it is not stock"
        return known[key]

    return answer


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every step served sparsely, None for nothing."""
    from sparseattn.integrations.vllm.cpu import SparseCPUBuilder

    seen: list[Any] = []
    build = SparseCPUBuilder._served

    def watched(builder: Any, *given: Any) -> Any:
        seen.append(build(builder, *given))
        return seen[-1]

    monkeypatch.setattr(SparseCPUBuilder, "_served", watched)
    return seen


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
        {"enable_prefix_caching": False, "block_size": 32},
        {"async_scheduling": True, "block_size": 64},
    ],
    ids=lambda given: ",".join(given) or "plain",
)
def test_full_budget_is_stock_in_batches_that_mix_prefill_and_decoding(
    models: Callable[..., Path], stock: Callable[..., Answer], steps: list[Any], given: dict[str, Any]
) -> None:
    model = models(llama)
    expected = stock(model, **given)
    with engine(model, SPARSE, **given) as llm:
        found = ask(llm, prompts(*LENGTHS), TOKENS)
    assert found.tokens == expected.tokens
    check_counts(found, full=True)
    served = [step for step in steps if step is not None]
    assert any(step.rest is not None and step.count > 1 for step in served), "some batches are mixed"
    assert any(step.rest is None for step in served), "some are not"
    assert any(step is None for step in steps)
