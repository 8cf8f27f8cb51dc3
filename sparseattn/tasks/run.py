"""One prefill of a prompt, and from it the responses of every method, by one of two protocols; what scores a response.

- "question", the papers': the context is read densely; the question's tokens and then the answer's go through the
  sparse path, one by one.
- "prefill": the question is read densely too, all but its last token; that one is the first to go through the sparse
  path, so that every token of the answer comes from it.

Agreement has one protocol, "forced": the last tokens of a text go through the sparse path whatever the model expected,
and through full attention, whose predictions the method's are compared with.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from sparseattn.budget import Budget
from sparseattn.roles import Method as Sparse
from sparseattn.roles import ranges, rounded_label
from sparseattn.tasks.agreement import agreement
from sparseattn.tasks.base import Example
from sparseattn.tasks.engines import Compared
from sparseattn.tasks.records import KEY, Key
from sparseattn.tasks.scoring import ruler, score
from sparseattn.tasks.tokens import Tokens

PROTOCOLS = ("question", "prefill")
FORCED = "forced"
FULL = "full"  # the label of full attention


@dataclass(frozen=True, eq=False)
class Method:
    """A selector, its budget and where it is applied; without a selector, full attention.

    Args:
        selector: of every sparse layer, or roles, which have one for each layer or head.
        budget: rows beyond sink and window.
        written: the budget as text, for records; None where the selector does not look at it.
        layers: those that are sparse, ascending; None: every one that attends to the whole context and is not dense.
        bits: of the sealed rows of these, see `KVCache`; None: as they come.
    """

    selector: Sparse | None = None
    budget: Budget = None
    written: str | None = None
    layers: tuple[int, ...] | None = None
    bits: int | None = None

    @property
    def label(self) -> str:
        return FULL if self.selector is None else rounded_label(self.selector.label(), self.bits)

    @functools.cached_property
    def source(self) -> str | None:
        """What tells methods of one label apart: the selector's class and a hash of what it read."""
        return None if self.selector is None else self.selector.source()

    @property
    def where(self) -> str | None:
        """The layers as text, for records: "0-9,12"; None for all of them."""
        return None if self.layers is None else ranges(self.layers)


class Session(Protocol):
    """One method behind a prefill, decoding. It does not change what other sessions of the prefill read."""

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Feeds tokens through the method's attention, each by itself; the logits `[n,V]` behind each of them."""

    def facts(self) -> dict[str, Any]:
        """What the tokens so far cost, for the record: `rows` attended among them."""


class Decoder(Protocol):
    """A model that reads prompts densely and goes on by any method, such as `decoder.ModelDecoder`."""

    def read(self, tokens: Sequence[int]) -> Any:
        """A dense prefill of a fresh prompt, 1 token or more."""

    def index(
        self,
        prefill: Any,
        tail: Sequence[int],
        selector: Sparse | None,
        layers: Sequence[int] | None = None,
        bits: int | None = None,
    ) -> Any:
        """What a selector (None: full attention) builds behind a prefill and `tail`, which is read densely too.

        `layers`: those that are to be sparse; None: all that can. `bits`: of their sealed rows; None: as they come.
        """

    def start(self, indexed: Any, budget: Budget) -> Session:
        """A session behind what `index` gave, which stays as it is."""


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
    """

    facts: dict[str, Any]
    context: list[int]
    question: list[int]
    example: Example | None = None
    expected: list[int] = field(default_factory=list)
    limit: int = 0

    @classmethod
    def of(cls, example: Example, tokens: Tokens, limit: int | None = None) -> Prompt:
        """The prompt of an example; `limit` None: twice the tokens of the answers and 8."""
        question = tokens.asked(example.question, example.lead)
        limit = limit or 2 * tokens.count(example.target) + 8
        context = [*tokens.before, *tokens.ids(example.context)]
        return cls({"task": example.task, **example.meta}, context, question, example, limit=limit)

    def shortened(self, longest: int, tokens: Tokens, option: str = "longest") -> Prompt:
        """With so much cut out of the middle of the context that prompt and answer have `longest` tokens at most.

        The example loses the same.

        Raises:
            ValueError: naming the `option` that `longest` was given to: question and answer leave no room for 2 tokens
                of the context.
        """
        asked = len(self.question) + self.limit
        room = longest - asked
        if len(self.context) <= room:
            return self
        if room < 2:
            raise ValueError(
                f"{self.name} has {len(self.question)} tokens of a question and {self.limit} of an answer: {option} is "
                f"{asked + min(len(self.context), 2)} or more, got {longest}"
            )
        head, foot = self.context[: room // 2], self.context[-(room - room // 2) :]
        words = tokens.text(head[len(tokens.before) :]) + tokens.text(foot)
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
            for name in ("file", "line", "text", "length", "start", "depth", "seed")
            if name in self.facts
        ]
        return f"a prompt of {self.facts['task']} ({', '.join(where)})"

    @property
    def tokens(self) -> int:
        """Of context and question."""
        return len(self.context) + len(self.question)

    @property
    def hash(self) -> str:
        """Of all tokens and what they are for."""
        place = (self.context, self.question, self.expected, self.example and self.example.answers)
        return hashlib.sha256(repr(place).encode()).hexdigest()[:16]

    def protocols(self, asked: Sequence[str]) -> Sequence[str]:
        """Those of `asked` that fit this prompt."""
        return asked if self.example is not None else (FORCED,)

    def keys(self, asked: Sequence[str], methods: Sequence[Compared]) -> list[Key]:
        """The keys of its records, in the order in which `measure` makes them."""
        name = (self.facts["task"], self.hash)
        return [
            (*name, protocol, method.label, method.written, method.source, method.where)
            for protocol in self.protocols(asked)
            for method in methods
        ]

    def record(self, key: Key, *parts: Mapping[str, Any]) -> dict[str, Any]:
        """The record of one of its `keys`, with what was found."""
        made = {**self.facts, **dict(zip(KEY, key, strict=True)), "prompt_tokens": self.tokens}
        for part in parts:
            made |= part
        return made


def measure(
    prompt: Prompt,
    methods: Sequence[Method],
    protocols: Sequence[str],
    decoder: Decoder,
    tokens: Tokens,
    known: Collection[Key] = (),
    ends: Collection[int] = (),
) -> Iterator[dict[str, Any]]:
    """A record for every protocol and method, but for those in `known`; the prompt is read once, if at all.

    Args:
        prompt: what to read and ask.
        methods: what to compare.
        protocols: of `PROTOCOLS`.
        decoder: the model.
        tokens: its tokenizer.
        known: keys of records that are there already.
        ends: tokens that end a response.
    """
    prefill, times = None, {}
    for protocol in prompt.protocols(protocols):
        keys = dict(zip(prompt.keys([protocol], methods), methods, strict=True))
        wanted = [(key, method) for key, method in keys.items() if key not in known]
        at = len(prompt.question) - 1 if protocol == "prefill" else 0
        dense: Tensor | None = None  # [n,V] of full attention: not in records, so made again where they are continued
        for (_, layers), group in itertools.groupby(wanted, lambda one: (one[1].label, one[1].layers)):
            if prefill is None:
                began = time.perf_counter()
                prefill = decoder.read(prompt.context)
                times["prefill_seconds"] = time.perf_counter() - began
            members = list(group)
            selector, bits = members[0][1].selector, members[0][1].bits
            if protocol == FORCED and dense is None and selector is not None:
                dense = decoder.start(decoder.index(prefill, [], None), None).feed(prompt.question)
            began = time.perf_counter()
            indexed = decoder.index(prefill, prompt.question[:at], selector, layers, bits)
            times["index_seconds"] = time.perf_counter() - began
            for key, method in members:
                began = time.perf_counter()
                session = decoder.start(indexed, method.budget)
                if protocol == FORCED:
                    logits = session.feed(prompt.question)
                    times["decode_seconds"] = time.perf_counter() - began
                    dense = logits if dense is None else dense
                    result = agreement(logits, dense, prompt.expected)
                else:
                    result = _answer(session, prompt.question[at:], prompt, tokens, ends)
                    times["decode_seconds"] = time.perf_counter() - began
                chosen_by = {"selector": method.selector and repr(method.selector)}
                took = {name: round(seconds, 4) for name, seconds in times.items()}
                yield prompt.record(key, chosen_by, result, session.facts(), took)
                del session  # before another one copies the keys and values
            del indexed


def _answer(
    session: Session, fed: Sequence[int], prompt: Prompt, tokens: Tokens, ends: Collection[int]
) -> dict[str, Any]:
    """Greedy decoding until an end, a line's end behind some text, or the limit."""
    logits = session.feed(fed)[-1]
    made: list[int] = []
    while True:
        token = int(logits.argmax())
        if token in ends:
            break
        made.append(token)
        response = tokens.text(made)
        if len(made) == prompt.limit or line_ended(response):
            break
        logits = session.feed([token])[-1]
    assert prompt.example is not None
    return scored(prompt.example, tokens.text(made))


def line_ended(response: str) -> bool:
    """Whether a response is whole: a line has ended behind some text."""
    return "\n" in response.lstrip()


def scored(example: Example, response: str) -> dict[str, Any]:
    """A response and its scores, for a record."""
    return {
        "response": response,
        "answers": list(example.answers),
        "scoring": example.scoring,
        "score": score(example.scoring, response, example.answers, example.others),
        "ruler": ruler(example.scoring, response, example.answers),
    }
