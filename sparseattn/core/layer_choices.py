"""What some layers of a model choose at a step, for layers behind them to read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from sparseattn.core.selection import Selection


@dataclass(frozen=True, eq=False)
class Choice:
    """What an anchor chose at a step.

    Args:
        selection: of all of its layer's heads.
        budget: rows that it was allowed.
        rows: rows that it had been shown, padding included.
    """

    selection: Selection
    budget: int
    rows: int


class Board:
    """One for the layers of a model that run one after another: who chooses for others leaves it here.

    Attributes:
        step: of which step `put` and `get` speak. A forward pass may take several tokens through a layer before the
            next layer runs, so there are choices of several steps at a time.
    """

    def __init__(self) -> None:
        self.step: Hashable = None
        self._choices: dict[int, dict[Hashable, Choice]] = {}

    def put(self, layer: int, choice: Choice) -> None:
        """Return what a layer chose at this step."""
        self._choices.setdefault(layer, {})[self.step] = choice

    def get(self, layer: int) -> Choice | None:
        """Return what a layer chose at this step; None if it did not."""
        return self._choices.get(layer, {}).get(self.step)

    def __contains__(self, layer: int) -> bool:
        """Whether the layer chose for others at any step."""
        return layer in self._choices

    def clear(self) -> None:
        """Forgets every step, before other ones of the same names."""
        self._choices.clear()
