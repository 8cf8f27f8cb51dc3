"""vLLM in this process as an engine: one pass a method, which reads every prompt whole and decodes by that method."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from typing import Any

from sparseattn.core.activity import Activity
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import WHOLE, Key
from sparseattn.evaluation.tasks.run import Method, ending, scored
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.serving.vllm.offline import Answered, Offline, OfflinePrompt
from sparseattn.serving.vllm.settings import Settings


class Switched:
    """Compares methods in one engine.

    Args:
        engine: as said.
        tokens: of the model.
        methods: with the settings of each, None for full attention, which comes first.
    """

    protocols = (WHOLE,)

    def __init__(self, engine: Offline, tokens: Tokens, methods: Sequence[tuple[Method, Settings | None]]) -> None:
        self.positions: int | None = engine.positions
        self.passes = [Serving(engine, tokens, method, settings) for method, settings in methods]

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ValueError where the engine has no positions for so many tokens."""
        if self.positions is not None and tokens > self.positions:
            raise ValueError(f"the engine takes {self.positions} tokens, {what} takes {tokens}{remedy}")


class Serving:
    """One method, as a pass."""

    def __init__(self, engine: Offline, tokens: Tokens, method: Method, settings: Settings | None) -> None:
        self.engine, self.tokens, self.settings = engine, tokens, settings
        self.compared = [method]
        self.facts = {
            "engine": f"vllm {engine.version}",
            "concurrency": engine.concurrency,
            "selector": None if settings is None else settings.called,
        }

    def measure(self, prompts: Iterable[Prompt], known: Collection[Key]) -> Generator[dict[str, Any], None, None]:
        """Asks, as long as there are prompts.

        Raises:
            RuntimeError: the engine's own counts deny that the method ran, or that nothing else did.
        """
        self.engine.use(self.settings)
        before, steps = self.engine.counts(), 0

        def coming() -> Iterator[tuple[Prompt, OfflinePrompt]]:
            for prompt in prompts:
                if prompt.keys((WHOLE,), self.compared)[0] not in known:
                    assert prompt.example is not None
                    ended = ending(prompt.example, prompt.thoughts_begun)
                    yield (
                        prompt,
                        OfflinePrompt([*prompt.context, *prompt.question], prompt.limit, ended),
                    )

        for prompt, answer in self.engine.answers(coming()):
            steps += len(answer.ids) - 1  # the first token is the prefill's
            ran = self.engine.counts() - before
            if (ran.sparse_steps > 0) if self.settings is None else (steps > 0 and not ran.sparse_steps):
                raise RuntimeError(f"{self.compared[0].label} decoded {steps} tokens, and vLLM's plug-in counts {ran}")
            yield self._record(prompt, answer, ran)

    def _record(self, prompt: Prompt, answer: Answered, ran: Activity) -> dict[str, Any]:
        """With what ran since the pass began."""
        assert prompt.example is not None
        (key,) = prompt.keys((WHOLE,), self.compared)
        facts = {
            "seconds": round(answer.seconds, 4),
            "first_token_seconds": round(answer.first_seconds, 4),
            "new_tokens": len(answer.ids),
            "rows_share": round(ran.share, 4) if self.settings else 1.0,
            "activity": ran.to_dict(),
        }
        result = scored(prompt.example, self.tokens.text(answer.ids), prompt.thoughts_begun)
        return prompt.record(key, result, facts, self.facts)
