"""RULER's variables: a chain of assignments in noise, behind an example that shows the answer's form."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from sparseattn.evaluation.ruler.room import Room, RulerPrompt, fitted, largest
from sparseattn.evaluation.ruler.templates import NOISE, VARIABLES

HOPS = 4  # assignments from a variable to the next
STEP, SHORT_STEP = 10, 5  # rounds of the noise
LETTERS, EXAMPLE_LETTERS = 5, 3  # of a variable
EXAMPLE_VALUE = "12345"
EXAMPLE_TOKENS = 500  # of the example at most


class Variables:
    """Draws prompts.

    Args:
        seed: of all prompts.

    Raises:
        ImportError: NumPy is missing, whose random numbers RULER's values are.
    """

    def __init__(self, seed: int) -> None:
        self.random, self._values = random.Random(seed), _numpy_random(seed)

    def prompts(self, room: Room) -> Iterator[RulerPrompt]:
        """Make prompts for a length, without end.

        Raises:
            ValueError: the length holds none.
        """
        shown = self._example(room)
        example = f"{shown.context}{shown.question} {' '.join(shown.answers)}\n"
        step = SHORT_STEP if room.short else STEP
        each = room.tokens(self.draw(step)) / step
        number = largest(self.draw, room, step, int(room.most / each * 3), room.count(example))

        def behind_example(n: int, sample: int) -> RulerPrompt:
            drawn = self.draw(n)
            return replace(drawn, context=f"{self._renamed(example)}\n{drawn.context}")

        yield from fitted(behind_example, room, number, step, fewest=HOPS + 1)

    def draw(self, n: int) -> RulerPrompt:
        """Return a prompt with n rounds of noise and no example."""
        return self._prompt(n, self._names(LETTERS), None)

    def _example(self, room: Room) -> RulerPrompt:
        """Return the prompt of `EXAMPLE_TOKENS` tokens, its answer not counted, that is shown with its answer.

        Raises:
            ValueError: the tokenizer makes more of the shortest.
        """
        small = replace(room, length=EXAMPLE_TOKENS, answer=0)

        def draw(n: int, sample: int = 0) -> RulerPrompt:
            return self._prompt(n, self._names(EXAMPLE_LETTERS), EXAMPLE_VALUE)

        each = small.tokens(draw(SHORT_STEP)) / SHORT_STEP
        number = largest(draw, small, SHORT_STEP, int(small.most / each * 3))
        try:
            return next(fitted(draw, small, number, SHORT_STEP, fewest=HOPS + 1))
        except ValueError:
            raise ValueError(
                f"no length holds a prompt of {room.task} with this tokenizer: RULER shows an example of at most "
                f"{EXAMPLE_TOKENS} tokens first, and the shortest takes about {round(each * SHORT_STEP) + room.spare}: "
                f"leave the task out, or use a model whose tokens are longer"
            ) from None

    def _names(self, letters: int) -> list[str]:
        names = [self._letters(letters) for _ in range(HOPS + 1)]
        while len(set(names)) < HOPS + 1:  # more are drawn, and the first are taken all the same
            names.append(self._letters(letters))
        return names[: HOPS + 1]

    def _letters(self, n: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=n))

    def _prompt(self, n: int, names: list[str], value: str | None) -> RulerPrompt:
        value = str(self._values.randint(10_000, 99_999)) if value is None else value
        lines = [f"VAR {names[0]} = {value}"]
        lines += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
        noise = [NOISE] * n
        for done, (place, line) in enumerate(zip(sorted(self.random.sample(range(n), len(lines))), lines, strict=True)):
            noise.insert(place + done, line)
        facts = {"query": value, "number": HOPS + 1}
        head, ask, lead = (words.format(**facts) for words in (VARIABLES.head, VARIABLES.ask, VARIABLES.lead))
        context = "\n".join(noise).replace(". \n", ".\n")
        return RulerPrompt(head + context, ask + lead, lead, tuple(names), n)

    def _renamed(self, example: str) -> str:
        """Return the example with other variables and another value."""
        for name in example.split()[-HOPS - 1 :]:
            example = example.replace(name, self._letters(len(name)))
        return example.replace(EXAMPLE_VALUE, str(self._values.randint(10_000, 99_999)))


def _numpy_random(seed: int) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise ImportError('RULER draws the values of variables with NumPy: pip install "sparseattn[ruler]"') from error
    return numpy.random.RandomState(seed)
