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
            "trace": result.trace,
            "selector": result.selector,
            "label": result.label,
            "budget": budget_record(result.budget),
            "settings": result.settings,
            "layers": list(result.layers),
            "measures": [list(result.heads), list(result.steps)],
            "activity": None if result.activity is None else result.activity.to_dict(),
        }
        for result in results
    ]
    tensors = {f"{i}/heads/{name}": part for i, result in enumerate(results) for name, part in result.heads.items()}
    tensors |= {f"{i}/steps/{name}": part for i, result in enumerate(results) for name, part in result.steps.items()}
    return said, tensors


def read(said: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> list[Evaluation]:
    """Return what `written` gave.

    Raises:
        ValueError: fields or measures are missing.
    """
    try:
        return [
            Evaluation(
                facts["trace"],
                facts["selector"],
                facts["label"],
                parse_budget(facts["budget"]),
                dict(facts["settings"]),
                tuple(facts["layers"]),
                {name: tensors[f"{i}/heads/{name}"] for name in facts["measures"][0]},
                {name: tensors[f"{i}/steps/{name}"] for name in facts["measures"][1]},
                None if facts["activity"] is None else Activity.from_dict(facts["activity"]),
            )
            for i, facts in enumerate(said)
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"an item of a run lacks {error}") from error
