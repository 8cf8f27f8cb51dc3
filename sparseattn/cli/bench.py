"""`sparseattn bench`: how well each method finds the rows that matter on traces, and what it reads to do so."""

from __future__ import annotations

import datetime
import difflib
import json as json_module
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from sparseattn.budget import Budget, budget_rows, parse_budget
from sparseattn.builtin import BUILTIN, builtin_trace
from sparseattn.cli.common import errors, in_a_sentence, integers, progress_bar
from sparseattn.environment import machine, versions
from sparseattn.files import write_atomic
from sparseattn.metrics import Evaluation, check_replay, evaluate_budgets, usable_layers
from sparseattn.selectors import SELECTORS, make_selector
from sparseattn.traces import Trace

SELECTED = ("exact", "exact:group=softmax", "quest", "quest:group=each", "random", "window")
TOLERANCE = 0.01
WIDE = 150


@in_a_sentence
def bench(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)}); default the built-in ones."
        ),
    ] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help=f"NAME[:arg=value,...], NAME one of {', '.join(SELECTORS)} or package.module:Class; repeat for more. "
            f"Default: {' '.join(SELECTED)}."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(help="Rows beyond sink and window: numbers, shares of the context, or all.")
    ] = "64,1%,256,512,1024,2048",
    sink: Annotated[int, typer.Option(help="First rows that every query reads.")] = 4,
    window: Annotated[int, typer.Option(help="Last rows that every query reads.")] = 64,
    layers: Annotated[str | None, typer.Option(help="Layers to measure, such as 0,5,17; default all.")] = None,
    last: Annotated[int, typer.Option(help="Tokens at the end of each trace that are decoded.")] = 32,
    seal: Annotated[
        int | None, typer.Option(help="Rows that wait before sealing; default the selector's span.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for bench.jsonl and the figures.")] = Path("bench"),
    per_head: Annotated[
        bool, typer.Option("--per-head", help="Every head apart, in the table and in the JSON.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNG frontiers into --out.")] = True,
) -> None:
    """Replay the end of traces through selectors and compare every step with full attention."""
    budgets = list(dict.fromkeys(parse_budget(part) for part in budget.split(",")))
    methods = list({repr(one): one for one in map(make_selector, selector or SELECTED)}.values())
    indices = integers(layers, "--layers")
    names = traces or list(BUILTIN)
    if figures:
        from sparseattn.cli import plots  # fails at once if matplotlib is missing, before any work
    with progress_bar() as bar:
        opened = [_open(name, bar) for name in names]
    for trace in opened:
        usable_layers(trace, indices)
        for method in methods:
            check_replay(trace, budgets, method, sink, window, last, seal)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out is a folder, {out} is a file")
    out.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=out).close()  # a folder that cannot be written fails now, not after the work

    context = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    found: list[list[Evaluation]] = [[] for _ in opened]  # per trace
    lines: list[str] = []
    with progress_bar() as bar:
        for trace, results in zip(opened, found, strict=True):
            for method in methods:
                asked = sorted(budgets, key=lambda one: budget_rows(one, trace.tokens))
                asked = asked if method.uses_budget else asked[:1]
                steps = last * len(usable_layers(trace, indices)) * len(asked)
                task = bar.add_task(f"{trace.name} {method!r}", total=steps)
                new = evaluate_budgets(
                    trace,
                    method,
                    asked,
                    sink=sink,
                    window=window,
                    last=last,
                    layers=indices,
                    seal=seal,
                    progress=lambda n, task=task: bar.advance(task, n),  # type: ignore[misc]
                )
                bar.remove_task(task)
                results += new
                fresh = [
                    json_module.dumps({**one.record(per_head), "trace_meta": trace.meta, **context}) for one in new
                ]
                lines += fresh
                write_atomic(out / "bench.jsonl", ("\n".join(lines) + "\n").encode())
                if json:
                    for line in fresh:
                        typer.echo(line)
    if not json:
        # A pipe or a log has no width of its own; the whole table needs this much to keep its numbers whole.
        screen = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
        for results in found:
            screen.print(_table(results, per_head, screen.width >= WIDE))
    if figures:
        for i, results in enumerate(found):
            name = Path(results[0].trace).stem
            same = [Path(others[0].trace).stem for others in found[:i]].count(name)
            path = out / (f"frontier-{name}-{same + 1}.png" if same else f"frontier-{name}.png")
            plots.frontier(results, path)
            errors.print(f"figure: {path}", soft_wrap=True)
    errors.print(f"records: {out / 'bench.jsonl'}", soft_wrap=True)
    closing = verdict([one for results in found for one in results])
    (errors if json else Console(highlight=False)).print(closing, soft_wrap=True)


def _open(name: str, bar: Any) -> Trace:
    if name not in BUILTIN:
        if not Path(name).exists():
            near = difflib.get_close_matches(name, BUILTIN, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} is neither a file nor a built-in trace ({', '.join(BUILTIN)}){hint}")
        return Trace.open(name)
    task = bar.add_task(f"built-in trace {name}", total=None)
    trace = builtin_trace(name, lambda done, total: bar.update(task, completed=done, total=total))
    bar.remove_task(task)
    return trace


def _table(results: Sequence[Evaluation], per_head: bool, wide: bool) -> Table:
    one = results[0]
    settings = one.settings
    table = Table(
        title=(
            f"{one.trace}: last {settings['last']} of {settings['tokens']} tokens, layers "
            f"{','.join(map(str, one.layers))}, sink {settings['sink']}, window {settings['window']}; weight on "
            f"indexed rows {one.mean('far_mass'):.2f}; mean over heads (worst head)"
        ),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    columns = COLUMNS if wide else [column for column in COLUMNS if column[0] in NARROW]
    table.add_column("selector")
    for name in ("budget", *(["layer", "head"] if per_head else []), *(column[0] for column in columns)):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        if not per_head:
            table.add_row(one.selector, budget_label(one.budget), *(_cell(one, column, None) for column in columns))
            continue
        for i, layer in enumerate(one.layers):
            for head in range(one.heads["mass"].shape[1]):
                cells = [_cell(one, column, (i, head)) for column in columns]
                table.add_row(one.selector, budget_label(one.budget), str(layer), str(head), *cells)
    return table


# Title, measure, digits, factor, and whether the worst head stands beside the mean.
COLUMNS = (
    ("rows", "attended", 0, 1, False),
    ("distinct", "distinct_rows", 0, 1, False),
    ("R@1", "recall@1", 2, 1, False),
    ("R@10", "recall@10", 2, 1, False),
    ("R@100", "recall@100", 2, 1, False),
    ("mass", "mass", 3, 1, True),
    ("far", "recovered", 2, 1, True),
    ("error %", "relative_error", 1, 100, True),
    ("scan %", "scanned_share", 1, 100, False),
    ("rows %", "attended_share", 1, 100, False),
    ("bytes %", "bytes_share", 1, 100, False),
)
NARROW = ("rows", "R@100", "error %", "bytes %")  # what a terminal of 80 columns can hold


def _cell(one: Evaluation, column: tuple[str, str, int, int, bool], at: tuple[int, int] | None) -> str:
    _, measure, digits, factor, worst = column

    def show(value: float) -> str:
        return "?" if math.isnan(value) else f"{value * factor:.{digits}f}"

    if at is not None:
        return show(float(one.heads[measure][at]))
    return show(one.mean(measure)) + (f" ({show(one.worst(measure))})" if worst else "")


def budget_label(budget: Budget) -> str:
    """A budget as it is written on the command line."""
    if budget is None:
        return "all"
    return f"{budget:.6g}" if isinstance(budget, int) else f"{100 * budget:.6g}%"


def verdict(results: Sequence[Evaluation]) -> str:
    """The closing line: the fewest bytes whose mean output error stays within 1 % on every trace."""
    pairs: dict[tuple[str, str], list[Evaluation]] = {}
    for one in results:
        pairs.setdefault((one.selector, budget_label(one.budget)), []).append(one)
    scored = []
    for (method, budget), ones in pairs.items():
        error = max(one.mean("relative_error") for one in ones)
        read = sum(one.mean("bytes_share") for one in ones) / len(ones)
        if math.isnan(read):
            continue  # it does not say what it reads to choose, so it cannot be called cheap
        oracle = " (it scores every key)" if min(one.mean("scanned_share") for one in ones) > 0.5 else ""
        scored.append((error, read, f"{method} at budget {budget}{oracle}"))
    if not scored:
        return "No selector reports what it reads, so none can be called the cheapest."
    within = [entry for entry in scored if entry[0] <= TOLERANCE and entry[1] < 1]
    if within:
        error, read, name = min(within, key=lambda entry: entry[1])
        return (
            f"Cheapest within {TOLERANCE:.0%} output error on every trace: {name}, with an error of {error:.2%} and "
            f"{read:.1%} of the cache's bytes read."
        )
    error, read, name = min(scored)
    return (
        f"Nothing measured stays within {TOLERANCE:.0%} output error on every trace and reads less than full attention "
        f"does; nearest is {name}, with an error of {error:.2%} and {read:.1%} of the cache's bytes read."
    )
