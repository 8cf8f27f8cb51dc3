"""How one decode step grows with the context, the batch and the budget, against dense attention.

``python -m benchmarks.scaling`` from the repository root writes ``benchmarks/results/scaling-DEVICE.json``, anew after
each point, and a picture. Needs Linux.

Each sweep changes one size and times as `benchmarks.speed` does. A slope is that of a straight line through the
logarithms of size and time: 0 for a cost that does not grow, 1 for one in proportion. All points of a sweep have as
many KV heads as fit at its largest, so that slopes compare equal work; what does not fit with one head is left out and
named.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks import records
from benchmarks.bench import Bench
from benchmarks.common import add_common, header, settle_common
from benchmarks.inputs import Inputs, Shape
from benchmarks.measure import Timer, peak_memory
from benchmarks.methods import Method, check_fit
from benchmarks.rounds import Copy
from benchmarks.step import filled
from sparseattn.cli.values import integers
from sparseattn.core import step_cost
from sparseattn.core.budget import budget_record, parse_budget
from sparseattn.cost_model.environment import machine
from sparseattn.cost_model.measure import Measuring
from sparseattn.reporting.line_style import name_ends, room, style
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.utils.tensors import STORED, stored_dtype

SELECTED = ("quest", "saap")
BETWEEN, LEAST = 2, 10  # rounds of measuring the machine after each point, and in all
PARTS = ("step", "select", "attend", "dense")
SWEEPS = {  # what changes -> its sizes, and what else differs from the options
    "rows": "8192,32768,131072,524288,1048576",
    "batch": "1,4,16,64",
    "budget": "256,512,1024,2048,4096,8192",
}


def points(options: argparse.Namespace, sweep: str) -> tuple[list[tuple[int, Shape, Any]], list[int]]:
    """Size, shape and budget (None: the selector's) of each point, all with as many KV heads as fit at the largest; and
    the sizes left out."""
    made, left = [], []
    for size in getattr(options, f"{sweep}_sizes"):
        rows = {"rows": size, "batch": options.batch_rows, "budget": options.rows}[sweep]
        batch = size if sweep == "batch" else 1
        shape = Shape(batch, options.heads, options.group, rows, options.size, options.dtype, options.device)
        if shape.bytes // options.heads > options.memory * 2**30:
            left.append(size)
        else:
            made.append((size, shape, size if sweep == "budget" else None))
    heads = options.heads
    for _, shape, _ in made:
        heads = min(heads, int(options.memory * 2**30 // (shape.bytes // shape.heads)))
    return [(size, replace(shape, heads=heads), budget) for size, shape, budget in made], left


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Of the line of least squares through `log(size)` and `log(seconds)`; None for fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(size) for size in sizes], [math.log(one) for one in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return round(across / sum((a - mean_x) ** 2 for a in x), 4)


def medians(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the parts of `figures`; dense is its fastest way."""
    seconds = {name: one["median"] for name, one in result["seconds"].items()}
    return {name: seconds["dense:" + result["dense"] if name == "dense" else name] for name in PARTS}


def slopes(swept: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Selector -> part -> slope, of a sweep's points."""
    out: dict[str, dict[str, float | None]] = {}
    for spec in dict.fromkeys(point["selector"] for point in swept):
        own = [point for point in swept if point["selector"] == spec]
        sizes = [point["at"] for point in own]
        out[spec] = {name: slope(sizes, [medians(point)[name] for point in own]) for name in PARTS}
    return out


def run(
    options: argparse.Namespace, methods: Sequence[Method], say: Callable[[str], None], after: Callable[[Any], None]
) -> dict[str, Any]:
    """All sweeps; `after` every point it is given the results so far."""
    timer, copy = Timer(options.device, options.evict << 20), Copy(options.device, options.copy)
    results: dict[str, Any] = {}
    for sweep in options.sweep:
        chosen, left = points(options, sweep)
        result = results[sweep] = {"left_out": left, "points": [], "slopes": {}}
        caches: dict[Shape, list[tuple[int, Any]]] = {}
        for at, shape, budget in chosen:
            caches.setdefault(shape, []).append((at, budget))
        for shape, budgets in caches.items():
            say(f"{sweep}: {shape.rows} rows, {shape.batch} x {shape.heads} KV heads, {shape.dtype}")
            inputs = Inputs(shape)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "artefact.safetensors"
                trained = {}
                if any(issubclass(method.kind, Partitioned) for method in methods):
                    trained = inputs.artefact(path, options.buckets, options.hidden)
                bench = Bench(inputs, path, timer, copy, options)
                for method in methods:
                    cache = filled(method, inputs, path, options).cache
                    for at, given in budgets:
                        budget = method.budget if given is None else given
                        figures = bench.steps(cache, budget)[2]
                        point = {
                            "at": at,
                            "selector": method.spec,
                            "budget": budget_record(budget),
                            **shape.as_dict(),
                            **({"artefact": trained} if issubclass(method.kind, Partitioned) else {}),
                            **figures,
                        }
                        result["points"].append(point)
                        result["slopes"] = slopes(result["points"])
                        after(results)
                    del cache
    return results


def tables(record: Mapping[str, Any]) -> list[Table]:
    """A sweep each: times, ratios and slopes."""
    made = []
    for sweep, result in record["sweeps"].items():
        left = f"; left out: {result['left_out']}" if result["left_out"] else ""
        title = f"{sweep}; times in ms{left}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        table.add_column("selector")
        for name in (sweep, "KV heads", "read", *PARTS, "to dense", "of bytes"):
            table.add_column(name, justify="right", no_wrap=True)
        for point in result["points"]:
            share = point.get("share_of_bandwidth")
            table.add_row(
                point["selector"],
                str(point["at"]),
                f"{point['batch']} x {point['heads']}",
                f"{point['rows_read']:.0f}",
                *(f"{seconds * 1e3:.3f}" for seconds in medians(point).values()),
                f"{point['speed_up']['median']:.2f}",
                "" if share is None else f"{share:.0%}",
            )
        for spec, parts in result["slopes"].items():
            row = (f"{parts[name]:.2f}" if parts[name] is not None else "" for name in PARTS)
            table.add_row(spec, "slope", "", "", *row, "", "")
        made.append(table)
    return made


def short(size: int) -> str:
    """8192 as 8k, 1048576 as 1M, 1000 as itself."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def picture(record: Mapping[str, Any], path: Path) -> None:
    """A panel a sweep: steps solid, their attention dotted, dense crossed. ImportError without matplotlib."""
    from matplotlib.figure import Figure

    from sparseattn.reporting.plots.panels import save

    sweeps = {name: one for name, one in record["sweeps"].items() if one["points"]}
    specs = dict.fromkeys(spec for one in sweeps.values() for spec in one["slopes"])
    beside, height = room(["best dense", *(f"{spec}: {name}" for spec in specs for name in ("step", "attend"))])
    figure = Figure(figsize=((2.2 + beside) * len(sweeps), max(3.4, height)), layout="constrained")
    panels: Any = figure.subplots(1, len(sweeps), squeeze=False)[0]
    for axis, (sweep, result) in zip(panels, sweeps.items(), strict=True):
        for k, spec in enumerate(result["slopes"]):
            own = [point for point in result["points"] if point["selector"] == spec]
            sizes = [point["at"] for point in own]
            for name, line in (("step", "-"), ("attend", ":")):
                look = {**style(k, f"{spec}: {name}"), "linestyle": line}
                axis.plot(sizes, [medians(point)[name] * 1e3 for point in own], **look)
        first = [point for point in result["points"] if point["selector"] == next(iter(result["slopes"]))]
        sizes = [point["at"] for point in first]
        axis.plot(sizes, [medians(point)["dense"] * 1e3 for point in first], "k-x", label="best dense")
        one = first[0]
        fixed = {"rows": f"budget {one['budget']}", "batch": f"{one['rows']} rows", "budget": f"{one['rows']} rows"}
        axis.set(xscale="log", yscale="log", xlabel=sweep)
        axis.set_title(f"{fixed[sweep]}, {one['heads']} KV heads", fontsize=10)
        axis.set_xticks(sizes, [short(size) for size in sizes], fontsize=8)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    panels[0].set_ylabel("ms a step")
    devices = [one["name"] for one in record["machine"]["cuda_devices"]] or [record["machine"]["processor"]]
    made = f"{record['dtype']}, D {record['size']}, G {record['group']}"
    figure.suptitle(f"{made}; {devices[0]}, torch {record['versions']['torch']}", fontsize=10)
    name_ends(figure, panels)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description="One decode step against context, batch and budget."
    )
    out.add_argument("sweep", nargs="*", metavar="SWEEP", help=f"{', '.join(SWEEPS)}; default all")
    for sweep, sizes in SWEEPS.items():
        out.add_argument(f"--{sweep}-sizes", default=sizes, help=f"with commas; default {sizes}")
    out.add_argument("--rows", type=int, default=131_072, help="budget sweep: of the context")
    out.add_argument("--batch-rows", type=int, default=8192, help="batch sweep: of each context")
    out.add_argument("--budget", default="2048", help="rows and batch sweep")
    out.add_argument("--dtype", default="bfloat16", help=f"one of {', '.join(STORED)}")
    out.add_argument(
        "--selector", action="append", help=f"SPEC or SPEC@sink=..,window=..; more; default {' '.join(SELECTED)}"
    )
    out.add_argument("--memory", type=float, help="GiB of keys and values at most; default a quarter of what there is")
    out.add_argument("--out", type=Path, help="picture; default docs/figures/scaling-DEVICE.svg")
    out.add_argument("--machine", type=Path, help="measure this CPU between the points; profile to write")
    add_common(out)
    return out


def settle(options: argparse.Namespace) -> list[Method]:
    """Turns texts into values, and returns the selectors; ValueError for what cannot be."""
    for sweep in options.sweep:
        if sweep not in SWEEPS:
            raise ValueError(f"a sweep is one of {', '.join(SWEEPS)}, got {sweep!r}")
    options.sweep = list(dict.fromkeys(options.sweep)) or list(SWEEPS)
    least = {"rows": options.rows, "batch_rows": options.batch_rows}
    for sweep in SWEEPS:
        sizes = sorted(set(integers(getattr(options, f"{sweep}_sizes"), f"--{sweep}-sizes") or []))
        setattr(options, f"{sweep}_sizes", sizes)
        least[f"{sweep}_sizes"] = sizes[0]
    stored_dtype(options.dtype, "--dtype")
    options.budget, options.cycles = parse_budget(options.budget), 0
    settle_common(options, least)
    if options.machine is not None and torch.device(options.device).type != "cpu":
        raise ValueError(f"--machine measures a CPU, and --device is {options.device}: leave one of them out")
    if options.memory is None:
        on_gpu = torch.device(options.device).type == "cuda"
        there = torch.cuda.mem_get_info(options.device)[0] / 2**30 if on_gpu else machine()["memory_gib"]
        options.memory = there / 4
    if not options.memory > 0:
        raise ValueError(f"--memory is more than 0 GiB, got {options.memory:g}")
    methods = [Method.of(text, options) for text in options.selector or SELECTED]
    least_rows, least_budget = min(options.rows_sizes[0], options.batch_rows, options.rows), options.budget_sizes[0]
    check_fit(methods, least_rows, options.seal)
    check_fit([replace(method, budget=least_budget) for method in methods], least_rows, options.seal)
    return methods


def measured_with(options: argparse.Namespace) -> tuple[list[torch.dtype], step_cost.Shape]:
    """The dtype and the shape of a layer by which the machine is measured."""
    return [stored_dtype(options.dtype, "--dtype")], step_cost.Shape(1, options.heads, options.group, options.size)


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    try:
        torch.set_num_threads(options.threads)
        methods = settle(options)
    except (ValueError, ImportError, RuntimeError) as error:
        command.error(str(error))
    device = torch.device(options.device).type
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"scaling-{device}.json"
    drawn = options.out or Path(__file__).parent.parent / "docs" / "figures" / f"scaling-{device}.svg"
    measuring = None if options.machine is None else Measuring(*measured_with(options))
    progress, begun = Console(stderr=True, highlight=False, markup=False), time.perf_counter()
    record: dict[str, Any] = header(options, "how a decode step grows with context, batch and budget")
    record |= {"memory_gib": round(options.memory, 2), "sweeps": {}}

    def write(results: Any, complete: bool = False) -> None:
        record.update(sweeps=results, complete=complete, seconds=round(time.perf_counter() - begun, 1))
        record["memory_mib"] = round(peak_memory() / 2**20, 1)
        record["load"]["after"] = os.getloadavg()
        records.save(record, path)

    def after_point(results: Any) -> None:
        write(results)
        if measuring is not None:
            for _ in range(BETWEEN):
                measuring.round()

    write(run(options, methods, lambda words: progress.print(words, soft_wrap=True), after_point), complete=True)
    if measuring is not None:
        while measuring.rounds < LEAST:
            measuring.round()
        measuring.machine("measured by benchmarks.scaling between its points").save(options.machine)
    try:
        picture(record, drawn)
        words = f"picture: {drawn}"
    except ImportError as error:
        words = f"no picture: {error}"
    records.show(record, tables, f"record: {path}; {words}", options.json)


if __name__ == "__main__":
    main()
