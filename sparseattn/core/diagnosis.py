"""What settings make of each layer of a model: sparse from which row on and by which method, or why it is dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerDiagnosis:
    """What settings make of one layer, in a sequence of `rows_held` rows.

    Args:
        layer: its number.
        method: its method, or each with its number of heads; None where it is dense.
        budget: of it, as text; None where it has none.
        sparse_from: fewest rows of a sequence of which a query leaves some out; None where no length has them.
        rows_read: rows that a query reads at most, on average over heads.
        rows_held: rows of the sequence.
        why_dense: why no query leaves a row out, whatever the length; None where one does.
    """

    layer: int
    method: str | None
    budget: str | None
    sparse_from: int | None
    rows_read: float
    rows_held: int
    why_dense: str | None = None

    @property
    def active(self) -> bool:
        """Whether a query leaves rows out at this length by a method."""
        return self.method is not None and self.rows_read < self.rows_held


def nothing_active(lines: Sequence[LayerDiagnosis]) -> bool:
    """Return whether every query of every layer reads all that it would read of the model as it is."""
    return not any(line.active for line in lines)
