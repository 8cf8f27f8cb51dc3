"""A table with three renderings: for the terminal, as Markdown, and as HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from markupsafe import Markup
from rich import box
from rich.console import Console, ConsoleOptions, OverflowMethod
from rich.table import Table as RichTable
from rich.text import Text

from sparseattn.evaluation.measure_table import Measure, measure
from sparseattn.reporting.terminal import plain

Show: TypeAlias = "Callable[[Any], str]"  # a value as its text


@dataclass(frozen=True)
class Column:
    """A column: its head, how its values are written, and where they stand.

    Args:
        head: its title, with the unit.
        show: writes a value; None is `missing` whatever it is.
        align: "left" for text, "right" for numbers.
        wrap: whether a narrow terminal may break it into lines.
        missing: text where there is no value.
    """

    head: str
    show: Show = str
    align: Literal["left", "right"] = "right"
    wrap: bool = True
    missing: str = "-"

    @classmethod
    def of(cls, key: str | Measure, head: str | None = None, **more: Any) -> Column:
        """Return the column of a measure by its name in records, or of a `Measure`; `more` goes to the column."""
        known = measure(key) if isinstance(key, str) else key
        missing = more.get("missing", "-")
        return cls(known.head if head is None else head, lambda value: known(value, missing), **more)

    @classmethod
    def text(cls, head: str, **more: Any) -> Column:
        """Return a column of text, to the left."""
        return cls(head, align="left", **more)

    def cell(self, value: Any) -> str:
        """Return the text of a value."""
        return self.missing if value is None else self.show(value)


@dataclass
class Table:
    """A title, columns, and rows of values.

    Args:
        title: what it shows.
        columns: one for each value of a row.
        rows: values, which the columns write.
        note: what a reader must know, below the table.
        row_head: number of the column that names a row, such as its method; None where none does.
        rules: numbers of rows before which a line stands.
    """

    kind: ClassVar[str] = "table"  # of the page's views
    title: str
    columns: Sequence[Column]
    rows: list[list[Any]] = field(default_factory=list)
    note: str = ""
    row_head: int | None = None
    rules: set[int] = field(default_factory=set)

    def add(self, *values: Any) -> None:
        """Append a row."""
        self.rows.append(list(values))

    def rule(self) -> None:
        """Draw a line before the next row."""
        self.rules.add(len(self.rows))

    def cells(self) -> Iterable[list[str]]:
        """Return the texts of each row."""
        return ([column.cell(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RichTable]:
        yield self.terminal("crop" if options.ascii_only else "ellipsis")

    def terminal(self, cut: OverflowMethod = "ellipsis") -> RichTable:
        """Return the table for rich; nothing in it is a command to rich or to the terminal.

        Args:
            cut: how cells that are too wide are cut: where "..." cannot be written as one character, "crop".
        """
        out = RichTable(
            title=_text(self.title, "table.title") if self.title else None,
            caption=_text(self.note, "table.caption") if self.note else None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for column in self.columns:
            out.add_column(
                _text(column.head),
                justify=column.align,
                no_wrap=not column.wrap,
                overflow="fold" if column.wrap else cut,
            )
        for number, cells in enumerate(self.cells()):
            if number in self.rules:
                out.add_section()
            out.add_row(*map(_text, cells))
        return out

    def markdown(self) -> str:
        """Return the rows as a table of Markdown, without title and note."""
        marks = ["---" if column.align == "left" else "---:" for column in self.columns]
        lines = [[column.head for column in self.columns], marks, *self.cells()]
        return "\n".join("|" + "".join(f" {_escaped(cell)} |" if cell else " |" for cell in line) for line in lines)

    def html(self) -> Markup:
        """Return the rows as a `<table>`, without title and note; every text is escaped.

        A cell's `data-value` is its number, to sort by; a cell without a value has `data-missing`.
        """
        heads = [_tag("th", column.head, column, scope="col") for column in self.columns]
        lines = []
        for values, cells in zip(self.rows, self.cells(), strict=True):
            line = [
                _tag("th", cell, column, scope="row")
                if number == self.row_head
                else _tag("td", cell, column, **_sort_key(value))
                for number, (column, value, cell) in enumerate(zip(self.columns, values, cells, strict=True))
            ]
            lines.append(_tag("tr", Markup("").join(line)))
        head, body = _tag("thead", _tag("tr", Markup("").join(heads))), _tag("tbody", Markup("").join(lines))
        return _tag("table", head + body)


def _tag(name: str, inner: str | Markup, column: Column | None = None, **attributes: Any) -> Markup:
    """Return an element; what is no `Markup` is escaped, and numbers stand to the right."""
    if column is not None and column.align == "right":
        attributes["class"] = "number"
    written = Markup("").join(Markup(' {}="{}"').format(key, value) for key, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, inner)


def _sort_key(value: Any) -> dict[str, str]:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return {"data-missing": ""}
    return {"data-value": f"{value:.6g}"} if isinstance(value, int | float) else {}


def _text(text: str, style: str = "") -> Text:
    return Text("\n".join(map(plain, text.split("\n"))), style)


def _escaped(cell: str) -> str:
    return plain(cell).replace("|", r"\|")
