"""`sparseattn bench`: how well each method finds the rows that matter on traces, and what it reads to do so."""

from __future__ import annotations

import datetime
import functools
import itertools
import json as json_module
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cache.index_files import usable_folder
from sparseattn.cache.selection_checks import ContractError
from sparseattn.cli import common
from sparseattn.cli.bench_methods import ALL, Asked, Fitting
from sparseattn.cli.common import (
    KV_BITS_HELP,
    LEAD,
    ROLES_HELP,
    SELECTOR_HELP,
    Trust,
    errors,
    in_a_sentence,
    integers,
    leading_traces,
    model_progress,
    open_roles,
    open_trace,
    own_selectors,
    progress_bar,
    results_folder,
    say_differences,
    trusted,
)
from sparseattn.cli.report import EXPLORED, QUERIES, Explored, write_report
from sparseattn.core.budget import Budget, budget_order, parse_budget
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.builtin_traces import BUILTIN, LEADING
from sparseattn.evaluation.by_head import JUDGED, Comparison
from sparseattn.evaluation.replay import (
    Evaluation,
    check_replay,
    check_steps,
    evaluate,
    evaluate_budgets,
    replay_device,
    usable_layers,
)
from sparseattn.models.load import REFERENCE
from sparseattn.reporting import layer_tables, replay_tables
from sparseattn.reporting.terminal import Screen, plain, table_screen
from sparseattn.roles.roles import Method, rounded_label
from sparseattn.selectors.base import Selector
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import write_atomic

# Not `retrieval`, whose graphs take longer to build than all of these take together.
SELECTED = ("exact", "quest", "quest:group=each", "quest:page=8,int8=True", "lowbit", "random", "window")
# Model -> what its artefact that ships is for; compared where every trace is a built-in one of that model.
TRAINED: dict[str, tuple[str, ...]] = {REFERENCE: ("saap", "kmeans", "moments"), LEAD: ("saap", "moments")}


@in_a_sentence
def bench(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}); default {', '.join(LEADING)}, with "
            f"--selector {ALL} the first of these."
        ),
    ] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            callback=own_selectors,
            help=f"{SELECTOR_HELP} {ALL}: every NAME, as it is by default; what cannot run on a trace is left out, "
            "what reads more rows at a time than a --budget allows is measured at as many in its place, and why is "
            f"said. Default: {' '.join(SELECTED)}; for built-in traces what was trained for their model as well.",
        ),
    ] = None,
    roles: Annotated[list[Path] | None, typer.Option(help=ROLES_HELP)] = None,
    trust: Trust = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Rows beyond sink and window: numbers, shares of the context, a mass of the attention (mass:0.95, or "
            "with 2048 rows at most mass:0.95:2048), or all."
        ),
    ] = "64,256,1024",
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, such as 0,5,17; default all.")] = None,
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are decoded.")] = 32,
    far: Annotated[
        float, typer.Option(help="Only heads with at least this share of their attention beyond sink and window.")
    ] = 0.0,
    seal: Annotated[
        int | None, typer.Option(help="Rows that wait before sealing; default the selector's span.")
    ] = None,
    kv_bits: Annotated[str, typer.Option(help=KV_BITS_HELP)] = "16",
    indexes: Annotated[
        Path | None, typer.Option(help="Folder of index files: what was built once is read back. Default: none.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="To replay on; default a CUDA device if there is one, for selectors that can work there."),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the records, bench.jsonl, and the figures; an earlier run's are replaced.")
    ] = Path("bench"),
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Every head apart, in the table and in the JSON.")
    ] = False,
    by_layer: Annotated[
        bool,
        typer.Option(
            "--by-layer",
            help="Layers and heads too: where methods fail, at equal rows attended and at equal bytes, by-layer.jsonl.",
        ),
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            help="Compare where heads attend as many rows, those of sink, window and this --budget. A method that "
            "attends fewer at one --budget and more at the next is mixed of the two, token by token; one that always "
            "attends fewer is shown at its most, with its own rows, one that always attends more is left out. Default, "
            f"with --selector {ALL} or --by-layer, {layer_tables.ROWS} or the middle one."
        ),
    ] = None,
    bytes_read: Annotated[
        str | None,
        typer.Option(
            "--bytes",
            help="Compare at equal bytes: the share of the cache's, what is read to choose included. A method that "
            "reads less at one --budget and more at the next is mixed of the two, token by token, so that it reads as "
            "much; one that always reads less is shown at its largest budget, one that always reads more is left out. "
            f"Default, with --selector {ALL} or --by-layer, {layer_tables.BYTES:.0%}.",
        ),
    ] = None,
    by_step: Annotated[
        str | None,
        typer.Option(
            help="Measures to record and to draw at every decoded token too, such as recall@10,relative_error."
        ),
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Every measure in the table; default rows, bytes, error, recovered.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNG frontiers into --out.")] = True,
) -> None:
    """Replay the end of traces through selectors and compare every step with full attention.

    Where neither traces nor methods are named, a page to look at is written beside the figures, as `report` does.
    """
    demo = not (traces or selector or roles)
    budgets = list(dict.fromkeys(parse_budget(part) for part in budget.split(",")))
    asked = Asked.of(selector or [], open_roles(roles, trusted=trusted(trust, selector)))
    rounding = common.kv_bits(kv_bits)
    indices = integers(layers, "--layers")
    if not 0 <= far <= 1:
        raise ValueError(f"--far is a share of the attention, 0 to 1, got {far}")
    steps = by_step.split(",") if by_step else []
    check_steps(steps)
    every_method = ALL in (selector or [])
    comparing = by_layer or every_method or rows is not None or bytes_read is not None
    equal = layer_tables.chosen_rows(rows, budgets), layer_tables.chosen_bytes(bytes_read)
    for method in asked.named or Asked.of(SELECTED).methods:
        replay_device(method, device)  # a device that is not there is refused before anything is made
    if figures:
        from sparseattn.reporting import plots  # fails if matplotlib is missing, before any work
    names = traces or leading_traces(LEADING[:1] if every_method else LEADING)
    asked = asked if asked.methods else Asked.of(_defaults(names))
    with model_progress() as progress:
        opened = [open_trace(name, progress) for name in names]
    plan: list[tuple[Trace, Fitting]] = []

    def check(trace: Trace, there: list[int], method: Method, served: Sequence[Budget]) -> None:
        replay_device(method, device)
        refused: list[ValueError] = []
        for bits in rounding:
            try:
                check_replay(trace, served, method, sink, window, last, seal, there, bits)
            except ValueError as error:
                refused.append(error)
        if len(refused) == len(rounding):  # a method that refuses rounded rows alone is measured without
            raise refused[0]

    for trace in opened:
        say_differences(trace)
        checked = functools.partial(check, trace, usable_layers(trace, indices))
        plan.append((trace, asked.fitting(checked, budgets)))
    lacking = [fit.lacking for _, fit in plan]  # per trace, label -> why it is not measured
    if far:  # a trace without such a head fails now, not after the traces before it; Window builds no index
        for trace in opened:
            evaluate(trace, "window", 1, sink=sink, window=window, last=last, layers=indices, device=device).far(far)
    results_folder(out)

    partial = out / "bench.partial.jsonl"
    found: list[list[Evaluation]] = [[] for _ in opened]  # per trace
    lines: list[str] = []
    context = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    if indexes is not None:
        usable_folder(indexes)
    settings: dict[str, Any] = {"sink": sink, "window": window, "last": last, "layers": indices, "seal": seal}
    settings |= {"indexes": indexes, "device": device, "steps": steps}
    for i, every in _measure(plan, settings, asked, rounding):
        new = [one.far(far) for one in every] if far else every
        found[i] += new
        apart = per_head or (JUDGED if demo else False)
        fresh = [json_module.dumps({**one.record(apart), "trace_meta": opened[i].meta, **context}) for one in new]
        lines += fresh
        write_atomic(partial, ("\n".join(lines) + "\n").encode())
        if json:
            typer.echo("\n".join(fresh))
    partial.replace(out / "bench.jsonl")
    screen = table_screen(wide)
    if not json:
        for results in found:
            screen.print(replay_tables.table(results, per_head, wide))
    if figures:
        for results, name in zip(found, replay_tables.figure_names([trace.name for trace in opened]), strict=True):
            plots.frontier(results, out / name)
            errors.print(f"figure: {out / name}", soft_wrap=True)
    errors.print(f"records: {out / 'bench.jsonl'}", soft_wrap=True)
    for trace, fit in plan:
        left_out = {label: f"is not measured: {reason}" for label, reason in fit.lacking.items()}
        for label, said in (fit.other | left_out).items():
            (errors if json else screen).print(plain(f"{trace.name}: {label} {said}"), soft_wrap=True)
    compared: list[list[Comparison]] = []
    if comparing:
        shown = None if json else screen
        compared = _compare(found, opened, equal, lacking, out / "by-layer.jsonl", context, shown, by_layer)
    else:
        (out / "by-layer.jsonl").unlink(missing_ok=True)  # an earlier run's, of other measurements
    if by_layer and figures:
        for draw, what in ((plots.by_layer, "by-layer"), (plots.alike, "heads")):
            for ones, name in zip(
                compared, replay_tables.figure_names([one.name for one in opened], what), strict=True
            ):
                if ones:
                    draw(ones, out / name)
                    errors.print(f"figure: {out / name}", soft_wrap=True)
    if figures:
        for measure in steps:
            for results, name in zip(
                found, replay_tables.figure_names([one.name for one in opened], measure), strict=True
            ):
                plots.by_step(results, measure, out / name)
                errors.print(f"figure: {out / name}", soft_wrap=True)
    every = [one for results in found for one in results]
    for closing in filter(None, (replay_tables.verdict(every), replay_tables.finding(every))):
        (errors if json else Screen()).print(closing, soft_wrap=True)
    if demo and figures:
        explored = Explored(
            names[:1],
            (*EXPLORED, *_trained(names)[:1]),
            layer_tables.chosen_rows(None, budgets),
            min(QUERIES, last),
            indices,
            sink,
            window,
            device,
        )
        errors.print(f"report: {write_report([out], out / 'report.html', explored=explored)}", soft_wrap=True)


def _defaults(names: Sequence[str]) -> tuple[str, ...]:
    """The selectors to compare on these traces where none is named."""
    return SELECTED + _trained(names)


def _trained(names: Sequence[str]) -> tuple[str, ...]:
    """The selectors that were trained for the model of these traces, if they have one in common."""
    models = {BUILTIN[name].model if name in BUILTIN else "" for name in names}
    return TRAINED.get(models.pop(), ()) if len(models) == 1 else ()


def _compare(
    found: Sequence[Sequence[Evaluation]],
    traces: Sequence[Trace],
    equal: tuple[Budget, float],
    lacking: Sequence[dict[str, str]],
    path: Path,
    context: dict[str, Any],
    screen: Screen | None,
    by_layer: bool,
) -> list[list[Comparison]]:
    """Compares each trace's methods under each condition, writes the records, and shows them on `screen` or as JSON."""
    compared = [layer_tables.compared(results, *equal, why) for results, why in zip(found, lacking, strict=True)]
    lines = [
        json_module.dumps({**one.record(), "trace_meta": trace.meta, **context})
        for (ones, _), trace in zip(compared, traces, strict=True)
        for one in ones
    ]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())
    if screen is None and lines:
        typer.echo("\n".join(lines))
    for (ones, said), why in zip(compared, lacking, strict=True):
        for one in ones:
            if screen is not None:
                for table in (layer_tables.overview(one), *(layer_tables.tables(one) if by_layer else ())):
                    screen.print(table)
            said += layer_tables.left_out(one, why) + (layer_tables.sentences(one) if by_layer else [])
        for sentence in said:
            (screen or errors).print(sentence, soft_wrap=True)
    errors.print(f"records: {path}", soft_wrap=True)
    return [ones for ones, _ in compared]


def _measure(
    plan: Sequence[tuple[Trace, Fitting]], settings: dict[str, Any], asked: Asked, rounding: Sequence[int | None]
) -> Iterator[tuple[int, list[Evaluation]]]:
    """(number of the trace, results by rising budget) for every trace and method, with a progress bar.

    A method of `all` that refuses the rows themselves goes to what the plan lacks, with its reason.
    """
    with progress_bar() as bar:
        for i, (trace, fit) in enumerate(plan):
            for (method, budgets), bits in itertools.product(fit.methods, rounding):
                rising = sorted(budgets, key=lambda one: budget_order(one, trace.tokens))
                mine = rising if method.uses_budget else rising[:1]
                steps = settings["last"] * len(usable_layers(trace, settings["layers"])) * len(mine)
                named = rounded_label(repr(method) if isinstance(method, Selector) else method.label(), bits)
                task = bar.add_task(f"{trace.name} {named}", total=steps)
                advance = functools.partial(bar.advance, task)
                try:
                    results = evaluate_budgets(trace, method, mine, bits=bits, progress=advance, **settings)
                except ValueError as error:
                    rounded = bits is not None and len(rounding) > 1 and not isinstance(error, ContractError)
                    if not (rounded or asked.forgives(method, error)):
                        raise
                    fit.lacking[rounded_label(method.label(), bits)] = str(error)
                else:
                    yield i, results
                bar.remove_task(task)
