"""RULER's needles in a haystack: keys and their values in noise, in a text, or among others of their form."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterator, Sequence

from sparseattn.evaluation.ruler.room import Room, RulerPrompt, fitted, largest
from sparseattn.evaluation.ruler.sentences import Sentences
from sparseattn.evaluation.ruler.templates import NEEDLE, NEEDLES, NOISE, ONE, Hidden
from sparseattn.evaluation.ruler.words import Names

PLACES = [round(100 * i / 39) for i in range(40)]  # in percent of a text's sentences: where a needle may lie
STEPS = {"essay": 500, "noise": 25, "needle": 25}  # words of a text, or lines
SHORT_STEP = 5  # lines


class Needles:
    """Draws prompts of one task.

    Args:
        hidden: its settings.
        seed: of all its prompts.
        names: the words that keys are drawn from.
        text: that needles are hidden in, where the haystack is "essay".
    """

    def __init__(self, hidden: Hidden, seed: int, names: Names, text: str = "") -> None:
        self.hidden, self.seed, self.names = hidden, seed, names
        self.random = random.Random(seed)
        self.text = Sentences(re.sub(r"\s+", " ", text).split(" ")) if hidden.haystack == "essay" else None

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, without end.

        Raises:
            ValueError: the length holds none.
        """
        haystack = self.hidden.haystack
        step = SHORT_STEP if room.short and haystack != "essay" else STEPS[haystack]
        each = room.tokens(self.draw(step)) / step
        number = largest(self.draw, room, step, int(room.most / each * 3))
        yield from fitted(lambda n, _: self.draw(n), room, number, step)

    def draw(self, n: int) -> RulerPrompt:
        """Return a prompt with a haystack of n words or lines."""
        hidden = self.hidden
        keys, values, needles = [], [], []
        for _ in range(hidden.named):
            keys.append(self._one_of(hidden.keys))
            values.append([self._one_of(hidden.values) for _ in range(hidden.each)])
            needles += [NEEDLE.format(kind=hidden.values, key=keys[-1], value=value) for value in values[-1]]
        random.Random(self.seed).shuffle(needles)
        context = self._in_text(n, needles) if self.text is not None else self._in_lines(n, needles)
        chosen = self.random.sample(range(hidden.named), hidden.asked)
        *before, last = (keys[i] for i in chosen)
        query = f"{', '.join(before)}, and {last}" if before else last
        answers = tuple(value for i in chosen for value in values[i])
        head, ask, lead = (words.format(kind=self._kind, query=query) for words in self._words)
        return RulerPrompt(head + context, ask + lead, lead, answers, n)

    @property
    def _single(self) -> bool:
        return self.hidden.asked * self.hidden.each == 1

    @property
    def _kind(self) -> str:
        return self.hidden.values[:-1] if self._single else self.hidden.values

    @property
    def _words(self) -> list[str]:
        """Head, question and lead, of one answer or of several."""
        words = [NEEDLES.head, NEEDLES.ask, NEEDLES.lead]
        for several, single in ONE if self._single else ():
            words = [part.replace(several, single) for part in words]
        return words

    def _one_of(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.random.randint(10**6, 10**7 - 1))
        if kind == "words":
            return self.random.choice(self.names)
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def _in_text(self, n: int, needles: Sequence[str]) -> str:
        assert self.text is not None
        sentences = self.text.of_words(n)
        places = sorted(int(len(sentences) * (place / 100)) for place in self.random.sample(PLACES, len(needles)))
        parts, done = [], 0
        for place, needle in zip(places, needles, strict=True):
            parts += [" ".join(sentences[done:place]), needle]
            done = place
        return " ".join([*parts, " ".join(sentences[done:])])

    def _in_lines(self, n: int, needles: Sequence[str]) -> str:
        if self.hidden.haystack == "noise":
            lines = [NOISE] * n
        else:
            lines = [self._distractor() for _ in range(n)]
        places = sorted(self.random.sample(range(n), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _distractor(self) -> str:
        key = self._one_of(self.hidden.keys)
        return NEEDLE.format(kind=self.hidden.values, key=key, value=self._one_of(self.hidden.values))
