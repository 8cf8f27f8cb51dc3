"""Puts what `eval` found before people: tables and closing lines on the terminal, figures in the folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sparseattn.cli import eval_report as report
from sparseattn.cli.common import Screen, errors


def show(found: Sequence[report.Record], path: Path, *, json: bool, figures: bool) -> None:
    """Shows records and where they lie.

    Args:
        found: what was asked for.
        path: the file of records; figures are drawn beside it.
        json: standard output holds JSON lines already: no tables, and the closing lines go to standard error.
        figures: draw them.
    """
    screen = Screen(width=None if sys.stdout.isatty() else report.WIDE)
    if not json:
        for table in report.tables(found):
            screen.print(table)
    for figure in _drawn(found, path.parent) if figures else []:
        errors.print(f"figure: {figure}", soft_wrap=True)
    errors.print(f"records: {path}", soft_wrap=True)
    for line in report.verdicts(found):
        (errors if json else Screen()).print(line, soft_wrap=True)


def _drawn(found: Sequence[report.Record], folder: Path) -> list[Path]:
    """The paths of the figures, which are there then."""
    from sparseattn.cli import plots

    made = [folder / "accuracy.png"]
    plots.accuracy(found, made[0])
    for name, mine in report.grids(found).items():
        made.append(folder / f"heat-{name}.png")
        plots.heat(mine, made[-1])
    return made
