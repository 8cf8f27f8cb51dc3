"""A prompt as tokens: what is read densely, what is asked, and the keys of its records."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.compared import FORCED, Compared
from sparseattn.evaluation.tasks.records import KEY, Key
from sparseattn.evaluation.tasks.tokens import Tokens


@dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens to measure on.

    Args:
        facts: of every record: task, length, depth, seed and the like.
        context: tokens that are read densely.
        question: tokens of the question; of a text for agreement, those fed one by one.
        example: what to score a response by; None for agreement.
        expected: for agreement, the token to expect behind each of `question`.
        limit: tokens of an answer at most.
        thoughts_begun: whether its chat template begins the model's thoughts.
    """

    facts: dict[str, Any]
    context: list[int]
    question: list[int]
    example: Example | None = None
    expected: list[int] = field(default_factory=list)
    limit: int = 0
    thoughts_begun: bool = False

    @classmethod
    def of(cls, example: Example, tokens: Tokens, limit: int | None = None) -> Prompt:
        """Return the prompt of an example; `limit` None: its own, or twice the tokens of the answers and 8."""
        context, question = tokens.parts(example)
        limit = limit or example.limit or 2 * tokens.count(example.target) + 8
        facts = {"task": example.task, **example.meta}
        return cls(facts, context, question, example, [], limit, tokens.thoughts_begun(example))

    def shortened(self, longest: int, tokens: Tokens, option: str = "longest") -> Prompt:
        """With so much cut out of the middle of the context that prompt and answer have `longest` tokens at most.

        The example loses the same.

        Raises:
            ValueError: naming the `option` that `longest` was given to: question and answer leave no room for 2 tokens
                of the context.
        """
        spare = len(self.question) + self.limit
        room = longest - spare
        if len(self.context) <= room:
            return self
        if room < 2:
            raise ValueError(
                f"{self.name} has {len(self.question)} tokens of a question and {self.limit} of an answer: {option} is "
                f"{spare + min(len(self.context), 2)} or more, got {longest}"
            )
        head, foot = self.context[: room // 2], self.context[-(room - room // 2) :]
        first = len(tokens.before) if self.example is None else tokens.first(self.example)
        words = tokens.text(head[first:]) + tokens.text(foot)
        return replace(
            self,
            context=head + foot,
            example=self.example and replace(self.example, context=words),
            facts={**self.facts, "cut": len(self.context) - room},
        )

    @classmethod
    def passage(cls, facts: dict[str, Any], ids: Sequence[int], last: int) -> Prompt:
        """Tokens of a text, the last of which are predicted one after the other."""
        ids = list(ids)
        return cls(facts, ids[: -last - 1], ids[-last - 1 : -1], expected=ids[-last:])

    @property
    def name(self) -> str:
        """What the sentences of errors call it."""
        where = [
            f"{name} {self.facts[name]}"
            for name in ("file", "line", "text", "length", "start", "depth", "seed", "sample")
            if name in self.facts
        ]
        return f"a prompt of {self.facts['task']} ({', '.join(where)})"

    @property
    def place(self) -> dict[str, Any]:
        """The file and line that it was read from, which may change while the prompt stays the same; {}: no file."""
        return {name: self.facts[name] for name in ("file", "line") if name in self.facts}

    @property
    def tokens(self) -> int:
        """Of context and question."""
        return len(self.context) + len(self.question)

    @property
    def hash(self) -> str:
        """Of all tokens and what they are for."""
        place: tuple[Any, ...] = (self.context, self.question, self.expected, self.example and self.example.answers)
        if self.example is not None and self.example.reference:
            place += (self.example.scoring, sorted(self.example.reference.items()))
        if self.example is not None and self.example.own_limit:
            place += ("limit", self.limit)
        return hashlib.sha256(repr(place).encode()).hexdigest()[:16]

    def protocols(self, wanted: Sequence[str]) -> Sequence[str]:
        """Those of `wanted` that fit this prompt."""
        return wanted if self.example is not None else (FORCED,)

    def keys(self, wanted: Sequence[str], methods: Sequence[Compared]) -> list[Key]:
        """Return the keys of its records, in the order in which `measure` makes them."""
        name = (self.facts["task"], self.hash)
        return [
            (*name, protocol, method.label, method.written, method.source, method.where)
            for protocol in self.protocols(wanted)
            for method in methods
        ]

    def record(self, key: Key, *parts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the record of one of its `keys`, with what was found."""
        made = {**self.facts, **dict(zip(KEY, key, strict=True)), "prompt_tokens": self.tokens}
        for part in parts:
            made |= part
        return made
