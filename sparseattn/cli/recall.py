"""`sparseattn recall`: how many keys each index scans to find the best ones, for attention's queries and for keys."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sparseattn.cli import values
from sparseattn.cli.command import errors
from sparseattn.cli.done_items import DoneItems, key_of_method
from sparseattn.cli.inputs import leading_traces, open_traces
from sparseattn.cli.progress import progress_bar
from sparseattn.cli.recall_options import DEPTHS, LEADS, RecallOptions
from sparseattn.cli.results import RecordFile, check_figures, own_folder, say_figure, say_records
from sparseattn.cost_model.environment import machine
from sparseattn.evaluation import curve_files
from sparseattn.evaluation.recall_curve import Curve
from sparseattn.evaluation.recall_sweep import Problem, check, curves
from sparseattn.evaluation.replay_settings import usable_layers
from sparseattn.reporting import recall_tables, replay_tables
from sparseattn.reporting.terminal import Screen, plain, table_screen
from sparseattn.selectors.base import Selector
from sparseattn.traces.synthetic import synthetic
from sparseattn.traces.trace import Trace
from sparseattn.utils.ranks import JobRanks, of_job

CONTROL = "keys to keys"
DIRECTIONS = ("queries to keys", CONTROL)


@dataclass(frozen=True)
class KeySource:
    """Keys, and what looks for them.

    Args:
        name: "synthetic", or the trace's.
        growth: file name of the picture that sources share which differ in the number of their keys alone.
        titles: task -> title; a task is a kind of queries. The control, held-out keys, is one task more.
        facts: of every record.
        gaps: task -> gap, for synthetic ones.
        keys: N.
        load: makes the problems of each task, the control's too.
        layers: of a trace.
    """

    name: str
    growth: str
    titles: dict[str, str]
    facts: dict[str, Any]
    gaps: dict[str, float]
    keys: int
    load: Callable[[], dict[str, list[Problem]]]
    layers: Sequence[int] = ()


def run(options: RecallOptions) -> None:
    """Run `sparseattn recall`."""
    methods = options.methods
    check_figures(options.figures)
    sources = (_synthetic_sources(options) if options.keys else []) + _trace_sources(options)
    for source in sources:
        for _, method in methods:
            check(method, source.keys, options.k)
    ranks = of_job()
    with own_folder(options.out, "recall", ranks):
        _run(options, sources, ranks)


def _run(options: RecallOptions, sources: Sequence[KeySource], ranks: JobRanks | None) -> None:
    """Measure every index on every source, write the records, and show what came."""
    measured: list[dict[str, dict[str, Curve]]] = [{} for _ in sources]  # per source: task -> label -> curve
    done = DoneItems(options.out / "recall.items")
    if ranks:
        _share(ranks, done, sources, options)
        if not ranks.first:
            return
    file = RecordFile(options.out / "recall.jsonl", options.json)
    for i, label, curve_of_task in _measure(sources, options, done):
        for task, curve in curve_of_task.items():
            measured[i].setdefault(task, {})[label] = curve
        file.add(_records(sources[i], label, curve_of_task))
    file.finish()
    done.remove()

    columns = [
        [recall_tables.Recalled(title, tasks[task], tasks[CONTROL]) for task, title in source.titles.items()]
        for source, tasks in zip(sources, measured, strict=True)
    ]
    if not options.json:
        _show_tables(sources, measured, columns)
    say_records(file.path)
    if options.figures:
        _draw(options, sources, measured, columns)
    for column in itertools.chain.from_iterable(columns):
        (errors if options.json else Screen()).print(recall_tables.verdict(column), soft_wrap=True)


def _records(source: KeySource, label: str, curve_of_task: dict[str, Curve]) -> Iterator[dict[str, Any]]:
    """Yield the points of an index's curves, each with what it is of."""
    for task, curve in curve_of_task.items():
        facts = {"source": source.name, "direction": DIRECTIONS[task == CONTROL], "label": label}
        for point in curve.records():
            yield {**facts, "gap": source.gaps.get(task), **point, **source.facts}


def _show_tables(
    sources: Sequence[KeySource],
    measured: Sequence[dict[str, dict[str, Curve]]],
    columns: Sequence[Sequence[recall_tables.Recalled]],
) -> None:
    """Print a table for each task of each source."""
    screen = table_screen()
    for source, tasks, of_source in zip(sources, measured, columns, strict=True):
        for column in of_source:
            screen.print(recall_tables.table(f"{column.title}, {DIRECTIONS[0]}", column.curves))
        where = f"{source.keys:,} synthetic keys" if source.gaps else of_source[0].title
        screen.print(recall_tables.table(f"{where}, {CONTROL}", tasks[CONTROL]))


def _draw(
    options: RecallOptions,
    sources: Sequence[KeySource],
    measured: Sequence[dict[str, dict[str, Curve]]],
    columns: Sequence[Sequence[recall_tables.Recalled]],
) -> None:
    """Draw the curves of the most keys of each source, and how they grow with the keys where there are several."""
    from sparseattn.reporting import plots

    largest = {source.growth: source.keys for source in sorted(sources, key=lambda source: source.keys)}
    drawn = [
        column
        for source, of_source in zip(sources, columns, strict=True)
        for column in of_source
        if source.keys == largest[source.growth]
    ]
    plots.recall(drawn, recall_tables.LEVEL, options.out / "recall.png")
    say_figure(options.out / "recall.png")
    for name in largest:
        grown = [(source, tasks) for source, tasks in zip(sources, measured, strict=True) if source.growth == name]
        if len(grown) > 1:
            names = [*grown[0][0].titles, CONTROL]
            by_label = {
                label: [{source.keys: tasks[task][label] for source, tasks in grown} for task in names]
                for label, _ in options.methods
            }
            plots.scaling(names, by_label, recall_tables.LEVEL, options.out / name, grown[0][0].name)
            say_figure(options.out / name)


def _items(sources: Sequence[KeySource], options: RecallOptions, done: DoneItems) -> list[tuple[int, int, Path]]:
    """Return every source with every method, by number, and the file of what several processes find."""
    items = []
    for i, source in enumerate(sources):
        keys = {"name": source.name, "keys": source.keys, "facts": source.facts, "gaps": source.gaps}
        for m, (_, method) in enumerate(options.methods):
            how = {"k": options.k, "knobs": options.knobs, "queries": options.queries, "layers": source.layers}
            items.append((i, m, done.path(keys, how, key_of_method(method))))
    return items


def _share(ranks: JobRanks, done: DoneItems, sources: Sequence[KeySource], options: RecallOptions) -> None:
    """Measure the items that this process takes; the source of the last one stays loaded."""
    items = _items(sources, options, done)
    load = functools.lru_cache(maxsize=1)(lambda i: sources[i].load())

    def measure(place: int) -> tuple[Any, dict[str, Tensor]]:
        i, m, _ = items[place]
        return curve_files.written(curves(options.methods[m][1], load(i), k=options.k, values=options.knobs))

    done.share(ranks, [path for _, _, path in items], [sources[i].keys for i, _, _ in items], measure)


def _measure(
    sources: Sequence[KeySource], options: RecallOptions, done: DoneItems
) -> Iterator[tuple[int, str, dict[str, Curve]]]:
    """Yield (number of the source, label, task -> curve) for every source and method, with a progress bar; what
    several processes have measured is read."""
    items = _items(sources, options, done) if done.folder.is_dir() else []
    known = {(i, m): measured for i, m, path in items if (measured := done.read(path)) is not None}
    with progress_bar() as bar:
        for i, source in enumerate(sources):
            title = next(iter(source.titles.values()))
            tasks: dict[str, list[Problem]] | None = None
            for m, (label, method) in enumerate(options.methods):
                if (i, m) in known:
                    yield i, label, curve_files.read(*known[i, m])
                    continue
                if tasks is None:
                    load = bar.add_task(f"{title}: loading", total=None)
                    tasks = source.load()
                    bar.remove_task(load)
                task = bar.add_task(f"{source.keys:,} keys {label}", total=None)
                show = functools.partial(_show, bar, task, f"{source.name}, {source.keys:,} keys, {label}")
                yield i, label, curves(method, tasks, k=options.k, values=options.knobs, progress=show)
                bar.remove_task(task)


def _show(bar: Any, task: Any, title: str, what: str, done: int, total: int) -> None:
    bar.update(task, description=f"{title}: {what}", completed=done, total=total)


def _synthetic_sources(options: RecallOptions) -> list[KeySource]:
    """Return synthetic keys, a source for each number of them."""
    recipe = {"size": options.size, "spread": options.spread}
    gaps = list(dict.fromkeys(values.decimals(options.gap, "--gap")))
    seeds = list(dict.fromkeys(values.integers(options.seed, "--seed") or []))
    counts = sorted(set(values.integers(options.keys, "--keys") or []))
    return [_synthetic(count, options.queries, gaps, seeds, recipe) for count in counts]


def _trace_sources(options: RecallOptions) -> list[KeySource]:
    """Return traces as they are named or, where nothing is named, the leading one, cut to each number of tokens."""
    layers = values.integers(options.layers, "--layers")
    if options.keys and not options.traces:
        return []
    named = options.traces or leading_traces([LEADS])
    if named == [LEADS] and layers is None and not options.traces:
        layers = list(DEPTHS)
    traces = open_traces(named)
    learners = [method for _, method in options.methods if method.learns]
    sources = []
    for growth, trace in zip(
        replay_tables.figure_names([trace.name for trace in traces], "scaling"), traces, strict=True
    ):
        for count in options.token_counts:
            cut = trace if count is None else trace.first(count)
            sources.append(_trace(cut, growth, options.queries, options.sink, layers, learners, options.k))
    return sources


def _synthetic(keys: int, queries: int, gaps: list[float], seeds: list[int], recipe: dict[str, Any]) -> KeySource:
    """Return synthetic keys; queries at every gap look for the same ones. A seed stands for a layer."""
    if keys < 1:
        raise ValueError(f"--keys must be 1 or more, got {keys}")
    # Keys, and queries that train, in float32: those of every gap and seed are held, of one head at least.
    traces, has = len(gaps) * len(seeds), machine().get("memory_gib")
    takes = 8 * (keys + queries) * recipe["size"] * traces // 2**30
    if has is not None and takes > has:
        raise ValueError(
            f"--keys {keys} and --queries {queries} of --size {recipe['size']} take {takes:,} GiB "
            f"for {traces} gaps and seeds, and this machine has {has}"
        )
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

    return KeySource(
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
) -> KeySource:
    """Return the end of a trace, which looks for the keys before it."""
    chosen = usable_layers(trace, layers)
    keys = trace.tokens - queries - sink
    if keys < k:
        raise ValueError(
            f"{trace.name} has {trace.tokens} tokens: without --queries {queries} and --sink {sink} there are "
            f"{max(keys, 0)} keys, fewer than --k {k}"
        )
    recorded = min(trace.shapes[index].queries or trace.tokens for index in chosen)
    if recorded < queries:
        raise ValueError(f"{trace.name} has the queries of its last {recorded} tokens, fewer than --queries {queries}")
    if learners and recorded < trace.tokens - sink:
        raise ValueError(
            f"{learners[0]!r} learns from the queries of the indexed tokens, and {trace.name} has only those of its "
            f"last {recorded} tokens of {trace.tokens}"
        )

    def load() -> dict[str, list[Problem]]:
        tasks: dict[str, list[Problem]] = {DIRECTIONS[0]: [], CONTROL: []}
        for index in chosen:
            trace.verify(index)
            layer = trace.layer(index)
            tasks[DIRECTIONS[0]].append(Problem.of(layer, trace.positions, queries, sink))
            tasks[CONTROL].append(Problem.of(layer, trace.positions, queries, sink, held_out=True))
        return tasks

    facts = {"sink": sink, "tokens": trace.tokens, "trace_meta": trace.meta}
    titles = {DIRECTIONS[0]: f"trace {plain(trace.name)}, {keys:,} keys"}
    return KeySource(trace.name, growth, titles, facts, {}, keys, load, chosen)
