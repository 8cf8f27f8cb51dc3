"""`sparseattn bench`: how well each method finds the rows that matter on traces, and what it reads to do so."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from sparseattn.cache.index_files import usable_folder
from sparseattn.cli import options as shared
from sparseattn.cli.bench_items import BenchRun, Replayed
from sparseattn.cli.bench_methods import ChosenMethods
from sparseattn.cli.bench_options import BenchOptions
from sparseattn.cli.command import errors
from sparseattn.cli.done_items import DoneItems
from sparseattn.cli.inputs import leading_traces, open_roles, open_traces, say_differences
from sparseattn.cli.options import LEAD
from sparseattn.cli.report import write_report
from sparseattn.cli.report_options import EXPLORED, QUERIES, Explored
from sparseattn.cli.results import RecordFile, check_figures, origin, own_folder, say_figure, say_records
from sparseattn.core.budget import Budget
from sparseattn.evaluation.builtin_traces import BUILTIN, LEADING
from sparseattn.evaluation.by_head import JUDGED, Comparison
from sparseattn.evaluation.replay import evaluate
from sparseattn.evaluation.replay_settings import replay_device, usable_layers
from sparseattn.models.packaged import REFERENCE
from sparseattn.reporting import equal_cost, layer_tables, replay_tables
from sparseattn.reporting.terminal import Screen, plain, table_screen
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import write_atomic
from sparseattn.utils.ranks import JobRanks, of_job

# Not `retrieval`, whose graphs take longer to build than all of these take together.
SELECTED = ("exact", "quest", "quest:group=each", "quest:page=8,int8=True", "lowbit", "random", "window")
# Model -> what its artefact that ships is for; compared where every trace is a built-in one of that model.
TRAINED: dict[str, tuple[str, ...]] = {REFERENCE: ("saap", "kmeans", "moments"), LEAD: ("saap", "moments")}


def run(options: BenchOptions) -> None:
    """Run `sparseattn bench`."""
    roles = open_roles(options.roles, trusted=shared.trusted(options.trust, options.selector, options.roles))
    chosen = ChosenMethods.of(options.selector or [], roles)
    equal = options.equal
    for method in chosen.named or ChosenMethods.of(SELECTED).methods:
        replay_device(method, options.device)  # a device that is not there is refused before anything is made
    check_figures(options.figures)
    names = options.traces or leading_traces(LEADING[:1] if options.every_method else LEADING)
    chosen = chosen if chosen.methods else ChosenMethods.of(SELECTED + _trained(names))
    replays = _planned(options, chosen, open_traces(names))
    ranks = of_job()
    with own_folder(options.out, "bench", ranks):
        if options.indexes is not None:
            usable_folder(options.indexes)
        _measure(options, chosen, replays, names, equal, ranks)


def _measure(
    options: BenchOptions,
    chosen: ChosenMethods,
    replays: Sequence[Replayed],
    names: Sequence[str],
    equal: tuple[Budget, float],
    ranks: JobRanks | None,
) -> None:
    """Measure every method on its traces, write the records, and show what came."""
    measuring = BenchRun(options, chosen, DoneItems(options.out / "bench.items"))
    items = measuring.items(replays)
    if ranks:
        measuring.share(ranks, items)
        if not ranks.first:
            return
    file = RecordFile(options.out / "bench.jsonl", options.json)
    for replay, results in measuring.measured(items):
        replay.results += results
        heads = options.per_head or (JUDGED if options.demo else False)
        file.add({**result.record(heads), "trace_meta": replay.trace.meta} for result in results)
    file.finish()
    measuring.done.remove()
    screen = table_screen(options.wide)
    _show_results(options, replays, file.path, screen)
    comparisons: list[list[Comparison]] = []
    if options.comparing:
        comparisons = _compare(options, replays, equal, screen)
    else:
        (options.out / "by-layer.jsonl").unlink(missing_ok=True)  # an earlier run's, of other measurements
    if options.figures:
        _draw_comparisons(options, replays, comparisons)
    every = [result for replay in replays for result in replay.results]
    closing_lines = (replay_tables.verdict(every), *replay_tables.own_methods(every), replay_tables.finding(every))
    for closing in filter(None, closing_lines):
        (errors if options.json else Screen()).print(closing, soft_wrap=True)
    if options.demo and options.figures:
        errors.print(f"report: {_write_page(options, names)}", soft_wrap=True)


def _trained(names: Sequence[str]) -> tuple[str, ...]:
    """Return the selectors that were trained for the model of these traces, if they have one in common."""
    models = {BUILTIN[name].model if name in BUILTIN else "" for name in names}
    return TRAINED.get(models.pop(), ()) if len(models) == 1 else ()


def _planned(options: BenchOptions, chosen: ChosenMethods, traces: Sequence[Trace]) -> list[Replayed]:
    """Return the methods of every trace, all of them checked, before anything is measured."""
    replays: list[Replayed] = []
    if any(method.uses_budget for method in chosen.methods):
        options.check_effect(traces)
    for trace in traces:
        say_differences(trace)
        check = functools.partial(options.check_method, trace, usable_layers(trace, options.layer_numbers))
        replays.append(Replayed(trace, chosen.of_trace(check, options.budgets)))
    if options.far:  # a trace without such a head fails now, not after the traces before it; Window builds no index
        zones: dict[str, Any] = {"sink": options.sink, "window": options.window, "last": options.last}
        for trace in traces:
            measured = evaluate(trace, "window", 1, layers=options.layer_numbers, device=options.device, **zones)
            measured.far(options.far)
    return replays


def _figure_paths(options: BenchOptions, replays: Sequence[Replayed], what: str = "frontier") -> list[Path]:
    """Return a figure's path for each trace."""
    return [options.out / name for name in replay_tables.figure_names([replay.trace.name for replay in replays], what)]


def _show_results(options: BenchOptions, replays: Sequence[Replayed], path: Path, screen: Screen) -> None:
    """Print a table of each trace, say where records lie, draw its frontier, and say what was left out."""
    for replay in () if options.json else replays:
        screen.print(replay_tables.table(replay.results, options.per_head, options.wide))
    say_records(path)
    if options.figures:
        from sparseattn.reporting import plots

        for replay, figure in zip(replays, _figure_paths(options, replays), strict=True):
            plots.frontier(replay.results, figure)
            say_figure(figure)
    for replay in replays:
        left_out = {label: f"is not measured: {reason}" for label, reason in replay.methods.left_out.items()}
        for label, clause in (replay.methods.other_budgets | left_out).items():
            (errors if options.json else screen).print(plain(f"{replay.trace.name}: {label} {clause}"), soft_wrap=True)


def _compare(
    options: BenchOptions, replays: Sequence[Replayed], equal: tuple[Budget, float], screen: Screen
) -> list[list[Comparison]]:
    """Compare each trace's methods under each condition, write the records, and show them as tables or as JSON."""
    reasons = [replay.methods.left_out for replay in replays]
    compared = [layer_tables.compared(replay.results, *equal, replay.methods.left_out) for replay in replays]
    source = origin()
    lines = [
        json.dumps({**comparison.record(), "trace_meta": replay.trace.meta, **source})
        for (comparisons, _), replay in zip(compared, replays, strict=True)
        for comparison in comparisons
    ]
    path = options.out / "by-layer.jsonl"
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    if options.json and lines:
        typer.echo("\n".join(lines))
    for (comparisons, remarks), left_out in zip(compared, reasons, strict=True):
        for comparison in comparisons:
            tables = [layer_tables.overview(comparison), *(layer_tables.tables(comparison) if options.by_layer else ())]
            for table in () if options.json else tables:
                screen.print(table)
            remarks += layer_tables.left_out(comparison, left_out)
            remarks += layer_tables.sentences(comparison) if options.by_layer else []
        for remark in remarks:
            (errors if options.json else screen).print(remark, soft_wrap=True)
    say_records(path)
    return [comparisons for comparisons, _ in compared]


def _draw_comparisons(
    options: BenchOptions, replays: Sequence[Replayed], comparisons: Sequence[Sequence[Comparison]]
) -> None:
    """Draw layers and heads of each trace, and the measures of every decoded token."""
    from sparseattn.reporting import plots

    if options.by_layer:
        for draw, what in ((plots.by_layer, "by-layer"), (plots.alike, "heads")):
            for compared, figure in zip(comparisons, _figure_paths(options, replays, what), strict=True):
                if compared:
                    draw(compared, figure)
                    say_figure(figure)
    for measure in options.steps:
        for replay, figure in zip(replays, _figure_paths(options, replays, measure), strict=True):
            plots.by_step(replay.results, measure, figure)
            say_figure(figure)


def _write_page(options: BenchOptions, names: Sequence[str]) -> Path:
    """Write the page that shows the records and explores the first trace; return its path."""
    explored = Explored(
        names[:1],
        (*EXPLORED, *_trained(names)[:1]),
        equal_cost.chosen_rows(None, options.budgets),
        min(QUERIES, options.last),
        options.layer_numbers,
        options.sink,
        options.window,
        options.device,
    )
    return write_report([options.out], options.out / "report.html", explored=explored)
