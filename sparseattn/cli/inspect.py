"""`sparseattn inspect`: why methods find or miss rows on a trace: distances, concentration, change, Quest's bounds."""

from __future__ import annotations

import datetime
import functools
import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from sparseattn.cli.common import (
    errors,
    in_a_sentence,
    integers,
    model_progress,
    open_trace,
    progress_bar,
    results_folder,
    say_differences,
)
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.attention_stats import check_inspection, estimator, inspect_trace
from sparseattn.evaluation.builtin_traces import BUILTIN
from sparseattn.reporting import inspect_tables, replay_tables
from sparseattn.reporting.terminal import Screen, table_screen
from sparseattn.utils.files import write_atomic


@in_a_sentence
def inspect(
    traces: Annotated[
        list[str], typer.Argument(help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}).")
    ],
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, such as 0,5,17; default all.")] = None,
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are measured.")] = 32,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the records, inspect.jsonl, one a layer, and the figures; an earlier run's are replaced."
        ),
    ] = Path("inspect"),
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Every head apart in the tables; the records always hold them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNGs into --out.")] = True,
) -> None:
    """Measure why methods find or miss rows: how far queries lie from keys, how few rows hold the attention, how these
    change from token to token, and how loose Quest's bounds are."""
    indices = integers(layers, "--layers")
    if figures:
        from sparseattn.reporting import plots  # fails at once if matplotlib is missing, before any work
    estimator()
    with model_progress() as progress:
        opened = [open_trace(name, progress) for name in traces]
    chosen = [check_inspection(trace, sink, window, last, indices) for trace in opened]
    for trace in opened:
        say_differences(trace)
    results_folder(out)

    partial = out / "inspect.partial.jsonl"
    context = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    found, lines = [], []
    for trace, mine in zip(opened, chosen, strict=True):
        with progress_bar() as bar:
            advance = functools.partial(bar.advance, bar.add_task(trace.name, total=last * len(mine)))
            one = inspect_trace(trace, sink=sink, window=window, last=last, layers=mine, progress=advance)
        found.append(one)
        fresh = [json_module.dumps({**record, "trace_meta": trace.meta, **context}) for record in one.records()]
        lines += fresh
        write_atomic(partial, ("\n".join(lines) + "\n").encode())
        if json:
            typer.echo("\n".join(fresh))
    partial.replace(out / "inspect.jsonl")
    if not json:
        screen = table_screen(per_head)  # heads take a column more than 80 characters can hold
        for one in found:
            for table in inspect_tables.tables(one, per_head):
                screen.print(table)
    if figures:
        pictures = {"inspect": plots.inspection, "rows": plots.needed_rows, "pages": plots.needed_pages}
        for what, draw in pictures.items():
            for one, name in zip(found, replay_tables.figure_names([one.trace for one in found], what), strict=True):
                draw(one, out / name)
                errors.print(f"figure: {out / name}", soft_wrap=True)
    errors.print(f"records: {out / 'inspect.jsonl'}", soft_wrap=True)
    for one in found:
        for sentence in inspect_tables.findings(one):
            (errors if json else Screen()).print(sentence, soft_wrap=True)
