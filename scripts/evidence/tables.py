"""Tables of documents, by their definitions in `tables.toml`.

A definition has these parts; cells, heads and captions are templates of `expressions.py`.

    caption     above the table, of all its rows
    rows        the frame of `frames.py` that its rows come from; several are put together
    where, drop the values of columns that rows must have, or must not have together; "none" for no value
    only        an expression that holds of a row
    each        columns: a table for each of their values
    index       the columns that begin a line, [head, cell]; rows for which these say the same are one line
    columns     the others: a measure of `sparseattn.evaluation.measure_table`, with a format where it is not its own;
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from scripts.evidence import markdown, toml
from scripts.evidence.expressions import Row, Scope, evaluate, filled
from sparseattn.evaluation.measure_table import measure
from sparseattn.reporting.table import Column, Table

Definition: TypeAlias = "Mapping[str, Any]"
Rows: TypeAlias = "Sequence[Row]"
Where: TypeAlias = "Mapping[str, Any]"  # see `matches`

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
    each = _split(mine, lambda row: tuple(str(row[name]) for name in definition.get("each", [])))
    return "\n\n".join(_table(definition, part) for part in each.values())


def matches(row: Row, where: Where) -> bool:
    """Whether the columns of a row have the values asked for, one or one of several; "none" for no value."""
    return all(
        ("none" if row.get(name) is None else row[name]) in (value if isinstance(value, list) else [value])
        for name, value in where.items()
    )


def _split(rows: Rows, key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Rows by a key of them, in the order in which they come."""
    parts: dict[Any, list[Row]] = {}
    for row in rows:
        parts.setdefault(key(row), []).append(row)
    return parts


def _table(definition: Definition, rows: Rows) -> str:
    names, base, index = definition.get("names", {}), definition.get("base"), definition["index"]

    def scope(some: Rows, where: Where, alike: bool = False) -> Scope:
        """Those of some rows that a column is about, and beside them the base's: of the column, or of those rows."""
        about = [row for row in some if matches(row, where)]
        if base is None:
            return Scope(about, alike=alike)
        beside = [row for row in rows if matches(row, where) and matches(row, base)]
        return Scope(about, beside or [row for row in some if matches(row, base)], alike)

    def heading(template: str, where: Where) -> str:
        return filled(template, scope(rows, where, alike=True), names)

    def line(some: Rows, templates: Iterable[str]) -> list[str]:
        pairs = zip(templates, columns, strict=False)
        scopes = ((template, scope(some, column.where)) for template, column in pairs)
        return [filled(template, about, names) if about.rows else "" for template, about in scopes]

    columns = list(_columns(definition["columns"], rows))
    groups = _split(rows, lambda row: tuple(filled(cell, Scope([row]), names) for _, cell in index))
    if "sort" in definition:
        groups = dict(sorted(groups.items(), key=lambda one: _order(definition, one[1])))
    own = [column.cell for column in columns]
    cells = [[*key, *line(some, own)] for key, some in groups.items()]
    for label, *others in definition.get("foot", ()):
        cells.append([label, *[""] * (len(index) - 1), *line(rows, itertools.cycle(others or own))])
    heads = [heading(head, {}) for head, _ in index] + [heading(column.head, column.named) for column in columns]
    left = definition.get("left", len(index))
    aligned = [Column(h.lstrip("<"), align="left" if i < left or "<" in h else "right") for i, h in enumerate(heads)]
    shown = Table("", aligned, cells).markdown()
    caption = markdown.text(heading(definition.get("caption", ""), {}))
    return f"{caption}\n\n{shown}" if caption else shown


def _order(definition: Definition, rows: Rows) -> tuple[bool, Any]:
    """What lines are sorted by; what is not known comes last."""
    value = evaluate(definition["sort"], Scope([row for row in rows if matches(row, definition.get("sort_where", {}))]))
    return value is None, value


@dataclass(frozen=True)
class Cells:
    """A column of a table.

    Args:
        head, cell: their templates.
        where: which rows a cell is about.
        named: which of these the head is about.
    """

    head: str
    cell: str
    where: Where
    named: Where


def _columns(columns: Iterable[Any], rows: Rows) -> Iterable[Cells]:
    for column in columns:
        if not isinstance(column, dict):
            yield _cells(column, {}, {})
            continue
        over = column["over"] if isinstance(column["over"], list) else [column["over"]]
        values = [(value,) for value in column["values"]] if "values" in column else _spread(rows, over)
        for value in values:
            named = dict(zip(over, value, strict=True))
            first = dict(zip(over, values[0], strict=True))
            where = {name: [one, "none"] if one == first[name] else one for name, one in named.items()}
            yield from (_cells(one, where, named) for one in column["cells"])


def _cells(column: Any, where: Where, named: Where) -> Cells:
    """A column as it is defined, for a value of what it is defined over."""
    if isinstance(column, str):
        name, _, form = column.partition(" ")
        known = measure(name)
        digits = f".{known.format.digits}"
        own = f"{digits}%" if known.format.factor == 100 else f",{digits}f"
        column = [known.short, f"{{{name}:{form or own}}}"]
    head, cell, *more = column
    return Cells(head, cell, {**where, **(more[0] if more else {})}, {**named, **(more[0] if more else {})})


def _spread(rows: Rows, over: Sequence[str]) -> list[tuple[Any, ...]]:
    """The values of columns, by the order in which those of the first come, of the second, ..."""
    ranks = [list(dict.fromkeys(row[name] for row in rows)) for name in over]
    found = {tuple(row[name] for name in over) for row in rows}
    return sorted(
        (value for value in found if None not in value),
        key=lambda value: [rank.index(one) for rank, one in zip(ranks, value, strict=True)],
    )
