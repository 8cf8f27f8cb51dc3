"""Text in which needles are hidden: sentences made up from a small vocabulary, or those of a text of the user's."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from sparseattn.evaluation.tasks.base import Filler


def _listed(words: str) -> list[str]:
    return words.split()


# Needles share none of these words but in names such as "old-ferry"; "is" and digits occur in needles alone.
ADJECTIVES = _listed(
    "old new quiet loud green grey warm cold wide narrow early late gentle rough bright pale small tall heavy "
    "light slow quick empty busy plain round steep dry damp young"
)
NOUNS = _listed(
    "river garden window street market bridge forest letter teacher farmer sailor kitchen village harbour mountain "
    "meadow painter baker engine station library hammer blanket candle basket orchard valley tower ferry lantern "
    "neighbour carpenter shepherd cousin island stable wagon cellar chimney ladder"
)
VERBS = _listed(
    "passed crossed watched followed carried painted repaired opened closed reached visited left described measured "
    "cleaned remembered noticed avoided admired mentioned sketched counted covered heard"
)
TIMES = ("in the morning", "at noon", "after the rain", "before winter", "every day", "once again", "near the coast")


def made_up(draw: random.Random) -> Callable[[], str]:
    """Sentences such as "The old ferry passed the quiet harbour at noon." """

    def sentence() -> str:
        subject, thing = draw.choice(NOUNS), draw.choice(NOUNS)
        text = f"The {draw.choice(ADJECTIVES)} {subject} {draw.choice(VERBS)} the {draw.choice(ADJECTIVES)} {thing}"
        return f"{text} {draw.choice(TIMES)}." if draw.random() < 0.5 else f"{text}."

    return sentence


def from_text(text: str) -> Filler:
    """Return a source of the sentences of `text`, in their order, from a random one on and around.

    Raises:
        ValueError: no sentence in it.
    """
    sentences = [" ".join(part.split()) for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    sentences = [sentence for sentence in sentences if sentence]
    if not sentences:
        raise ValueError("the filler text holds no sentence")

    def source(draw: random.Random) -> Callable[[], str]:
        at = draw.randrange(len(sentences))

        def sentence() -> str:
            nonlocal at
            at += 1
            return sentences[(at - 1) % len(sentences)]

        return sentence

    return source
