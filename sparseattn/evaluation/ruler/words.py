"""The words that RULER draws from: the lists of wonderwords, and its names of an adjective and a noun, sorted."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from sparseattn.traces.texts import NamedText, read
from sparseattn.utils.pypi_wheels import Progress

# RULER pins no version. 2.2.0 was the last when it appeared; 3.0.1 has four nouns fewer, so that all else differs too.
LISTS = NamedText(
    "wonderwords",
    "word lists",
    "d2d3183f9469fb4c2283764f86781e3e7f2e22b0c85bb8864b15a4efbce05a60",
    "MIT",
    "wonderwords 2.2.0, its adjectives, nouns and verbs",
    ("wonderwords", "2.2.0", 44_970),
    "wonderwords/assets/[anv]*list.txt",
)


@dataclass(frozen=True, eq=False)
class WordLists:
    """Adjectives, nouns and verbs, in the order of their files."""

    adjectives: Sequence[str]
    nouns: Sequence[str]
    verbs: Sequence[str]

    @classmethod
    def read(cls, progress: Progress | None = None) -> WordLists:
        """Read the lists of wonderwords, fetched on first use.

        Raises:
            FetchError: they are not here, and there is no network.
            OSError: the cache folder cannot be written.
            ValueError: another process is fetching them, or a file that is not the pinned one.
        """
        parts = read(LISTS, progress).rstrip("\n").split("\n\n")
        return cls(*([word.rstrip() for word in part.split("\n")] for part in parts))

    @functools.cached_property
    def names(self) -> Names:
        """Every adjective with every noun."""
        return Names(self.adjectives, self.nouns)

    @functools.cached_property
    def all(self) -> list[str]:
        """Each word once, sorted."""
        return sorted({*self.adjectives, *self.nouns, *self.verbs})


class Names(Sequence[str]):
    """Each `adjective-noun` once, sorted, without making the six million strings.

    Names of an adjective lie together, but where `blue-` begins `blue-eyed-` too: names of such adjectives are made.
    """

    def __init__(self, adjectives: Sequence[str], nouns: Sequence[str]) -> None:
        self._nouns = sorted(set(nouns))
        self._groups = [group if len(group) > 1 else group[0] for group in _related(adjectives)]
        self._made = {place: self._mixed(group) for place, group in enumerate(self._groups) if isinstance(group, list)}
        sizes = (len(self._made.get(place, self._nouns)) for place in range(len(self._groups)))
        self._ends = list(accumulate(sizes))

    def _mixed(self, adjectives: Sequence[str]) -> list[str]:
        return sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in self._nouns})

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} names, got the index {index}")
        place = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[place - 1] if place else 0)
        if place in self._made:
            return self._made[place][within]
        return f"{self._groups[place]}-{self._nouns[within]}"


def _related(adjectives: Sequence[str]) -> Iterator[list[str]]:
    """Return the adjectives sorted by what they begin a name with, those that begin another's together."""
    group: list[str] = []
    for adjective in sorted(set(adjectives), key=lambda word: f"{word}-"):
        if group and f"{adjective}-".startswith(f"{group[0]}-"):
            group.append(adjective)
            continue
        if group:
            yield group
        group = [adjective]
    if group:
        yield group
