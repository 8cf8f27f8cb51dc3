"""Groups of `eval`'s records: by method and budget, by task and length, and the means over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from sparseattn.evaluation.tasks.compared import FULL

Record: TypeAlias = "Mapping[str, Any]"
Row: TypeAlias = "tuple[str, str | None]"  # method, with its layers if not all, and budget

FULL_ROW: Row = (FULL, None)


def method_of(record: Record) -> str:
    """Return the method, and where it is not all of them, the layers in which it chooses."""
    return f"{record['method']}, layers {record['layers']}" if record.get("layers") else str(record["method"])


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Return methods and budgets in the order in which they were measured."""
    return list(dict.fromkeys((method_of(record), record["budget"]) for record in records))


def select(records: Sequence[Record], row: Row) -> list[Record]:
    """Return the records of one method and budget."""
    return [record for record in records if (method_of(record), record["budget"]) == row]


def in_words(row: Row) -> str:
    """Return a method and its budget, such as "Quest at budget 64"."""
    return row[0] if row[1] is None else f"{row[0]} at budget {row[1]}"


def by(records: Sequence[Record], field: str) -> dict[Any, list[Record]]:
    """Return records by the value of a field, in the order of its first occurrence."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(record[field], []).append(record)
    return groups


def by_column(records: Sequence[Record]) -> dict[tuple[str, int | None], list[Record]]:
    """Return records by task and length, in the order of their first; a user's own prompts have no length."""
    groups: dict[tuple[str, int | None], list[Record]] = {}
    for record in records:
        groups.setdefault((record["task"], record.get("length")), []).append(record)
    return groups


def mean(values: Iterable[float]) -> float:
    """Return the mean; NaN of nothing."""
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else math.nan


def mean_of(records: Iterable[Record], field: str) -> float:
    """Return the mean of a field; NaN of no record."""
    return mean(record[field] for record in records)


def known_mean(records: Sequence[Record], field: str) -> float | None:
    """Return the mean of a field; None where a record does not have it, or there is no record."""
    numbers = [record[field] for record in records if record.get(field) is not None]
    return mean(numbers) if numbers and len(numbers) == len(records) else None


def count_prompts(records: Iterable[Record]) -> int:
    """Return the number of different prompts."""
    return len({record["prompt"] for record in records})


def by_place(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return what a map of length and depth can show, by the map's name: tasks with needles at several places."""
    tasks = {
        f"{task}-{protocol}": of_task
        for protocol, of_protocol in by(records, "protocol").items()
        for task, of_task in by(of_protocol, "task").items()
    }
    placed = {name: [record for record in of_task if _place(record)] for name, of_task in tasks.items()}
    return {name: of_task for name, of_task in placed.items() if len({_place(record) for record in of_task}) > 1}


def _place(record: Record) -> tuple[int, float] | None:
    length, depth = record.get("length"), record.get("depth")
    return None if depth is None or length is None else (length, depth)
