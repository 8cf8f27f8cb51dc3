"""What attention did, counted: steps sparse and dense, rows and bytes read and held, by layer.

`SparseCache.activity()`, vLLM's plug-in and the server's `/metrics` count the same fields, and every record of a
command carries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class LayerActivity:
    """Counts of one layer, or of several added up.

    Args:
        sparse_steps: tokens of a sequence that were decoded sparsely.
        dense_steps: attention calls in which tokens attended to every row: a prefill is one, whatever its length.
        rows_read: rows that a query head attended to in sparse steps, sink and window included; mean over heads.
        rows_held: rows that full attention would have read in the same steps, likewise.
        bytes_read: bytes that all heads read in sparse steps, to choose and to attend; None where nobody counted them,
            as in a `SparseCache` without `check=True`.
        bytes_held: bytes that full attention would have read of rows as they came.
        entries_made: entries of an index by page that were computed, in vLLM; elsewhere an index is not made by entry.
    """

    sparse_steps: int = 0
    dense_steps: int = 0
    rows_read: int = 0
    rows_held: int = 0
    bytes_read: int | None = 0
    bytes_held: int = 0
    entries_made: int = 0

    @property
    def share(self) -> float:
        """Rows read over rows held; 0 without a sparse step."""
        return self.rows_read / self.rows_held if self.rows_held else 0.0

    def __add__(self, other: LayerActivity) -> LayerActivity:
        return self._joined(other, 1)

    def __sub__(self, other: LayerActivity) -> LayerActivity:
        """Return what came since `other`."""
        return self._joined(other, -1)

    def _joined(self, other: LayerActivity, sign: int) -> LayerActivity:
        joined: dict[str, Any] = {}
        for name in NAMES:
            mine, theirs = getattr(self, name), getattr(other, name)
            joined[name] = None if mine is None or theirs is None else mine + sign * theirs
        return LayerActivity(**joined)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as records have them."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(part.name for part in fields(LayerActivity))


@dataclass(frozen=True)
class Activity:
    """Counts by layer.

    Args:
        layers: of each layer by its number; layers that attend to a sliding window may be missing.
    """

    layers: Mapping[int, LayerActivity] = field(default_factory=dict)

    @property
    def total(self) -> LayerActivity:
        """All layers added up."""
        return sum(self.layers.values(), LayerActivity())

    @property
    def sparse_steps(self) -> int:
        """Tokens decoded sparsely, times layers."""
        return self.total.sparse_steps

    @property
    def dense_steps(self) -> int:
        """Dense attention calls, of all layers."""
        return self.total.dense_steps

    @property
    def rows_read(self) -> int:
        """Rows that a query head read in sparse steps, of all layers."""
        return self.total.rows_read

    @property
    def rows_held(self) -> int:
        """Rows that full attention would have read in the same steps."""
        return self.total.rows_held

    @property
    def share(self) -> float:
        """Rows read over rows held; 0 without a sparse step."""
        return self.total.share

    @property
    def sparse_layers(self) -> list[int]:
        """The layers that took a sparse step."""
        return [layer for layer, counts in self.layers.items() if counts.sparse_steps]

    def __add__(self, other: Activity) -> Activity:
        return self._joined(other, LayerActivity.__add__)

    def __sub__(self, other: Activity) -> Activity:
        """Return what came since `other`."""
        return self._joined(other, LayerActivity.__sub__)

    def _joined(self, other: Activity, join: Any) -> Activity:
        none = LayerActivity()
        every = sorted({*self.layers, *other.layers})
        return Activity({i: join(self.layers.get(i, none), other.layers.get(i, none)) for i in every})

    def to_dict(self) -> dict[str, Any]:
        """Return the totals, and `by_layer`, as records have them: number of the layer, as text -> its fields."""
        return {
            **self.total.to_dict(),
            "by_layer": {str(layer): counts.to_dict() for layer, counts in self.layers.items()},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Activity:
        """Return what `to_dict` wrote."""
        return cls({int(layer): LayerActivity(**counts) for layer, counts in record["by_layer"].items()})

    def __str__(self) -> str:
        total = self.total
        return (
            f"{total.sparse_steps:,} sparse steps in {len(self.sparse_layers)} of {len(self.layers)} layers, "
            f"{100 * total.share:.1f} % of their rows read; {total.dense_steps:,} dense ones"
        )


def of_heads(parts: Sequence[Activity]) -> Activity:
    """Return the counts of a model from those of equal parts of its heads: bytes are added up, rows are their mean."""
    whole, first = added(parts), parts[0]
    joined = {i: _over_heads(counts, whole.layers[i], len(parts)) for i, counts in first.layers.items()}
    return Activity(joined)


def _over_heads(head: LayerActivity, whole: LayerActivity, parts: int) -> LayerActivity:
    read = round(whole.rows_read / parts)
    return replace(head, rows_read=read, bytes_read=whole.bytes_read, bytes_held=whole.bytes_held)


def added(counts: Iterable[Activity]) -> Activity:
    """Return the sum."""
    return sum(counts, Activity())
