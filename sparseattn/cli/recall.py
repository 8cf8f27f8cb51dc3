"""`sparseattn recall`: how many keys each index scans to find the best ones, for attention's queries and for keys."""

from __future__ import annotations

import datetime
import functools
import json as json_module
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cli.common import (
    SELECTOR_HELP,
    decimals,
    errors,
    in_a_sentence,
    integers,
    leading_traces,
    model_progress,
    open_trace,
    own_selectors,
    progress_bar,
    results_folder,
)
from sparseattn.cost_model.environment import machine, versions
from sparseattn.evaluation.builtin_traces import BUILTIN
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.evaluation.recall_sweep import Problem, check, curves
from sparseattn.evaluation.replay import usable_layers
from sparseattn.reporting import recall_tables, replay_tables
from sparseattn.reporting.terminal import Screen, plain, table_screen
from sparseattn.selectors.base import Selector
from sparseattn.selectors.registry import make_selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.utils.files import write_atomic

SELECTED = ("flat", "ivf", "hnsw", "hnsw:metric=l2", "bridge", "retrieval", "retrieval:metric=query")
KEYS = "16384,131072"
LEADS, DEPTHS = "prose", (10, 18)  # where nothing is named: a trace, and its layers a third and two thirds down
CONTROL = "keys to keys"
DIRECTIONS = ("queries to keys", CONTROL)


@dataclass(frozen=True)
class Source:
    """Keys, and what looks for them.

    Args:
        name: "synthetic", or the trace's.
        growth: file name of the picture that sources share which differ in the number of their keys alone.
        titles: task -> title; a task is a kind of queries. The control, held-out keys, is one task more.
        facts: of every record.
        gaps: task -> gap, for synthetic ones.
        keys: N.
        load: makes the problems of each task, the control's too.
    """

    name: str
    growth: str
    titles: dict[str, str]
    facts: dict[str, Any]
    gaps: dict[str, float]
    keys: int
    load: Callable[[], dict[str, list[Problem]]]


@in_a_sentence
def recall(
    traces: Annotated[
        list[str] | None,
        typer.Argument(help=f"Trace files, or built-in traces by name ({', '.join(BUILTIN)})."),
    ] = None,
    selector: Annotated[
        list[str] | None,
        typer.Option(callback=own_selectors, help=f"{SELECTOR_HELP} Default: {' '.join(SELECTED)}."),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            help=f"Synthetic keys, such as {KEYS}. Traces or --keys, only what is named is measured; neither: "
            f"layers {' and '.join(map(str, DEPTHS))} of the trace {LEADS}, in a few minutes."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="First tokens of traces to keep, such as 4096,16384: the last of them ask; several show the growth. "
            "Default: all."
        ),
    ] = None,
    gap: Annotated[
        str, typer.Option(help="How far synthetic queries look away from the directions in which keys vary.")
    ] = "0,0.26,0.4",
    spread: Annotated[float, typer.Option(help="Share of synthetic keys' variance within clusters.")] = 0.28,
    size: Annotated[int, typer.Option(help="Head size of synthetic keys.")] = 64,
    seed: Annotated[str, typer.Option(help="Of synthetic keys and queries; of several, the mean.")] = "0",
    queries: Annotated[int, typer.Option(help="Tokens at the end that ask; those before them are indexed.")] = 64,
    k: Annotated[int, typer.Option("--k", help="Keys to find, and to select.")] = 100,
    values: Annotated[
        str | None, typer.Option(help="Values of every index's knob, such as 100,200; default rising by 1.4.")
    ] = None,
    sink: Annotated[int, typer.Option(help="First tokens of a trace that are not indexed.")] = 4,
    layers: Annotated[str | None, typer.Option(help="Layers of traces, such as 0,5,17; default all.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the records, recall.jsonl, and the figures; an earlier run's are replaced.")
    ] = Path("recall"),
    json: Annotated[bool, typer.Option("--json", help="JSON lines on standard output instead of tables.")] = False,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="Draw PNGs into --out.")] = True,
) -> None:
    """Measure recall@k against the share of keys scanned, for attention's queries and, as a control, for keys.

    The figure of RetrievalAttention (arXiv 2409.10516): recall.png, of the most keys of each source; with several
    --keys also scaling.png, with several --tokens scaling-NAME.png for each trace. Selectors that learn from queries
    learn from those of the indexed tokens, in the control from the keys.
    """
    methods = _by_label([make_selector(spec) for spec in selector or SELECTED])
    turns, indices = integers(values, "--values"), integers(layers, "--layers")
    if queries < 1 or sink < 0:
        raise ValueError(f"--queries is 1 or more and --sink 0 or more, got {queries} and {sink}")
    if turns is not None and min(turns) < 1:
        raise ValueError(f"--values are 1 or more, got {values!r}")
    lengths: list[int | None] = [None]
    if tokens is not None:
        lengths = [*sorted(set(integers(tokens, "--tokens") or []))]
        if keys and not traces:
            raise ValueError("--tokens cuts traces, and --keys alone measures none: name a trace")
    if figures:
        from sparseattn.reporting import plots  # fails at once if matplotlib is missing, before any work
    sources: list[Source] = []
    if keys:
        recipe = {"size": size, "spread": spread}
        gaps, seeds = list(dict.fromkeys(decimals(gap, "--gap"))), integers(seed, "--seed") or []
        counts = sorted(set(integers(keys, "--keys") or []))
        sources += [_synthetic(count, queries, gaps, list(dict.fromkeys(seeds)), recipe) for count in counts]
    if traces or not keys:
        named = traces or leading_traces([LEADS])
        if named == [LEADS] and indices is None and not traces:
            indices = list(DEPTHS)
        with model_progress() as progress:
            opened = [open_trace(name, progress) for name in named]
        learners = [method for _, method in methods if method.learns]
        for growth, trace in zip(
            replay_tables.figure_names([one.name for one in opened], "scaling"), opened, strict=True
        ):
            cut = [trace if length is None else trace.first(length) for length in lengths]
            sources += [_trace(one, growth, queries, sink, indices, learners, k) for one in cut]
    for source in sources:
        for _, method in methods:
            check(method, source.keys, k)
    results_folder(out)

    partial = out / "recall.partial.jsonl"
    found: list[dict[str, dict[str, Curve]]] = [{} for _ in sources]  # per source: task -> label -> curve
    lines: list[str] = []
    context = {"date": datetime.date.today().isoformat(), "versions": versions(), "machine": machine()}
    for i, label, made in _measure(sources, methods, k, turns):
        fresh = []
        for task, curve in made.items():
            found[i].setdefault(task, {})[label] = curve
            which = {"source": sources[i].name, "direction": DIRECTIONS[task == CONTROL], "label": label}
            facts = {**which, "gap": sources[i].gaps.get(task)}
            fresh += [json_module.dumps({**facts, **one, **sources[i].facts, **context}) for one in curve.records()]
        lines += fresh
        write_atomic(partial, ("\n".join(lines) + "\n").encode())
        if json:
            typer.echo("\n".join(fresh))
    partial.replace(out / "recall.jsonl")

    columns = [
        [recall_tables.Recalled(title, tasks[task], tasks[CONTROL]) for task, title in source.titles.items()]
        for source, tasks in zip(sources, found, strict=True)
    ]
    if not json:
        screen = table_screen()
        for source, tasks, mine in zip(sources, found, columns, strict=True):
            for column in mine:
                screen.print(recall_tables.table(f"{column.title}, {DIRECTIONS[0]}", column.curves))
            where = f"{source.keys:,} synthetic keys" if source.gaps else mine[0].title
            screen.print(recall_tables.table(f"{where}, {CONTROL}", tasks[CONTROL]))
    if figures:
        largest = {source.growth: source.keys for source in sorted(sources, key=lambda source: source.keys)}
        drawn = [
            column
            for source, mine in zip(sources, columns, strict=True)
            for column in mine
            if source.keys == largest[source.growth]
        ]
        plots.recall(drawn, recall_tables.LEVEL, out / "recall.png")
        errors.print(f"figure: {out / 'recall.png'}", soft_wrap=True)
        for name in largest:
            grown = [(source, tasks) for source, tasks in zip(sources, found, strict=True) if source.growth == name]
            if len(grown) > 1:
                names = [*grown[0][0].titles, CONTROL]
                by_label = {
                    label: [{source.keys: tasks[task][label] for source, tasks in grown} for task in names]
                    for label, _ in methods
                }
                plots.scaling(names, by_label, recall_tables.LEVEL, out / name, grown[0][0].name)
                errors.print(f"figure: {out / name}", soft_wrap=True)
    errors.print(f"records: {out / 'recall.jsonl'}", soft_wrap=True)
    for column in (column for mine in columns for column in mine):
        (errors if json else Screen()).print(recall_tables.verdict(column), soft_wrap=True)


def _by_label(selectors: Sequence[Selector]) -> list[tuple[str, Selector]]:
    """Each under its label without the knob, which the command turns; ValueError where two differ in that alone."""
    named: dict[str, Selector] = {}
    for one in selectors:
        other = named.setdefault(one.label(knob=False), one)
        if repr(other) != repr(one):
            raise ValueError(
                f"{other.label()} and {one.label()} differ in {one.knob} alone, which this command turns: name one of "
                f"them, and the values with --values"
            )
    return list(named.items())


def _measure(
    sources: Sequence[Source], methods: Sequence[tuple[str, Selector]], k: int, values: list[int] | None
) -> Iterator[tuple[int, str, dict[str, Curve]]]:
    """(number of the source, label, task -> curve) for every source and method, with a progress bar."""
    with progress_bar() as bar:
        for i, source in enumerate(sources):
            title = next(iter(source.titles.values()))
            load = bar.add_task(f"{title}: loading", total=None)
            tasks = source.load()
            bar.remove_task(load)
            for label, method in methods:
                task = bar.add_task(f"{source.keys:,} keys {label}", total=None)
                show = functools.partial(_show, bar, task, f"{source.name}, {source.keys:,} keys, {label}")
                yield i, label, curves(method, tasks, k=k, values=values, progress=show)
                bar.remove_task(task)


def _show(bar: Any, task: Any, title: str, what: str, done: int, total: int) -> None:
    bar.update(task, description=f"{title}: {what}", completed=done, total=total)


def _synthetic(keys: int, queries: int, gaps: list[float], seeds: list[int], recipe: dict[str, Any]) -> Source:
    """Synthetic keys; queries at every gap look for the same ones. A seed stands for a layer."""
    if keys < 1:
        raise ValueError(f"--keys is 1 or more, got {keys}")
    for gap in gaps:
        synthetic(16, gap=gap, sinks=0, queries=1, **recipe)  # refuses now what it would refuse later

    def load() -> dict[str, list[Problem]]:
        tasks: dict[str, list[Problem]] = {name: [] for name in (*(f"gap {gap:g}" for gap in gaps), CONTROL)}
        for seed in seeds:
            for gap in gaps:
                trace = synthetic(keys + queries, gap=gap, seed=seed, sinks=0, **recipe)
                tasks[f"gap {gap:g}"].append(Problem.of(trace.layer(0), trace.positions, queries))
            tasks[CONTROL].append(Problem.of(trace.layer(0), trace.positions, queries, held_out=True))
        return tasks

    return Source(
        "synthetic",
        "scaling.png",
        {f"gap {gap:g}": f"gap {gap:g}, {keys:,} keys" for gap in gaps},
        {"recipe": {**recipe, "seeds": seeds, "sinks": 0}},
        {f"gap {gap:g}": gap for gap in gaps},
        keys,
        load,
    )


def _trace(
    trace: Trace, growth: str, queries: int, sink: int, layers: list[int] | None, learners: Sequence[Selector], k: int
) -> Source:
    """The end of a trace looks for the keys before it."""
    chosen = usable_layers(trace, layers)
    keys = trace.tokens - queries - sink
    if keys < k:
        raise ValueError(
            f"{trace.name} has {trace.tokens} tokens: without --queries {queries} and --sink {sink} there are "
            f"{max(keys, 0)} keys, fewer than --k {k}"
        )
    held = min(trace.shapes[index].queries or trace.tokens for index in chosen)
    if held < queries:
        raise ValueError(f"{trace.name} holds the queries of its last {held} tokens, --queries asks for {queries}")
    if learners and held < trace.tokens - sink:
        raise ValueError(
            f"{learners[0]!r} learns from the queries of the indexed tokens, and {trace.name} holds only those of its "
            f"last {held} tokens of {trace.tokens}"
        )

    def load() -> dict[str, list[Problem]]:
        tasks: dict[str, list[Problem]] = {DIRECTIONS[0]: [], CONTROL: []}
        for index in chosen:
            layer = trace.layer(index)
            tasks[DIRECTIONS[0]].append(Problem.of(layer, trace.positions, queries, sink))
            tasks[CONTROL].append(Problem.of(layer, trace.positions, queries, sink, held_out=True))
        return tasks

    facts = {"sink": sink, "tokens": trace.tokens, "trace_meta": trace.meta}
    titles = {DIRECTIONS[0]: f"trace {plain(trace.name)}, {keys:,} keys"}
    return Source(trace.name, growth, titles, facts, {}, keys, load)
