"""`sparseattn report`: one page of HTML from the records that other commands left, to look at instead of tables."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli.common import errors, in_a_sentence
from sparseattn.cli.page import folders as reading
from sparseattn.cli.page import html, origin
from sparseattn.cli.page.kinds import KINDS
from sparseattn.cli.page.views import Section
from sparseattn.files import write_atomic


@in_a_sentence
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help=f"Folders that bench, inspect, recall or eval wrote; what is read: {', '.join(KINDS)}."),
    ],
    out: Annotated[Path, typer.Option(help="The page to write; one that is there is replaced.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the page; default the names of the folders.")] = None,
) -> None:
    """Write one self-contained HTML page from the records of other commands: plots, maps, tables and every setting."""
    path = write_report(folders, out, title)
    errors.print(f"report: {path}", soft_wrap=True)


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Reads the records, makes the page and returns its path.

    Raises:
        ValueError: `out` is no .html file to write, or what `folders.read` refuses.
        OSError: the page cannot be written.
    """
    if out.suffix != ".html" or out.is_dir():
        raise ValueError(f"--out is an .html file to write, got {out}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is in a folder that does not exist: {out.parent}")
    found = reading.read(folders, KINDS)
    sections: list[Section] = []
    for name, make in KINDS.items():
        for source in found.get(name, []):
            sections.append(reading.checked(source, make))
    sections.append(origin.section(found))
    named = ", ".join(str(folder) for folder in folders)
    made = f"Written on {datetime.date.today().isoformat()} from {named}."
    write_atomic(out, html.written(title or f"Sparse attention: {named}", sections, made).encode())
    return out
