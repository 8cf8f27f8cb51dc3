"""RULER's frequent words: made-up words whose counts fall with the square of their rank, among dots."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator

from sparseattn.evaluation.ruler.room import Room, RulerPrompt
from sparseattn.evaluation.ruler.templates import FREQUENT_WORDS

LETTERS = 6  # of a word
DOTS = "..."  # in place of the most frequent word
ASKED = 3  # words
TOKENS_OF_A_WORD = 50  # of the length, for each word of the vocabulary
STEPS = 32  # of these a length has
ZETA = math.pi**2 / 6  # the sum of rank ** -2


class FrequentWords:
    """Draws prompts of one length.

    Args:
        seed: of all prompts.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, without end.

        Raises:
            ValueError: the length holds none.
        """
        most = room.most - room.answer
        words, step = most // TOKENS_OF_A_WORD, most // STEPS
        if words <= ASKED:
            raise room.too_short()
        vocabulary = self._vocabulary(words)
        number = most // LETTERS
        while room.tokens(self._prompt(vocabulary, number)) < most:
            number += step
        number -= step
        while True:
            vocabulary, now = self._vocabulary(words), number
            while room.tokens(drawn := self._prompt(vocabulary, now)) > most:
                now -= step
                if now <= 0:
                    raise room.too_short()
            yield drawn

    def _vocabulary(self, size: int) -> list[str]:
        """Words in the order of their frequency, `DOTS` first."""
        words = [self._word() for _ in range(size)]
        while len(set(words)) < size:
            words.append(self._word())
        distinct = sorted(set(words))
        random.Random(self.seed).shuffle(distinct)
        return [DOTS, *distinct[1:]]

    def _word(self) -> str:
        return "".join(self.random.choices(string.ascii_lowercase, k=LETTERS))

    def _prompt(self, vocabulary: list[str], number: int) -> RulerPrompt:
        text = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(number * rank**-2.0 / ZETA))]
        random.Random(self.seed).shuffle(text)
        head, ask, lead = FREQUENT_WORDS.head, FREQUENT_WORDS.ask, FREQUENT_WORDS.lead
        return RulerPrompt(head + " ".join(text), ask + lead, lead, tuple(vocabulary[1 : ASKED + 1]), number)
