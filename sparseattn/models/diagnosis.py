"""What the settings of a `SparseCache` make of each layer of its model."""

from __future__ import annotations

from sparseattn.cache.rows_read import rows_read, sparse_from
from sparseattn.core.budget import budget_label
from sparseattn.core.diagnosis import LayerDiagnosis
from sparseattn.models.sparse_cache import SparseCache
from sparseattn.models.sparse_heads import SparseHeads
from sparseattn.models.sparse_layer import SparseLayer
from sparseattn.models.transformers_classes import DynamicLayer


def diagnosed(cache: SparseCache, length: int) -> list[LayerDiagnosis]:
    """Return a line for each layer of the model of a cache, for a sequence of `length` rows.

    Rows are those of the settings, see `rows_read`: nothing is run.
    """
    return [
        _sparse(index, layer, length) if isinstance(layer, SparseLayer) else _dense(cache, index, layer, length)
        for index, layer in enumerate(cache.layers)
    ]


def _sparse(index: int, layer: SparseLayer, length: int) -> LayerDiagnosis:
    parts = layer.parts
    weights = [1 if part.share.heads is None else len(part.share.heads.which) for part in parts]
    read = sum(w * _read(part, length) for w, part in zip(weights, parts, strict=True)) / sum(weights)
    begins = [begin for part in parts if (begin := _begins(part)) is not None]
    budgets = dict.fromkeys(budget_label(part.budget) for part in parts if part.rows.selector.uses_budget)
    return LayerDiagnosis(
        index,
        layer.label,
        ", ".join(budgets) or None,
        min(begins, default=None),
        read,
        length,
        None if begins else "its budget is every row",
    )


def _read(part: SparseHeads, length: int) -> int:
    rows = part.rows
    return rows_read(rows.selector, part.budget, length, rows.sink, rows.window + rows.rollback, rows.unit)


def _begins(part: SparseHeads) -> int | None:
    rows = part.rows
    return sparse_from(rows.selector, part.budget, rows.sink, rows.window + rows.rollback, rows.unit)


def _dense(cache: SparseCache, index: int, layer: object, length: int) -> LayerDiagnosis:
    prepared = cache.prepared.layers.get(index)
    window = getattr(layer, "sliding_window", None) or (prepared.window if prepared is not None else None)
    read = length if window is None else min(length, int(window))
    if window is not None:
        why = f"it attends to a sliding window of {window:,} rows"
    elif type(layer) is not DynamicLayer:
        why = "it has no cache of keys and values over the whole context"
    elif cache.roles is not None and cache.roles.dense(index):
        why = "its role is dense"
    else:
        why = "--dense-layers leaves it dense"
    return LayerDiagnosis(index, None, None, None, read, length, why)
