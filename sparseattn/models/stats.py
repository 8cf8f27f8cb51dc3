"""Counts of what ran in a model with a `SparseCache`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerStats:
    """What ran in one layer.

    Args:
        layer: its number.
        selector: label of the selector, or of each with how many heads it has, None for a layer that stays as it is.
        sparse_calls: tokens decoded sparsely (of all sequences of a batch at once).
        dense_calls: attention calls over all rows: one for each forward pass with tokens to prefill.
        rows: rows attended by a query head in a sparse call, sink and window included; mean over calls and heads.
        context: rows stored at a sparse call, mean over calls.
        bytes_share: bytes read to choose and to attend over bytes stored, mean over calls and KV heads; NaN where the
            cache was made without `check=True`, or where the selector does not say what it reads.
    """

    layer: int
    selector: str | None
    sparse_calls: int
    dense_calls: int
    rows: float
    context: float
    bytes_share: float = math.nan


@dataclass(frozen=True)
class Stats:
    """What ran in a model, by layer and in total; `print` shows it in one line.

    Args:
        protocol: how prompts were fed, see `SparseCache.protocol`.
        layers: one entry per layer, including layers that keep the model's own attention.
    """

    protocol: str
    layers: tuple[LayerStats, ...]

    @property
    def sparse_calls(self) -> int:
        """Attention calls that were sparse, summed over layers."""
        return sum(layer.sparse_calls for layer in self.layers)

    @property
    def dense_calls(self) -> int:
        """Attention calls that were dense, summed over layers."""
        return sum(layer.dense_calls for layer in self.layers)

    @property
    def rows(self) -> float:
        """Rows attended by a query head in a sparse call, mean over all sparse calls; 0 without any."""
        return sum(layer.rows * layer.sparse_calls for layer in self.layers) / max(self.sparse_calls, 1)

    @property
    def context(self) -> float:
        """Rows stored at a sparse call, mean over all sparse calls; 0 without any."""
        return sum(layer.context * layer.sparse_calls for layer in self.layers) / max(self.sparse_calls, 1)

    @property
    def bytes_share(self) -> float:
        """Bytes read over bytes stored, mean over all sparse calls (see `LayerStats`); NaN where one is not known."""
        sparse = [layer for layer in self.layers if layer.sparse_calls]
        total = sum(layer.bytes_share * layer.sparse_calls for layer in sparse)
        return total / self.sparse_calls if sparse else math.nan

    @classmethod
    def of_heads(cls, parts: Sequence[Stats]) -> Stats:
        """Return the counts of a model from those of equal parts of its heads: their means."""
        layers = [_over_heads(of_layer) for of_layer in zip(*(part.layers for part in parts), strict=True)]
        return cls(parts[0].protocol, tuple(layers))

    def __str__(self) -> str:
        share = self.rows / self.context if self.context else 0.0
        return (
            f"{self.sparse_calls} sparse attention calls, {self.rows:.1f} of {self.context:.1f} rows read "
            f"({100 * share:.1f} %); {self.dense_calls} dense ones; prompt {self.protocol}"
        )


def _over_heads(parts: Sequence[LayerStats]) -> LayerStats:
    rows, share = (sum(getattr(part, name) for part in parts) / len(parts) for name in ("rows", "bytes_share"))
    return replace(parts[0], rows=rows, bytes_share=share)
