"""`sparseattn inspect`: why methods find or miss rows on a trace: distances, concentration, change, Quest's bounds."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparseattn.cli import values
from sparseattn.cli.command import errors
from sparseattn.cli.inputs import open_traces, say_differences
from sparseattn.cli.inspect_options import InspectOptions
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.results import RecordFile, check_figures, own_folder, say_figure, say_records
from sparseattn.evaluation.attention_stats import Inspection, check_inspection, estimator, inspect_trace
from sparseattn.reporting import inspect_tables, replay_tables
from sparseattn.reporting.terminal import Screen, table_screen
from sparseattn.traces.trace import Trace


def run(options: InspectOptions) -> None:
    """Run `sparseattn inspect`."""
    layers = values.integers(options.layers, "--layers")
    check_figures(options.figures)
    estimator()
    traces = open_traces(options.traces)
    zones = {"sink": options.sink, "window": options.window, "last": options.last}
    chosen = [check_inspection(trace, layers=layers, **zones) for trace in traces]
    for trace in traces:
        say_differences(trace)
    with own_folder(options.out, "inspect"):
        _measure(options, traces, chosen, zones)


def _measure(
    options: InspectOptions, traces: Sequence[Trace], chosen: Sequence[Sequence[int]], zones: Mapping[str, int]
) -> None:
    """Measure every trace, write the records, and show what came."""
    file = RecordFile(options.out / "inspect.jsonl", options.json)
    inspections = []
    for trace, layers_of_trace in zip(traces, chosen, strict=True):
        with progress_bar() as bar:
            task = bar.add_task(trace.name, total=options.last * len(layers_of_trace))
            advance = functools.partial(bar.advance, task)
            inspections.append(inspect_trace(trace, layers=layers_of_trace, progress=advance, **zones))
        file.add({**record, "trace_meta": trace.meta} for record in inspections[-1].records())
    file.finish()
    if not options.json:
        _show_tables(inspections, options.per_head)
    say_records(file.path)
    if options.figures:
        _draw(inspections, options.out)
    for inspection in inspections:
        for sentence in inspect_tables.findings(inspection):
            (errors if options.json else Screen()).print(sentence, soft_wrap=True)


def _show_tables(inspections: Sequence[Inspection], per_head: bool) -> None:
    """Print the tables; heads take a column more than 80 characters can hold."""
    screen = table_screen(per_head)
    for inspection in inspections:
        for table in inspect_tables.tables(inspection, per_head):
            screen.print(table)


def _draw(inspections: Sequence[Inspection], out: Path) -> None:
    """Draw the pictures of every trace."""
    from sparseattn.reporting import plots

    pictures = {"inspect": plots.inspection, "rows": plots.needed_rows, "pages": plots.needed_pages}
    for what, draw in pictures.items():
        names = replay_tables.figure_names([inspection.trace for inspection in inspections], what)
        for inspection, name in zip(inspections, names, strict=True):
            draw(inspection, out / name)
            say_figure(out / name)
