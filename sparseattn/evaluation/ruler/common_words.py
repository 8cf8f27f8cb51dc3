"""RULER's common words: ten words of a numbered list recur more often than the others, behind an example."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sparseattn.evaluation.ruler.room import Room, RulerPrompt, fitted, largest
from sparseattn.evaluation.ruler.templates import COMMON_WORDS

ASKED = 10  # words
STEP = 10  # words
LOOK = 4096  # words of the list by which the tokens of a word are estimated
# Times that a common word stands in the list, and any other; of the example its words before that.
REPEATS, EXAMPLE = (30, 3), (40, 10, 3)
SHORT_REPEATS, SHORT_EXAMPLE = (6, 1), (20, 3, 1)


class CommonWords:
    """Draws prompts.

    Args:
        seed: of all prompts.
        words: each once, sorted.
        more: words for lists that need more than `words`.
    """

    def __init__(self, seed: int, words: Sequence[str], more: Sequence[str] = ()) -> None:
        self.seed, self.random, self.more = seed, random.Random(seed), more
        self.words = list(words)
        random.Random(seed).shuffle(self.words)

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, without end.

        Raises:
            ValueError: the length holds none, or needs more words than there are.
        """

        def draw(n: int, sample: int = 0) -> RulerPrompt:
            return self.draw(n, room.short)

        each = room.tokens(draw(LOOK)) / LOOK
        number = largest(draw, room, STEP, int(room.most // each) * 2)
        yield from fitted(draw, room, number, STEP, fewest=ASKED)

    def draw(self, n: int, short: bool) -> RulerPrompt:
        """Return a prompt with a list of n words, those that recur counted once."""
        shown, *repeats = SHORT_EXAMPLE if short else EXAMPLE
        context, answers = self._listed(shown, *repeats)
        example = self._prompt(context, answers, shown)
        context, answers = self._listed(n, *(SHORT_REPEATS if short else REPEATS))
        question = self._prompt(context, answers, n)
        before = f"{example.context}{example.question} {_numbered(example.answers)}\n"
        return replace(question, context=before + question.context)

    def _prompt(self, context: str, answers: Sequence[str], n: int) -> RulerPrompt:
        head, ask, lead = COMMON_WORDS.head, COMMON_WORDS.ask, COMMON_WORDS.lead
        return RulerPrompt(head + context, ask + lead, lead, tuple(answers), n)

    def _listed(self, n: int, often: int, seldom: int) -> tuple[str, list[str]]:
        """Return a numbered list, and the words that are `often` in it."""
        source = self.words if n <= len(self.words) else self.more
        if n > len(source):
            raise ValueError(
                f"a list of {n} words is drawn, and there are {max(len(self.words), len(source))}: it needs a file of "
                "more words, RULER's is english_words.json of its repository"
            )
        drawn = self.random.sample(source, n)
        listed = drawn[:ASKED] * often + drawn[ASKED:] * seldom
        random.Random(self.seed).shuffle(listed)
        return _numbered(listed), drawn[:ASKED]


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
