"""What every task is made of: an example, distractors that fill a length, and seeded draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Count: TypeAlias = Callable[[str], int]  # tokens of a text, without the ones that a tokenizer puts around it
Filler: TypeAlias = Callable[[random.Random], Callable[[], str]]  # what makes sentences, one a call, from random draws


@dataclass(frozen=True)
class Chat:
    """How a prompt is put in a chat.

    Args:
        user: what stands in place of the question in the user's turn.
        begun: the beginning of the model's own turn, which it goes on with.
        before: turns before the user's, each a role and its content; they are the context then.
    """

    user: str
    begun: str = ""
    before: tuple[tuple[str, str], ...] = ()


OWN = Chat("")  # stands for "by the lead"


@dataclass(frozen=True)
class Example:
    """A prompt in two parts, and what a right response to it contains.

    Args:
        task: its name.
        context: the long part, always read at once.
        question: what follows the context; `context + question` is the prompt.
        answers: the right answers.
        scoring: a name in `scoring.SCORINGS`, or of a benchmark's metric in `metrics.registry.METRICS`.
        meta: length, depth, seed, or where it was read from.
        others: where several values are asked for, those of the same kind in the context that are not.
        lead: the end of the question that begins the answer, such as "The pass key is".
        limit: tokens of an answer at most; None: nobody says.
        own_limit: whether the line that it was read from says `limit`, and not its task.
        one_line: whether a response ends where a line with text does.
        chat: how it is put in a chat; None: a benchmark's prompt that is none; `OWN`: by `lead`.
        reference: what a benchmark's metric looks at besides the answers.
        fields: of the layout kvpress, the line that it was read from, without the context: its form of results has it.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    scoring: str
    meta: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    lead: str = ""
    limit: int | None = None
    own_limit: bool = False
    one_line: bool = True
    chat: Chat | None = OWN
    reference: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def turn(self) -> Chat | None:
        """How it is put in a chat; None: it never is. Without a form of its own the lead begins the model's turn."""
        if self.chat is not OWN:
            return self.chat
        if not self.lead:
            return Chat(self.question)
        return Chat(self.question[: -len(self.lead)].rstrip(), self.lead.lstrip())

    @property
    def target(self) -> str:
        """How the text goes on: all answers and a line's end. What a model can be trained to write."""
        glue = "" if self.question[-1:] in (":", "=") else " "
        return f"{glue}{', '.join(self.answers)}\n"


@dataclass(frozen=True)
class Draft:
    """A prompt whose length is open: `build(n)` is the context with n distractors, longer the larger n.

    Args:
        build: as said; the same beginning of the same distractors for every n.
        question: as of `Example`.
        answers: likewise.
        least: distractors without which the task means nothing.
        others: as of `Example`.
        lead: likewise.
    """

    build: Callable[[int], str]
    question: str
    answers: tuple[str, ...]
    least: int = 0
    others: tuple[str, ...] = ()
    lead: str = ""


@dataclass(frozen=True)
class Task:
    """A kind of synthetic prompt.

    Args:
        draft: makes a prompt from a depth (0 to 1), a generator of random numbers and a source of filler sentences.
        uses_depth: whether a needle lies at the depth; otherwise what is asked for is spread over the context.
        scoring: a name in `scoring.SCORINGS`.
    """

    draft: Callable[[float, random.Random, Filler], Draft]
    uses_depth: bool
    scoring: str


def byte_count(text: str) -> int:
    """Tokens of a text where bytes are tokens."""
    return len(text.encode())


def draws(*place: int | str) -> random.Random:
    """Random numbers of their own for every place, such as (task, seed)."""
    import torch

    from sparseattn.utils.hashing import stream

    return random.Random(int(torch.randint(2**62, (), generator=stream(*place))))


def fitting(build: Callable[[int], str], room: int, count: Count) -> int:
    """Return the number of distractors with which a context fills `room` tokens; -1 where not even none fits."""
    low, low_tokens = 0, count(build(0))
    if low_tokens > room:
        return -1
    high = 16
    while (high_tokens := count(build(high))) <= room:
        ahead = 1.02 * (high - low) * (room - low_tokens) / max(high_tokens - low_tokens, 1)
        low, low_tokens, high = high, high_tokens, max(low + int(ahead), high) + 8
    straight = True
    while high - low > 1:
        # By the line through both ends, which meets it soon: counting 128k tokens is slow; every other time by halves.
        share = (room - low_tokens) / (high_tokens - low_tokens) if straight else 0.5
        middle = min(max(low + round(share * (high - low)), low + 1), high - 1)
        tokens, straight = count(build(middle)), not straight
        if tokens <= room:
            low, low_tokens = middle, tokens
        else:
            high, high_tokens = middle, tokens
    return low


def cached(make: Callable[[], str]) -> Callable[[int], list[str]]:
    """Return the first n of what `make` makes one after the other, as a function of n."""
    made: list[str] = []

    def first(n: int) -> list[str]:
        while len(made) < n:
            made.append(make())
        return made[:n]

    return first


def distinct(make: Callable[[], str]) -> Callable[[], str]:
    """`make`, drawn again where it repeats itself."""
    seen: set[str] = set()

    def new() -> str:
        while (made := make()) in seen:
            pass
        seen.add(made)
        return made

    return new


def insert(distractors: list[str], needle: str, depth: float) -> list[str]:
    """`needle` among `distractors`: before all of them at depth 0, behind all at 1."""
    at = round(depth * len(distractors))
    return [*distractors[:at], needle, *distractors[at:]]


def digits(draw: random.Random, n: int) -> str:
    """Return a number of n digits, the first not 0."""
    return str(draw.randrange(10 ** (n - 1), 10**n))


def letters(draw: random.Random, n: int, alphabet: str = "abcdefghijklmnopqrstuvwxyz") -> str:
    return "".join(draw.choices(alphabet, k=n))
