"""The sentences of a text by Punkt, as NLTK's `sent_tokenize` finds them (extra `ruler`)."""

from __future__ import annotations

from collections.abc import Sequence


class Sentences:
    """The sentences of a text's first words, which begin anew behind the last.

    Args:
        words: of the text, one or more.

    Raises:
        ImportError: Punkt is missing.
    """

    def __init__(self, words: Sequence[str]) -> None:
        try:
            import punkt
        except ImportError as error:
            raise ImportError(
                'RULER hides needles between the sentences that Punkt finds: pip install "sparseattn[ruler]"'
            ) from error
        self._split = punkt.tokenizer_for("english").tokenize
        self._words = list(words)
        self._last: tuple[int, list[str]] = (0, [])

    def of_words(self, n: int) -> list[str]:
        """Return the sentences of the first n words; those of the last n are kept."""
        if self._last[0] != n:
            rounds = -(-n // len(self._words))
            text = " ".join((self._words * rounds)[:n])
            self._last = (n, list(self._split(text.strip())))
        return self._last[1]
