"""One decode step, select plus attend, of every selector against every way of dense attention, by turns.

``python -m benchmarks.speed`` from the repository root writes ``benchmarks/results/speed-DEVICE.json``, anew after each
selector. Needs Linux.

What is told of them, and how ratios are taken, is in `rounds.py`. All ways and parts take turns in every round, one
call each, and before each call the caches are emptied: a model's other layers would have emptied them. Dense ways that
take more than twice the fastest's time in a first look are left out of the rounds. Dense reads a copy of the rows
without spare capacity between heads, which makes torch's products of 16 bits six times slower. On a GPU each call is
captured in a CUDA graph where that can be done (the record says), dense ways too.

Selectors whose index takes minutes to build (graphs, those that learn from queries) get ``--index-heads`` KV heads, and
so does the dense attention that they are compared with.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sparseattn.cli.values import integers
from sparseattn.core.budget import parse_budget
from sparseattn.cost_model.environment import machine
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.registry import SELECTORS, make_selector
from sparseattn.utils.tensors import STORED, stored_dtype

PAPER = "retrieval:share=0.25@sink=128,window=512,budget=100"  # RetrievalAttention's 640 rows dense and 100 found
SELECTED = ("quest", "saap", "kmeans", "moments", "exact", "random", "window", "bridge:share=0.25", PAPER)


def settings(options: argparse.Namespace, methods: Sequence[Method]) -> Iterator[tuple[Shape, list[Method]]]:
    """Every shape that is asked for, with the selectors that are timed on it."""
    for rows, batch, dtype in itertools.product(options.rows, options.batch, options.dtype):
        shape = Shape(batch, options.heads, options.group, rows, options.size, dtype, options.device)
        few = replace(shape, heads=min(options.heads, options.index_heads))
        for each, chosen in (
            (shape, [method for method in methods if not method.slow_to_build or few == shape]),
            (few, [method for method in methods if method.slow_to_build and few != shape]),
        ):
            if chosen:
                yield each, chosen


def run(
    options: argparse.Namespace, methods: Sequence[Method], say: Callable[[str], None], write: Callable[[Any], None]
) -> list[dict[str, Any]]:
    """All shapes; `write` is given the results so far after every selector."""
    results: list[dict[str, Any]] = []
    timer = Timer(options.device, options.evict << 20)
    copy = Copy(options.device, options.copy)
    for shape, chosen in settings(options, methods):
        say(f"{shape.rows} rows, {shape.batch} x {shape.heads} KV heads, {shape.dtype}: rows")
        learned = any(make_selector(method.spec).learns for method in chosen)
        inputs = Inputs(shape, learned)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "artefact.safetensors"
            bench = Bench(inputs, path, timer, copy, options)
            result: dict[str, Any] = shape.as_dict() | {"distinct_rows": inputs.distinct, "artefact": None}
            if any(issubclass(method.kind, Partitioned) for method in chosen):
                result["artefact"] = inputs.artefact(path, options.buckets, options.hidden)
            result |= {"dense_first_look_seconds": None, "dense_absent": None, "selectors": []}
            results.append(result)
            for method in chosen:
                say(f"  {method.spec}")
                result["selectors"].append(bench.measure(method))
                result |= {"dense_first_look_seconds": bench.looks, "dense_absent": bench.absent}
                write(results)
                if torch.device(options.device).type == "cuda":
                    torch.cuda.empty_cache()
    return results


def tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """A record in words: for each shape the steps, and what they rest on."""
    for one in record["results"]:
        title = (
            f"{one['rows']} rows, {one['batch']} x {one['heads']} KV heads, G {one['group']}, D {one['size']}, "
            f"{one['dtype']}, {one['device']}; times in ms"
        )
        steps = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        rest = Table(title="ms of appending a token, s of the prefill", title_justify="left", box=SIMPLE_HEAD)
        steps.add_column("selector")
        for name in ("rows", "step", "select", "attend", "dense", "to dense", "rounds", "bound", "of bytes"):
            steps.add_column(name, justify="right", no_wrap=True)
        rest.add_column("selector")
        for name in ("append", "of step", "pause", "store s", "index s", "held MiB", "workspace MiB"):
            rest.add_column(name, justify="right", no_wrap=True)
        for way in one["selectors"]:
            seconds, up = way["seconds"], way["speed_up"]
            steps.add_row(
                way["selector"],
                f"{way['rows_read']:.0f}",
                *(f"{seconds[name]['median'] * 1e3:.3f}" if name in seconds else "" for name in ("step", "select")),
                f"{seconds['attend']['median'] * 1e3:.3f}" if "attend" in seconds else "",
                f"{seconds['dense:' + way['dense']]['median'] * 1e3:.3f} {way['dense']}",
                f"{up['median']:.2f}",
                f"{up['min']:.1f}-{up['max']:.1f}",
                f"{way['bound']:.1f}" if "bound" in way else "",
                f"{way['share_of_bandwidth']:.0%}" if "share_of_bandwidth" in way else "",
            )
            added, sizes, filling = way.get("append"), way["memory"]["bytes"], way["prefill_seconds"]
            rest.add_row(
                way["selector"],
                "" if added is None else f"{added['seconds_per_token'] * 1e3:.3f}",
                "" if added is None else f"{added['share_of_step']:.1%}",
                "" if added is None else f"{added['longest_pause_seconds'] * 1e3:.1f}",
                f"{filling['store']['wall']:.2f}",
                f"{filling['index']['wall']:.2f}",
                f"{sum(size for name, size in sizes.items() if name != 'workspace') / 2**20:.0f}",
                f"{sizes['workspace'] / 2**20:.1f}",
            )
        yield steps
        yield rest
        looks = one["dense_first_look_seconds"]
        ways = Table(title="dense, first look: ms", title_justify="left", box=SIMPLE_HEAD)
        for name in looks:
            ways.add_column(name, justify="right")
        ways.add_row(*(f"{look['median'] * 1e3:.2f}" for look in looks.values()))
        yield ways


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description="One decode step of every selector against dense attention."
    )
    out.add_argument("--rows", default="131072", help="of the context; several with commas")
    out.add_argument("--batch", default="1", help="sequences; several with commas")
    out.add_argument(
        "--dtype", help=f"{', '.join(STORED)}; several with commas; default bfloat16, on a CPU float32 too"
    )
    out.add_argument("--budget", default="2048", help="rows, a share of the context (1%%) or all")
    out.add_argument(
        "--selector",
        action="append",
        help=f"SPEC or SPEC@sink=..,window=..,budget=..; repeat for more; default: {' '.join(SELECTED)}",
    )
    out.add_argument("--index-heads", type=int, default=1, help="KV heads of selectors that are slow to build")
    out.add_argument("--cycles", type=int, default=8, help="from seal to seal in which appending is timed")
    out.add_argument("--patience", type=float, default=20.0, help="seconds of appending after which no cycle begins")
    out.add_argument("--name", default="speed", help="of the record: NAME-DEVICE.json")
    add_common(out)
    return out


def settle(options: argparse.Namespace) -> list[Method]:
    """Turns texts into values, and returns the selectors; ValueError for what cannot be."""
    options.rows = sorted(set(integers(options.rows, "--rows") or []))
    options.batch = sorted(set(integers(options.batch, "--batch") or []))
    settle_common(options, {"rows": options.rows[0], "batch": options.batch[0], "index_heads": options.index_heads})
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = (options.dtype or ("bfloat16" if on_gpu else "bfloat16,float32")).split(",")
    for name in options.dtype:
        stored_dtype(name, "--dtype")
    options.budget = parse_budget(options.budget)
    if options.cycles < 0:
        raise ValueError(f"--cycles is 0 or more, got {options.cycles}")
    if options.quick:
        options.cycles = min(options.cycles, 2)
    known = [text for text in SELECTED if text.partition(":")[0].partition("@")[0] in SELECTORS]
    methods = [Method.of(text, options) for text in options.selector or known]
    if options.quick and options.selector is None:
        methods = [method for method in methods if not method.slow_to_build]
    check_fit(methods, options.rows[0], options.seal)
    check_room(options, [shape for shape, _ in settings(options, methods)])
    return methods


def check_room(options: argparse.Namespace, shapes: Sequence[Shape]) -> None:
    """ValueError where the rows, dense attention's copy, and half as many again in sealing, have no room."""
    most = max(shapes, key=lambda shape: shape.bytes)
    needed = int(most.bytes * 2.6)
    on_gpu = torch.device(options.device).type == "cuda"
    free = torch.cuda.mem_get_info(options.device)[0] if on_gpu else machine()["memory_gib"] * 2**30
    if needed > free:
        raise ValueError(
            f"{most.rows} rows of {most.batch} x {most.heads} KV heads take {needed / 2**30:.1f} GiB with "
            f"dense attention's copy, {options.device} has {free / 2**30:.1f}: name fewer --rows, --batch or --heads"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    try:
        torch.set_num_threads(options.threads)
        methods = settle(options)
    except (ValueError, ImportError, RuntimeError) as error:
        command.error(str(error))
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{options.name}-{torch.device(options.device).type}.json"
    progress = Console(stderr=True, highlight=False, markup=False)
    record: dict[str, Any] = header(options, "one decode step against dense attention") | {"results": []}
    begun = time.perf_counter()

    def write(results: Any, complete: bool = False) -> None:
        record.update(results=results, complete=complete, seconds=round(time.perf_counter() - begun, 1))
        record["memory_mib"] = round(peak_memory() / 2**20, 1)
        record["load"]["after"] = os.getloadavg()
        records.save(record, path)

    write(run(options, methods, lambda words: progress.print(words, soft_wrap=True), write), complete=True)
    records.show(record, tables, f"peak memory {record['memory_mib']:.0f} MiB; record: {path}", options.json)


if __name__ == "__main__":
    main()
