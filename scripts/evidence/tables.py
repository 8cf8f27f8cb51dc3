"""Tables of documents, by their definitions in `tables.toml`.

A definition has these parts; cells, heads and captions are templates of `expressions.py`.

    caption     above the table, of all its rows
    rows        the frame of `frames.py` that its rows come from; several are put together
    where, drop the values of columns that rows must have, or must not have together; "none" for no value
    only        an expression that holds of a row
    each        columns: a table for each of their values
    index       the columns that begin a line, [head, cell]; rows for which these say the same are one line
    columns     the others: a measure of `sparseattn.evaluation.measures`, with a format where it is not the measure's;
                [head, cell] or [head, cell, where], where a head that begins with < is of text; or {over = columns,
                cells = [...]}: such columns for each of their values, in the order of `values` where it is given. A row
                without a value is of the first.
    sort        an expression, its rows by `sort_where`
    foot        lines below, of all rows: [label, cell, ...]; without cells, those of the columns
    base        what `base(...)` is about: the values of columns of these rows
    names       what the format `name` writes for a value
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence import markdown, toml
from scripts.evidence.expressions import Row, Scope, evaluate, filled
from sparseattn.evaluation.measures import measure
from sparseattn.reporting.table import Column, Table

Definition: TypeAlias = "Mapping[str, Any]"
Rows: TypeAlias = "Sequence[Row]"
Test: TypeAlias = "Callable[[Row], bool]"

DEFINED = Path(__file__).with_name("tables.toml")


def defined(path: Path = DEFINED) -> dict[str, Definition]:
    """The tables by name."""
    return toml.read(path)


def drawn(definition: Definition, rows: Rows, where: Mapping[str, Sequence[str]]) -> str:
    """The Markdown of a table.

    Args:
        definition: see the module.
        rows: of its frames.
        where: what a block asks for besides, values as they are written.

    Raises:
        LookupError: no rows are left, or a column is not there.
    """
    drops, none = definition.get("drop", []), dict.fromkeys(name for row in rows for name in row)
    mine = [
        {**none, **row}
        for row in rows
        if matches(row, definition.get("where", {}))
        and not any(matches(row, one) for one in drops)
        and all(str(row.get(name)) in values for name, values in where.items())
        and ("only" not in definition or evaluate(definition["only"], Scope([row])))
    ]
    if not mine:
        raise LookupError("no rows are left of the record")
    return "\n\n".join(_table(definition, part) for part in _split(mine, definition.get("each", [])))


def matches(row: Row, where: Mapping[str, Any]) -> bool:
    """Whether the columns of a row have the values asked for, one or one of several; "none" for no value."""
    return all(
        ("none" if row.get(name) is None else row[name]) in (value if isinstance(value, list) else [value])
        for name, value in where.items()
    )


def _split(rows: Rows, names: Sequence[str]) -> list[Rows]:
    """Rows that agree in some columns, in the order in which they come."""
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        parts.setdefault(_values(row, names), []).append(row)
    return list(parts.values())


def _values(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(str(value) if isinstance(value := row.get(name), list) else value for name in names)


def _table(definition: Definition, rows: Rows) -> str:
    names = definition.get("names", {})
    base = definition.get("base")
    beside = [row for row in rows if base and matches(row, base)]
    caption = markdown.text(filled(definition.get("caption", ""), Scope(rows, beside, alike=True), names))
    if "index" not in definition:
        return caption
    index, columns = definition["index"], list(_columns(definition["columns"], rows, names))

    def scope(some: Rows, test: Test) -> Scope:
        if base is None:
            return Scope([row for row in some if test(row)])
        beside = [row for row in rows if test(row) and matches(row, base)]
        return Scope([row for row in some if test(row)], beside or [row for row in some if matches(row, base)])

    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(filled(cell, Scope([row]), names) for _, cell in index), []).append(row)
    lines = list(groups.items())
    if "sort" in definition:
        wanted = definition.get("sort_where", {})
        lines.sort(
            key=lambda one: _order(evaluate(definition["sort"], Scope([r for r in one[1] if matches(r, wanted)])))
        )
    cells = [[*key, *(_cell(cell, scope(some, test), names) for _, cell, test in columns)] for key, some in lines]
    for label, *own in definition.get("foot", ()):
        every = zip(itertools.cycle(own or [cell for _, cell, _ in columns]), columns, strict=False)
        cells.append(
            [label, *[""] * (len(index) - 1), *(_cell(c, scope(rows, test), names) for c, (_, _, test) in every)]
        )
    head = [filled(name, Scope(rows, alike=True), names) for name, _ in index] + [name for name, _, _ in columns]
    left = definition.get("left", len(index))
    aligned = [
        Column(name.lstrip("<"), align="left" if i < left or "<" in name else "right") for i, name in enumerate(head)
    ]
    shown = Table("", aligned, cells).markdown()
    return f"{caption}\n\n{shown}" if caption else shown


def _cell(template: str, scope: Scope, names: Mapping[str, str]) -> str:
    return filled(template, scope, names) if scope.rows else ""


def _order(value: Any) -> tuple[bool, Any]:
    """What is not known comes last."""
    return value is None, value


def _columns(columns: Iterable[Any], rows: Rows, names: Mapping[str, str]) -> Iterable[tuple[str, str, Test]]:
    """Head, cell, and which rows a cell is about."""
    for column in columns:
        if not isinstance(column, dict):
            head, cell, *rest = _parts(column)
            wanted = rest[0] if rest else {}
            some = [row for row in rows if matches(row, wanted)]
            yield filled(head, Scope(some, alike=True), names), cell, _where(wanted)
            continue
        over = column["over"] if isinstance(column["over"], list) else [column["over"]]
        values = column.get("values") or _spread(rows, over)
        for value in values:
            value = value if isinstance(value, tuple) else (value,)
            test = _over(over, value, values[0] if isinstance(values[0], tuple) else (values[0],))
            some = [row for row in rows if tuple(row.get(name) for name in over) == value]
            for head, cell, *rest in map(_parts, column["cells"]):
                wanted = rest[0] if rest else {}
                yield filled(head, Scope(some, alike=True), names), cell, _both(test, _where(wanted))


def _parts(column: Any) -> Sequence[Any]:
    """Head, cell, and `where` of a column: of a measure as the table of measures has them, or the format behind it."""
    if not isinstance(column, str):
        return column
    name, _, form = column.partition(" ")
    known = measure(name)
    digits = f".{known.format.digits}"
    return known.short, f"{{{name}:{form or (digits + '%' if known.format.factor == 100 else ',' + digits + 'f')}}}"


def _where(wanted: Mapping[str, Any]) -> Test:
    return lambda row: matches(row, wanted)


def _both(one: Test, other: Test) -> Test:
    return lambda row: one(row) and other(row)


def _over(over: Sequence[str], value: tuple[Any, ...], first: tuple[Any, ...]) -> Test:
    """Rows of a value; those without one are of the first."""
    return lambda row: all(
        row.get(name) == wanted or (row.get(name) is None and wanted == start)
        for name, wanted, start in zip(over, value, first, strict=True)
    )


def _spread(rows: Rows, over: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of columns, by the order in which those of the first come, of the second, ..."""
    found = {tuple(row.get(name) for name in over): None for row in rows}
    ranks = [list(dict.fromkeys(row.get(name) for row in rows)) for name in over]
    whole = [value for value in found if None not in value]
    return sorted(whole, key=lambda value: [rank.index(one) for rank, one in zip(ranks, value, strict=True)])
