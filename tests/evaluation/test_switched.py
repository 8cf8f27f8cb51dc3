"""`eval --engine vllm`: an answer counts only if the engine's own counters say which attention gave it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sparseattn import Quest
from sparseattn.core.activity import Activity, LayerActivity
from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.run import Method
from sparseattn.evaluation.tasks.switched import Switched
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.serving.vllm.offline import Answered, OfflinePrompt
from sparseattn.serving.vllm.settings import Settings, parse

SETTINGS = parse({"selector": "quest", "budget": 64, "above": 0})


class Engine:
    """Gives an answer of so many tokens to each prompt, and counts what it is told to."""

    version, concurrency, positions = "0", 2, None

    def __init__(self, lengths: list[int], sparse_calls: list[int]) -> None:
        self.lengths, self.sparse_calls = lengths, [0, *sparse_calls]  # the first: as the pass begins
        self.served: list[Settings | None] = []

    def use(self, settings: Settings | None) -> None:
        self.served.append(settings)

    def counts(self) -> Activity:
        calls = self.sparse_calls.pop(0)
        return Activity({0: LayerActivity(sparse_steps=calls, rows_read=calls, rows_held=4 * calls)})

    def answers(self, asked: Iterable[tuple[Any, OfflinePrompt]]) -> Iterator[tuple[Any, Answered]]:
        for (prompt, _), length in zip(asked, self.lengths, strict=True):
            yield prompt, Answered(list(b"1234567890"[:length]), 1.0, 0.5)


def measured(engine: Engine, settings: Settings | None) -> list[dict[str, Any]]:
    tokens = Tokens(None)
    method = Method(Quest(), 64, "64") if settings else Method()
    (serving,) = Switched(engine, tokens, [(method, settings)]).passes  # type: ignore[arg-type]
    examples = [Example("own", f"context {n}", "question", ("1",), "exact") for n in range(len(engine.lengths))]
    return list(serving.measure([Prompt.of(example, tokens) for example in examples], ()))


def test_an_answer_of_one_token_is_none_that_was_decoded() -> None:
    """It ends with the prefill, before anything beside it was decoded; then the other's tokens must show."""
    engine = Engine([1, 5], [0, 12])
    found = measured(engine, SETTINGS)
    assert engine.served == [SETTINGS]
    assert [(one["new_tokens"], one["rows_share"]) for one in found] == [(1, 0.0), (5, 0.25)]


@pytest.mark.parametrize(("settings", "calls"), [(SETTINGS, 0), (None, 3)], ids=["never on", "on in stock's turn"])
def test_counters_that_deny_the_method_end_the_run(settings: Settings | None, calls: int) -> None:
    with pytest.raises(RuntimeError, match=r"decoded 4 tokens, and vLLM's plug-in counts [0-9,]+ sparse steps"):
        measured(Engine([5], [calls]), settings)
