"""Recall curves as tensors and JSON, to the last bit: what one process has measured and another one shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sparseattn.evaluation.recall_curve import Curve, Point


def written(curves: Mapping[str, Curve]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what is said of the curve of each task, and the measures of all their points."""
    said: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for number, (task, curve) in enumerate(curves.items()):
        points = [
            {"value": point.value, "selector": point.selector, "seconds": point.seconds} for point in curve.points
        ]
        said[task] = {
            "selector": curve.selector,
            "knob": curve.knob,
            "settings": curve.settings,
            "build_seconds": curve.build_seconds,
            "index_bytes": curve.index_bytes,
            "points": points,
        }
        for place, point in enumerate(curve.points):
            tensors |= {f"{number}/{place}/{name}": part for name, part in point.heads.items()}
    return said, tensors


def read(said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Curve]:
    """Return what `written` gave.

    Raises:
        ValueError: fields or measures are missing.
    """
    try:
        return {
            task: Curve(
                curve["selector"],
                curve["knob"],
                dict(curve["settings"]),
                tuple(
                    Point(point["value"], point["selector"], _of(f"{number}/{place}/", tensors), point["seconds"])
                    for place, point in enumerate(curve["points"])
                ),
                curve["build_seconds"],
                curve["index_bytes"],
            )
            for number, (task, curve) in enumerate(said.items())
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"an item of a run lacks {error}") from error


def _of(place: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(place): part for name, part in tensors.items() if name.startswith(place)}
