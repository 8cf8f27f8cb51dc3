"""Records as rows: what a table or a reference takes its columns from."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.memory import PLAIN
from scripts.evidence import condensing, derived, labels
from scripts.evidence.markdown import linked
from scripts.evidence.step import REPORTED, RESULTS
from scripts.evidence.systems import systems
from sparseattn.selectors.methods import METHODS

Record: TypeAlias = "Mapping[str, Any]"
Load: TypeAlias = "Callable[[str], Record]"
Row: TypeAlias = "dict[str, Any]"

# Where the measurements of a record lie that is not condensed: the first of these that it has.
PATHS = (
    *("results.selectors", "results", "lengths.ways", "sweeps.points", "points", "decode", "lines", "problems"),
    "table",
)
REGISTRY = "registry"  # a record that no step makes: the rows of `sparseattn.selectors.methods`
SYSTEMS = "systems"  # a record that no step makes: those of `scripts.evidence.systems`
METHOD = ("label", "method", "selector", "name")  # columns that may say which method a row is of


def loader(results: Path = RESULTS, reported: Path = REPORTED) -> Load:
    """Reads a record by its name: of a step, one that somebody else reported, or the registry of methods.

    Raises of it:
        LookupError: there is no such record yet.
    """

    @functools.cache
    def load(name: str) -> Record:
        if name == REGISTRY:
            return {"results": registered(load("memory"))}
        if name == SYSTEMS:
            return {"results": systems()}
        path = results / f"{name}.json"
        if (theirs := reported / path.name).exists():
            path = theirs
        if not path.exists():
            raise LookupError(f"there is no record {path.name} in {results}: python -m scripts.evidence --only {name}")
        record: Record = labels.relabelled(json.loads(path.read_text()))
        return record

    return load


def registered(memory: Record) -> list[Row]:
    """The methods of the package by family, each with what `benchmarks.memory` measured of it, if it did."""
    measures = {row["method"]: row for row in measured(memory)}
    found = []
    for name, method in METHODS.items():
        about = importlib.import_module(f"sparseattn.selectors.{method.family}").__doc__ or ""
        own = {"family": method.family, "about": about.partition("\n")[0], "kind": method.kind}
        own["link"] = f"[`{name}`](#{method.section or name})"
        row = {**method._asdict(), **own, "method": name, "paper": linked(method.paper)}
        found.append({**measures.get(PLAIN.get(name, name), {}), **row})
    return found


@functools.lru_cache(maxsize=64)
def read(load: Load, name: str, frame: str = "") -> list[Row]:
    """`rows` of a record by its name; who reads them does not change them."""
    return rows(name, load(name), frame)


def rows(name: str, record: Record, frame: str = "") -> list[Row]:
    """The rows of a record, each with its name as the column `record`.

    Args:
        name, record: of a step.
        frame: a function of `derived.py`, or a path to lists or objects within the record; by default its measurements.
    """
    if frame in derived.FRAMES:
        found = derived.FRAMES[frame](record, measured(record))
    elif frame:
        found = list(condensing.exploded(record, frame.split(".")))
    else:
        found = measured(record)
    return [{"record": name, "typed": typed(row), **row} for row in found]


def typed(row: Row) -> str:
    """The method of a row in the fewest words that any column has for it, without artefacts."""
    names = [labels.shown(str(row[name])) for name in METHOD if row.get(name) is not None]
    return min(names, key=len, default="")


def measured(record: Record) -> list[Row]:
    """The measurements of a record."""
    if "columns" in record:
        shared = condensing.flattened({key: record[key] for key in ("machine", "seconds", "date") if key in record})
        return _budgets([{**shared, **row} for row in condensing.rows(record)])
    every = (list(condensing.exploded(record, path.split("."))) for path in PATHS)
    found = next((rows for rows in every if rows), None) or list(condensing.exploded(record, ()))
    return [_dense(row) for row in found]


def _budgets(found: list[Row]) -> list[Row]:
    """With `at`, the budget where a method looks at it, as a number where it is one."""
    budgets: dict[Any, set[Any]] = {}
    for row in found:
        budget = row.get("budget")
        row["budget"] = int(budget) if isinstance(budget, str) and budget.isdigit() else budget
        budgets.setdefault((row.get("label"), row.get("trace")), set()).add(row["budget"])
    for row in found:
        looks = row.get("label") is None or len(budgets[row["label"], row.get("trace")]) > 1
        row["at"] = row["budget"] if looks else None
    return found


def _dense(row: Row) -> Row:
    """With the seconds of the dense way that a step is compared with."""
    seconds = row.get(f"seconds.dense:{row.get('dense')}.median")
    return row if seconds is None else {**row, "dense_seconds": seconds}
