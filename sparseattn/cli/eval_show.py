"""Puts what `eval` found before people: tables and closing lines on the terminal, figures in the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseattn.cli.command import errors
from sparseattn.evaluation.tasks.compared import FORCED
from sparseattn.evaluation.tasks.records import WHOLE
from sparseattn.reporting import agreement_tables, eval_tables, kvpress_results, server_tables
from sparseattn.reporting.eval_records import FULL_ROW, Record, by_place, rows_of
from sparseattn.reporting.terminal import Screen, table_screen


def show(measured: Sequence[Record], path: Path, *, json: bool, figures: bool) -> None:
    """Show records and where they lie.

    Args:
        measured: what was asked for.
        path: the file of records; figures are drawn beside it.
        json: standard output holds JSON lines already: no tables, and the closing lines go to standard error.
        figures: draw them.
    """
    screen = table_screen()
    scored = [record for record in measured if record["protocol"] not in (FORCED, WHOLE)]
    forced = [record for record in measured if record["protocol"] == FORCED]
    whole = [record for record in measured if record["protocol"] == WHOLE]
    if not json:
        for table in eval_tables.tables(scored) + agreement_tables.tables(forced) + server_tables.tables(whole):
            screen.print(table)
    errors.print(f"records: {path}", soft_wrap=True)
    for figure in _drawn(scored, forced, whole, path.parent) if figures else []:
        errors.print(f"figure: {figure}", soft_wrap=True)
    first = rows_of(whole)[0] if whole else FULL_ROW
    for line in eval_tables.cautions(scored) + eval_tables.cautions(whole, first):
        errors.print(f"sparseattn: {line}", soft_wrap=True)
    for line in eval_tables.verdicts(scored) + agreement_tables.verdicts(forced) + server_tables.verdicts(whole):
        (errors if json else Screen()).print(line, soft_wrap=True)


def write_kvpress(measured: Sequence[Record], lines: Mapping[tuple[str, int], Mapping[str, Any]], folder: Path) -> None:
    """Write results in kvpress' form and say where they lie; `lines` as of `eval_prompts.lines_of`."""
    for place in kvpress_results.write(folder, kvpress_results.runs(measured, lines)):
        errors.print(f"results: {place}", soft_wrap=True)


def _drawn(scored: Sequence[Record], forced: Sequence[Record], whole: Sequence[Record], folder: Path) -> list[Path]:
    """Return the paths of the figures, which are there then."""
    from sparseattn.reporting import plots

    made = []
    if scored:
        made.append(folder / "accuracy.png")
        plots.accuracy(scored, made[-1])
    if whole:
        made.append(folder / "accuracy.png")
        plots.servers(whole, made[-1])
    for name, mine in by_place([*scored, *whole]).items():
        made.append(folder / f"heat-{name}.png")
        plots.heat(mine, made[-1])
    if forced:
        made.append(folder / "agreement.png")
        plots.agreement(forced, made[-1])
    return made
