"""One prefill of a prompt, and from it the responses of every method, by one of three protocols; and their scores.

- "question", the papers': the context is read densely; the question's tokens and then the answer's go through the
  sparse path, one by one.
- "prefill": the question is read densely too, all but its last token; that one is the first to go through the sparse
  path, so that every token of the answer comes from it.
- "generate", as `model.generate` and servers have it: the whole prompt is read densely, and with it the answer's first
  token. The tokens behind that one come from the sparse path.

Agreement has one protocol, "forced": the last tokens of a text go through the sparse path whatever the model expected,
and through full attention, whose predictions the method's are compared with.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sparseattn.codecs.base import RowCodec
from sparseattn.core.budget import Budget
from sparseattn.evaluation.metrics.registry import METRICS, metric_score
from sparseattn.evaluation.tasks.agreement import agreement
from sparseattn.evaluation.tasks.base import Example
from sparseattn.evaluation.tasks.compared import FORCED, FULL
from sparseattn.evaluation.tasks.prompt import Prompt
from sparseattn.evaluation.tasks.records import Key
from sparseattn.evaluation.tasks.scoring import ruler, score
from sparseattn.evaluation.tasks.thoughts import answer_in
from sparseattn.evaluation.tasks.tokens import Tokens
from sparseattn.roles.role import kept_label
from sparseattn.roles.roles import Method as Sparse
from sparseattn.roles.roles import ranges


@dataclass(frozen=True, eq=False)
class Method:
    """A selector, its budget and where it is applied; without a selector, full attention.

    Args:
        selector: of every sparse layer, or roles, which have one for each layer or head.
        budget: rows beyond sink and window.
        written: the budget as text, for records; None where the selector does not look at it.
        layers: those that are sparse, ascending; None: every one that attends to the whole context and is not dense.
        codec: keeps the sealed rows of these, see `KVCache`; None: as they come.
    """

    selector: Sparse | None = None
    budget: Budget = None
    written: str | None = None
    layers: tuple[int, ...] | None = None
    codec: RowCodec | None = None

    @property
    def label(self) -> str:
        return FULL if self.selector is None else kept_label(self.selector.label(), self.codec)

    @functools.cached_property
    def source(self) -> str | None:
        """What tells methods of one label apart: the selector's identity and a hash of what it read."""
        return None if self.selector is None else self.selector.source()

    @property
    def where(self) -> str | None:
        """The layers as text, for records: "0-9,12"; None for all of them."""
        return None if self.layers is None else ranges(self.layers)


class Session(Protocol):
    """One method behind a prefill, decoding. It does not change what other sessions of the prefill read."""

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Feed tokens through the method's attention, each by itself; the logits `[n,V]` behind each of them."""

    def facts(self) -> dict[str, Any]:
        """Return what the tokens so far cost, for the record: `rows` attended among them."""


class Decoder(Protocol):
    """A model that reads prompts densely and goes on by any method, such as `decoder.ModelDecoder`."""

    def read(self, tokens: Sequence[int]) -> Any:
        """Return a dense prefill of a fresh prompt, 1 token or more."""

    def index(
        self,
        prefill: Any,
        tail: Sequence[int],
        selector: Sparse | None,
        layers: Sequence[int] | None = None,
        codec: RowCodec | None = None,
    ) -> Any:
        """Return what a selector (None: full attention) builds behind a prefill and `tail`, which is read densely too.

        `layers`: those that are to be sparse; None: all that can. `codec`: keeps their sealed rows; None: as they come.
        """

    def start(self, indexed: Any, budget: Budget) -> Session:
        """Return a session behind what `index` gave, which stays as it is."""


def measure(
    prompt: Prompt,
    methods: Sequence[Method],
    protocols: Sequence[str],
    decoder: Decoder,
    tokens: Tokens,
    known: Collection[Key] = (),
    ends: Collection[int] = (),
) -> Iterator[dict[str, Any]]:
    """Return a record for every protocol and method, but for those in `known`; the prompt is read once, if at all.

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
        at = _dense_tokens(protocol, len(prompt.question))
        first: int | None = None  # token of the answer, where the dense prefill gives it
        dense: Tensor | None = None  # [n,V] of full attention: not in records, so made again where they are continued
        for (_, layers), group in itertools.groupby(wanted, lambda method: (method[1].label, method[1].layers)):
            if prefill is None:
                began = time.perf_counter()
                prefill = decoder.read(prompt.context)
                times["prefill_seconds"] = time.perf_counter() - began
            members = list(group)
            selector, codec = members[0][1].selector, members[0][1].codec
            if protocol == FORCED and dense is None and selector is not None:
                dense = decoder.start(decoder.index(prefill, [], None), None).feed(prompt.question)
            if protocol == "generate" and first is None:
                last = decoder.start(decoder.index(prefill, prompt.question[:-1], None), None).feed(
                    prompt.question[-1:]
                )
                first = int(last[-1].argmax())
            began = time.perf_counter()
            indexed = decoder.index(prefill, prompt.question[:at], selector, layers, codec)
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
                    result = _answer(session, prompt.question[at:], prompt, tokens, ends, first)
                    times["decode_seconds"] = time.perf_counter() - began
                chosen_by = {"selector": method.selector and repr(method.selector)}
                took = {name: round(seconds, 4) for name, seconds in times.items()}
                yield prompt.record(key, chosen_by, result, session.facts(), took)
                del session  # before another one copies the keys and values
            del indexed


def _dense_tokens(protocol: str, question: int) -> int:
    """Return how many of a question's tokens are read densely."""
    return {"question": 0, "prefill": question - 1, "generate": question, FORCED: 0}[protocol]


def _answer(
    session: Session,
    fed: Sequence[int],
    prompt: Prompt,
    tokens: Tokens,
    ends: Collection[int],
    first: int | None = None,
) -> dict[str, Any]:
    """Greedy decoding until an end, the limit, or what `ending` says; `first` is the answer's token that is known."""
    assert prompt.example is not None
    ended = ending(prompt.example, prompt.thoughts_begun)
    token = int(session.feed(fed)[-1].argmax()) if first is None else first
    made: list[int] = []
    while True:
        if token in ends:
            break
        made.append(token)
        response = tokens.text(made)
        if len(made) == prompt.limit or ended(response):
            break
        token = int(session.feed([token])[-1].argmax())
    return scored(prompt.example, tokens.text(made), prompt.thoughts_begun)


def line_ended(response: str) -> bool:
    """Whether a response is whole: a line has ended behind some text."""
    return "\n" in response.lstrip()


def ending(example: Example, thoughts_begun: bool = False) -> Callable[[str], bool]:
    """Return what says whether a response so far is whole: `line_ended` of its answer (`answer_in`), or nothing where a
    benchmark lets responses go on."""
    return lambda response: example.one_line and line_ended(answer_in(response, thoughts_begun))


def scored(example: Example, response: str, thoughts_begun: bool = False) -> dict[str, Any]:
    """Return a response and the scores of the answer in it (`answer_in`), for a record."""
    answer = answer_in(response, thoughts_begun)
    if example.scoring in METRICS:
        value = metric_score(example.scoring, answer, example.answers, example.reference)
    else:
        value = score(example.scoring, answer, example.answers, example.others)
    return {
        "response": response,
        "answers": list(example.answers),
        "scoring": example.scoring,
        "score": value,
        "ruler": ruler(example.scoring, answer, example.answers),
    }
