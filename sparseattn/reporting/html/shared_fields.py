"""Fields that the records of several kinds have, checked where a file of them is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparseattn.core.budget import Budget, parse_budget
from sparseattn.utils.json_fields import Either, Items, Kind, Maybe, Number, Object, Text, Values, refuse

NUMBER = Maybe(Number())  # null where there was none to measure
COUNT = Number(0, whole=True)
NAME = Text(empty=False)
HEADS = Items(NUMBER, 1)  # a number a head


class _Budget:
    """A budget as JSON holds it."""

    def check(self, value: Any, name: str) -> None:
        Maybe(Either((Text(), Number(0)), "is rows, a share of the context, a text or null")).check(value, name)
        try:
            given: Budget = value
            parse_budget(given)
        except ValueError:
            raise refuse(name, 'is a budget such as 64, 0.05, "5%", "mass:0.95" or "all"', value) from None


BUDGET: Kind = _Budget()
FACTS: Kind = Object()  # whatever is in it: what the last section of the page lists
MEANS = Values(NUMBER)
ORIGIN: dict[str, Kind] = {"versions": FACTS, "machine": FACTS, "trace_meta": FACTS}  # where a line has them


def models_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the models that the records' traces or settings name."""
    named = [
        part.get("model")
        for record in records
        for part in (record, record.get("settings", {}), record.get("trace_meta", {}))
    ]
    return list(dict.fromkeys(model for model in named if isinstance(model, str)))


def distinct(records: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return the values that a field has in records, in their order."""
    values = [record[name] for record in records if record.get(name) is not None]
    if wrong := [value for value in values if isinstance(value, (dict, list))]:
        raise ValueError(f"{name} of a record is a text or a number, got {wrong[0]!r:.80}")
    return list(dict.fromkeys(values))
