"""How RULER fills a length: one number of distractors is searched for, and a prompt that is too long gets fewer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparseattn.evaluation.tasks.base import Count

TRIES = 100  # of the fewest distractors, at a length that does not hold them; RULER tries for ever
SHORT = 4096  # tokens below which RULER takes smaller steps and smaller examples


@dataclass(frozen=True)
class RulerPrompt:
    """A prompt: `context + question`.

    Args:
        context: what is read.
        question: what is asked, and the beginning of the answer.
        lead: that beginning alone.
        answers: the right ones.
        distractors: sentences, words or documents of the context, as RULER counts them.
    """

    context: str
    question: str
    lead: str
    answers: tuple[str, ...]
    distractors: int


@dataclass(frozen=True)
class Room:
    """The tokens that a prompt may have.

    Args:
        task: whose they are.
        length: of the prompt, of what a tokenizer puts around it, and of the answer.
        answer: of the answer.
        count: tokens of a text; context and question are counted apart, as they are fed.
        spare: tokens that a tokenizer or a chat template puts around a prompt.
    """

    task: str
    length: int
    answer: int
    count: Count
    spare: int = 0

    @property
    def short(self) -> bool:
        """Whether RULER takes its smaller steps."""
        return self.length < SHORT

    @property
    def most(self) -> int:
        """Tokens of prompt and answer."""
        return self.length - self.spare

    def tokens(self, drawn: RulerPrompt) -> int:
        """Of a prompt."""
        return self.count(drawn.context) + self.count(drawn.question)

    def too_short(self, tokens: int | None = None) -> ValueError:
        """Return the error of a length that holds no prompt; `tokens` of one as short as they come."""
        needed = "" if tokens is None else f": the shortest take about {tokens + self.answer + self.spare}"
        return ValueError(
            f"no prompt of {self.task} with {self.answer} tokens for its answer fits in a length of {self.length}"
            f"{needed}"
        )


def largest(draw: Callable[[int], RulerPrompt], room: Room, step: int, highest: int, used: int = 0) -> int:
    """Search, by halves, for the most distractors that fit; `step` where nothing fits.

    Every look draws a new prompt, so that an unlucky one may mislead the search. That is RULER's way.

    Args:
        draw: makes a prompt of so many distractors.
        room: what they must fit in.
        step: the fewest that are tried.
        highest: the most that are tried.
        used: tokens that something else takes.
    """
    low, high, best = step, max(highest, 2 * step), step
    while low <= high:
        middle = (low + high) // 2
        if room.tokens(draw(middle)) + used + room.answer <= room.most:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best


def fitted(
    draw: Callable[[int, int], RulerPrompt], room: Room, number: int, step: int, fewest: int = 1
) -> Iterator[RulerPrompt]:
    """Make prompts one after the other, without end; one that is too long is drawn again with `step` distractors fewer.

    Args:
        draw: makes a prompt of so many distractors; its second argument counts the prompts from 0.
        room: what they must fit in.
        number: of distractors to begin with.
        step: as said.
        fewest: distractors without which a prompt means nothing.

    Raises:
        ValueError: the length holds none.
    """
    for sample in itertools.count():
        now, tries = number, 0
        while True:
            if now < fewest:
                raise room.too_short()
            drawn = draw(now, sample)
            if (tokens := room.tokens(drawn)) + room.answer <= room.most:
                break
            if now > step:
                now -= step
            elif (tries := tries + 1) > TRIES:
                raise room.too_short(tokens)
        yield drawn
