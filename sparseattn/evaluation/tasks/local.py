"""A model in this process as an engine: every prompt is read once, for all methods."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from typing import Any

from sparseattn.evaluation.tasks.decoder import ModelDecoder
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import Key
from sparseattn.evaluation.tasks.run import Method, measure
from sparseattn.evaluation.tasks.tokens import Tokens


class Local:
    """Measures with a decoder; its one pass is itself.

    Args:
        decoder: the model.
        tokens: its tokenizer.
        compared: the methods, full attention first.
        protocols: of `run.PROTOCOLS`.
    """

    def __init__(
        self, decoder: ModelDecoder, tokens: Tokens, compared: Sequence[Method], protocols: Sequence[str]
    ) -> None:
        self.decoder, self.tokens, self.compared, self.protocols = decoder, tokens, compared, protocols
        self.passes, self.positions = [self], decoder.positions

    def check(self, tokens: int, what: str, remedy: str = "") -> None:
        """ModelError where the model has no positions for so many tokens."""
        self.decoder.check(tokens, what, remedy)

    def measure(self, prompts: Iterable[Prompt], known: Collection[Key]) -> Generator[dict[str, Any], None, None]:
        """As `run.measure`, prompt by prompt."""
        for prompt in prompts:
            yield from measure(
                prompt, self.compared, self.protocols, self.decoder, self.tokens, known, self.decoder.ends
            )
