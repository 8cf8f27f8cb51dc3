"""Evaluations as tensors and JSON, to the last bit: what one process has measured and another one shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparseattn.core.activity import Activity
from sparseattn.core.budget import budget_record, parse_budget
from sparseattn.evaluation.result import Evaluation


def written(results: Sequence[Evaluation]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return what is said of each, and the measures of all."""
    said = [
        {
            "trace": one.trace,
            "selector": one.selector,
            "label": one.label,
            "budget": budget_record(one.budget),
            "settings": one.settings,
            "layers": list(one.layers),
            "measures": [list(one.heads), list(one.steps)],
            "activity": None if one.activity is None else one.activity.to_dict(),
        }
        for one in results
    ]
    tensors = {f"{i}/heads/{name}": part for i, one in enumerate(results) for name, part in one.heads.items()}
    tensors |= {f"{i}/steps/{name}": part for i, one in enumerate(results) for name, part in one.steps.items()}
    return said, tensors


def read(said: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[Evaluation]:
    """Return what `written` gave.

    Raises:
        ValueError: fields or measures are missing.
    """
    try:
        return [
            Evaluation(
                one["trace"],
                one["selector"],
                one["label"],
                parse_budget(one["budget"]),
                dict(one["settings"]),
                tuple(one["layers"]),
                {name: tensors[f"{i}/heads/{name}"] for name in one["measures"][0]},
                {name: tensors[f"{i}/steps/{name}"] for name in one["measures"][1]},
                None if one["activity"] is None else Activity.from_dict(one["activity"]),
            )
            for i, one in enumerate(said)
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"an item of a run lacks {error}") from error
