"""`sparseattn bench`: how well each method finds the rows that matter on traces, and what it reads to do so."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cache.index_files import usable_folder
from sparseattn.cache.selection_checks import ContractError
from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.cli.bench_methods import ALL, ChosenMethods, MethodsOfTrace
from sparseattn.cli.command import command, errors
from sparseattn.cli.inputs import LEAD, leading_traces, open_roles, open_traces, say_differences
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.report import EXPLORED, QUERIES, Explored, write_report
from sparseattn.cli.results import RecordFile, check_figures, origin, results_folder, say_figure, say_records
from sparseattn.core.budget import Budget, budget_order
from sparseattn.evaluation.builtin_traces import BUILTIN, LEADING
from sparseattn.evaluation.by_head import JUDGED, Comparison
from sparseattn.evaluation.replay import evaluate, evaluate_budgets
from sparseattn.evaluation.replay_settings import Replay, check_replay, replay_device, usable_layers
from sparseattn.evaluation.result import Evaluation
from sparseattn.evaluation.step_measures import check_steps
from sparseattn.models.load import REFERENCE
from sparseattn.reporting import layer_tables, replay_tables
from sparseattn.reporting.terminal import Screen, plain, table_screen
from sparseattn.roles.role import rounded_label
from sparseattn.roles.roles import Method
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import write_atomic

# Not `retrieval`, whose graphs take longer to build than all of these take together.
SELECTED = ("exact", "quest", "quest:group=each", "quest:page=8,int8=True", "lowbit", "random", "window")
# Model -> what its artefact that ships is for; compared where every trace is a built-in one of that model.
TRAINED: dict[str, tuple[str, ...]] = {REFERENCE: ("saap", "kmeans", "moments"), LEAD: ("saap", "moments")}


@dataclass(frozen=True)
class BenchOptions:
    """The options of `bench`."""

    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}); default {', '.join(LEADING)}, with "
            f"--selector {ALL} the first of these."
        ),
    ] = None
    selector: Annotated[
        list[str] | None,
        shared.selector_option(
            f"The name {ALL} takes every method with its defaults; the output says which cannot run, and why. Default: "
            f"{' '.join(SELECTED)}, and on built-in traces what was trained for their model."
        ),
    ] = None
    roles: shared.Roles = None
    trust: shared.Trust = None
    budget: shared.Budgets = "64,256,1024"
    sink: shared.Sink = 4
    window: shared.Window = 64
    layers: shared.Layers = None
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are decoded.")] = 32
    far: Annotated[
        float, typer.Option(help="Only heads with at least this share of their attention beyond sink and window.")
    ] = 0.0
    seal: shared.Seal = None
    kv_bits: shared.KvBits = "16"
    indexes: Annotated[
        Path | None, typer.Option(help="Folder of index files: what was built once is read back. Default: none.")
    ] = None
    device: shared.ReplayDevice = None
    out: Annotated[
        Path, typer.Option(help="Folder for the records, bench.jsonl, and the figures; an earlier run's are replaced.")
    ] = Path("bench")
    per_head: Annotated[bool, typer.Option("--per-head", help="Every head apart, in the table and in the JSON.")] = (
        False
    )
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer",
            help="Layers and heads too: where methods fail, at equal rows attended and at equal bytes, by-layer.jsonl.",
        ),
    ] = False
    rows: Annotated[
        str | None,
        typer.Option(
            help="Compare methods at equal rows: each attends as many as sink, window and this --budget allow, "
            f"interpolated between two budgets if need be. Default with --selector {ALL} or --by-layer: "
            f"{layer_tables.ROWS}, or else the middle budget."
        ),
    ] = None
    bytes_read: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            help="Compare methods at equal bytes: each reads this share of the cache, the index included, interpolated "
            f"between two budgets if need be. Default with --selector {ALL} or --by-layer: {layer_tables.BYTES:.0%}.",
        ),
    ] = None
    by_step: Annotated[
        str | None,
        typer.Option(
            help="Measures to record and to draw at every decoded token too, such as recall@10,relative_error."
        ),
    ] = None
    wide: Annotated[
        bool, typer.Option("--wide", help="Every measure in the table; default rows, bytes, error, recovered.")
    ] = False
    json: shared.JsonLines = False
    figures: shared.Figures = True

    def __post_init__(self) -> None:
        if not 0 <= self.far <= 1:
            raise ValueError(f"--far is a share of the attention, 0 to 1, got {self.far}")
        check_steps(self.steps)

    @property
    def demo(self) -> bool:
        """Whether nothing is named, so that a page to look at is written too."""
        return not (self.traces or self.selector or self.roles)

    @property
    def every_method(self) -> bool:
        """Whether every known method is measured."""
        return ALL in (self.selector or [])

    @property
    def comparing(self) -> bool:
        """Whether methods are compared at equal rows and at equal bytes."""
        return self.by_layer or self.every_method or self.rows is not None or self.bytes_read is not None

    @cached_property
    def budgets(self) -> list[Budget]:
        """Each once, in the order given."""
        return values.budgets(self.budget)

    @cached_property
    def rounding(self) -> list[int | None]:
        """Bits of rows, None for rows as they come."""
        return values.kv_bits(self.kv_bits)

    @cached_property
    def layer_numbers(self) -> list[int] | None:
        """The layers to measure; None: all."""
        return values.integers(self.layers, "--layers")

    @property
    def steps(self) -> list[str]:
        """The measures of every decoded token."""
        return self.by_step.split(",") if self.by_step else []

    @property
    def equal(self) -> tuple[Budget, float]:
        """The budget whose rows, and the share of the cache's bytes, at which methods are compared."""
        return layer_tables.chosen_rows(self.rows, self.budgets), layer_tables.chosen_bytes(self.bytes_read)

    def replay(self, bits: int | None = None) -> Replay:
        """Return how traces are replayed, with rows of so many bits."""
        layers = self.layer_numbers
        return Replay(self.sink, self.window, self.last, layers, self.seal, self.indexes, self.device, bits)

    def check_method(self, trace: Trace, layers: list[int], method: Method, budgets: Sequence[Budget]) -> None:
        """Refuse, by a ValueError, a method that cannot be measured on a trace."""
        replay_device(method, self.device)
        refused: list[ValueError] = []
        for bits in self.rounding:
            try:
                check_replay(trace, budgets, method, replace(self.replay(bits), layers=layers))
            except ValueError as error:
                refused.append(error)
        if len(refused) == len(self.rounding):  # a method that refuses rounded rows alone is measured without
            raise refused[0]


@dataclass
class Replayed:
    """A trace, the methods to measure on it, and what was measured, method by method and by rising budget."""

    trace: Trace
    methods: MethodsOfTrace
    results: list[Evaluation] = field(default_factory=list)


@command(BenchOptions)
def run(options: BenchOptions) -> None:
    """Replay the end of traces through selectors and compare every step with full attention.

    Where neither traces nor methods are named, a page to look at is written beside the figures, as `report` does.
    """
    roles = open_roles(options.roles, trusted=shared.trusted(options.trust, options.selector))
    chosen = ChosenMethods.of(options.selector or [], roles)
    equal = options.equal
    for method in chosen.named or ChosenMethods.of(SELECTED).methods:
        replay_device(method, options.device)  # a device that is not there is refused before anything is made
    check_figures(options.figures)
    names = options.traces or leading_traces(LEADING[:1] if options.every_method else LEADING)
    chosen = chosen if chosen.methods else ChosenMethods.of(SELECTED + _trained(names))
    replays = _planned(options, chosen, open_traces(names))
    results_folder(options.out)
    if options.indexes is not None:
        usable_folder(options.indexes)

    file = RecordFile(options.out / "bench.jsonl", options.json)
    for replay, results in _measured(options, chosen, replays):
        replay.results += results
        heads = options.per_head or (JUDGED if options.demo else False)
        file.add({**result.record(heads), "trace_meta": replay.trace.meta} for result in results)
    file.finish()

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
    for closing in filter(None, (replay_tables.verdict(every), replay_tables.finding(every))):
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


def _measured(
    options: BenchOptions, chosen: ChosenMethods, replays: Sequence[Replayed]
) -> Iterator[tuple[Replayed, list[Evaluation]]]:
    """Yield the results by rising budget of every trace and method, with a progress bar.

    A method of `all` that refuses the rows themselves goes to what is left out, with its reason.
    """
    with progress_bar() as bar:
        for replay in replays:
            trace, layers = replay.trace, usable_layers(replay.trace, options.layer_numbers)
            for (method, budgets), bits in itertools.product(replay.methods.methods, options.rounding):
                rising = sorted(budgets, key=lambda budget: budget_order(budget, trace.tokens))
                rising = rising if method.uses_budget else rising[:1]
                label = rounded_label(method.label(), bits)
                task = bar.add_task(f"{trace.name} {label}", total=options.last * len(layers) * len(rising))
                advance = functools.partial(bar.advance, task)
                try:
                    results = evaluate_budgets(
                        trace, method, rising, options.replay(bits), steps=options.steps, progress=advance
                    )
                except ValueError as error:
                    rounded = bits is not None and len(options.rounding) > 1 and not isinstance(error, ContractError)
                    if not (rounded or chosen.forgives(method, error)):
                        raise
                    replay.methods.left_out[rounded_label(method.label(), bits)] = str(error)
                else:
                    yield replay, [result.far(options.far) for result in results] if options.far else results
                bar.remove_task(task)


def _figure_paths(options: BenchOptions, replays: Sequence[Replayed], what: str = "frontier") -> list[Path]:
    """Return a figure's path for each trace."""
    return [options.out / name for name in replay_tables.figure_names([one.trace.name for one in replays], what)]


def _show_results(options: BenchOptions, replays: Sequence[Replayed], path: Path, screen: Screen) -> None:
    """Print a table and draw a frontier of each trace, and say what was left out and where records lie."""
    for replay in () if options.json else replays:
        screen.print(replay_tables.table(replay.results, options.per_head, options.wide))
    if options.figures:
        from sparseattn.reporting import plots

        for replay, figure in zip(replays, _figure_paths(options, replays), strict=True):
            plots.frontier(replay.results, figure)
            say_figure(figure)
    say_records(path)
    for replay in replays:
        left_out = {label: f"is not measured: {reason}" for label, reason in replay.methods.left_out.items()}
        for label, clause in (replay.methods.other_budgets | left_out).items():
            (errors if options.json else screen).print(plain(f"{replay.trace.name}: {label} {clause}"), soft_wrap=True)


def _compare(
    options: BenchOptions, replays: Sequence[Replayed], equal: tuple[Budget, float], screen: Screen
) -> list[list[Comparison]]:
    """Compare each trace's methods under each condition, write the records, and show them as tables or as JSON."""
    reasons = [replay.methods.left_out for replay in replays]
    compared = [layer_tables.compared(one.results, *equal, one.methods.left_out) for one in replays]
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
        layer_tables.chosen_rows(None, options.budgets),
        min(QUERIES, options.last),
        options.layer_numbers,
        options.sink,
        options.window,
        options.device,
    )
    return write_report([options.out], options.out / "report.html", explored=explored)
