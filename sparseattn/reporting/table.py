"""A table with three renderings: for the terminal, as Markdown, and as HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rich import box
from rich.table import Table as RichTable

from sparseattn.evaluation.measures import Measure, measure
from sparseattn.reporting.terminal import plain

Show: TypeAlias = "Callable[[Any], str]"  # a value as its text


@dataclass(frozen=True)
class Column:
    """A column: its head, how its values are written, and where they stand.

    Args:
        head: its title, with the unit.
        show: writes a value; None is `missing` whatever it is.
        align: "left" for text, "right" for numbers.
        wrap: what a narrow terminal does to a cell: None breaks between words, "fold" anywhere, "never" not at all.
        missing: text where there is no value.
    """

    head: str
    show: Show = str
    align: Literal["left", "right"] = "right"
    wrap: Literal["fold", "never"] | None = None
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
        rules: numbers of rows before which a line stands.
    """

    title: str
    columns: Sequence[Column]
    rows: list[Sequence[Any]] = field(default_factory=list)
    note: str = ""
    rules: set[int] = field(default_factory=set)

    def add(self, *values: Any) -> None:
        """Append a row."""
        self.rows.append(values)

    def rule(self) -> None:
        """Draw a line before the next row."""
        self.rules.add(len(self.rows))

    def cells(self) -> Iterable[list[str]]:
        """Return the texts of each row."""
        return ([column.cell(value) for column, value in zip(self.columns, row, strict=True)] for row in self.rows)

    def __rich__(self) -> RichTable:
        return self.terminal()

    def terminal(self) -> RichTable:
        """Return the table for rich; text of files in it is no command to the terminal (see `Screen`)."""
        out = RichTable(
            title=plain(self.title) or None,
            caption=plain(self.note) or None,
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for column in self.columns:
            out.add_column(
                column.head,
                justify=column.align,
                no_wrap=column.wrap == "never",
                overflow="fold" if column.wrap == "fold" else "ellipsis",
            )
        for number, cells in enumerate(self.cells()):
            if number in self.rules:
                out.add_section()
            out.add_row(*cells)
        return out

    def markdown(self) -> str:
        """Return the rows as a table of Markdown, without title and note."""
        marks = ["---" if column.align == "left" else "---:" for column in self.columns]
        lines = [[column.head for column in self.columns], marks, *self.cells()]
        return "\n".join("|" + "".join(f" {_escaped(cell)} |" if cell else " |" for cell in line) for line in lines)

    def html(self) -> str:
        """Return the rows as a `<table>`, without title and note; every text is escaped."""
        classes = ["" if column.align == "left" else ' class="number"' for column in self.columns]
        heads = "".join(
            f'<th scope="col"{kind}>{html.escape(column.head)}</th>'
            for column, kind in zip(self.columns, classes, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td{kind}>{html.escape(cell)}</td>" for cell, kind in zip(cells, classes, strict=True))
            + "</tr>"
            for cells in self.cells()
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(cell: str) -> str:
    return plain(cell).replace("|", r"\|")
