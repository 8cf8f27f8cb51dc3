"""One decode step, select plus attend, of every selector against every way of dense attention, by turns.

``python -m benchmarks.speed`` from the repository root writes ``benchmarks/results/speed-DEVICE.json``, anew after each
selector. Needs Linux.

Decoding is bound by bytes, so each time is told as two ratios. To dense: within each round, the seconds of the fastest
dense way over those of the step, then the median over the rounds. To the bytes: what the step must read (the rows
selected, each once for a KV head, sink and window, and what the selector says it read to choose) over the bandwidth of
copying in the same rounds, bytes read plus bytes written. A processor reads faster than it copies, so that share can
pass 1; the bandwidth of reading alone is in the record too.

All ways and parts take turns in every round, one call each, and before each call the caches are emptied: a model's
other layers would have emptied them. Dense ways that take more than twice the fastest's time in a first look are left
out of the rounds. Dense reads a copy of the rows without spare capacity between heads, which makes torch's products of
16 bits six times slower. On a GPU each call is captured in a CUDA graph where that can be done (the record says), dense
ways too.

Selectors whose index takes minutes to build (graphs, those that learn from queries) get ``--index-heads`` KV heads, and
so does the dense attention that they are compared with.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import dense, records
from benchmarks.inputs import Inputs, Shape
from benchmarks.measure import Clock, Temporaries, Timer, last_cache, peak_memory, spread
from sparseattn.attention import decode
from sparseattn.budget import budget_rows, parse_budget
from sparseattn.cache import KVCache
from sparseattn.cli.common import integers
from sparseattn.dtypes import STORED
from sparseattn.environment import kernels, machine, versions
from sparseattn.kernels import IMPLEMENTATIONS, attend
from sparseattn.selection import Selection
from sparseattn.selectors import SELECTORS, make_selector
from sparseattn.selectors.base import Selector
from sparseattn.selectors.buckets import Partitioned

RESULTS = Path(__file__).parent / "results"
PAPER = "retrieval:share=0.25@sink=128,window=512,budget=100"  # RetrievalAttention's 640 rows dense and 100 found
SELECTED = ("quest", "saap", "kmeans", "moments", "exact", "random", "window", "bridge:share=0.25", PAPER)
WARM = 2  # calls that do not count: compilers run, storage is allocated
SLOW = 2.0  # times the fastest dense way, beyond which one is left out of the rounds
LOOKS = 3  # calls of each dense way in the first look
REPLAYS = 20  # of a graph under the profiler
SIZES = ("sink", "window", "budget")  # what `SPEC@name=rows` sets for one selector


@dataclass(frozen=True)
class Method:
    """A selector to be timed: its spec, and the rows that its cache reads densely and its budget."""

    spec: str
    sink: int
    window: int
    budget: Any

    @classmethod
    def of(cls, text: str, options: argparse.Namespace) -> Method:
        """Of `SPEC` or `SPEC@sink=4,window=64,budget=2048`; ValueError for anything else."""
        spec, at, sizes = text.partition("@")
        given: dict[str, Any] = {name: getattr(options, name) for name in SIZES}
        for pair in sizes.split(",") if at else []:
            name, equals, number = pair.partition("=")
            if name not in SIZES or not equals:
                raise ValueError(f"behind @ come {', '.join(SIZES)} as name=rows, got {pair!r}")
            given[name] = parse_budget(number) if name == "budget" else _rows(number, text)
        make_selector(spec)
        return cls(spec, **given)

    @property
    def kind(self) -> type[Selector]:
        return type(make_selector(self.spec))

    @property
    def slow_to_build(self) -> bool:
        """Its index takes minutes at long contexts."""
        probe = make_selector(self.spec)
        return probe.host or probe.queries_share > 0

    @property
    def can_be_fixed(self) -> bool:
        """Whether its step can be one CUDA graph while the context grows."""
        try:
            make_selector(self.spec).fix(1 << 20, 1 << 10)
        except ValueError:
            return False
        return True

    def selector(self, inputs: Inputs, artefact: Path) -> Selector:
        """A fresh one; one that needs an artefact and names none gets the one made for these inputs."""
        spec = self.spec
        if issubclass(self.kind, Partitioned) and "artefact=" not in spec:
            spec += (":" if ":" not in spec else ",") + f"artefact={artefact}"
        return make_selector(spec).for_layer(0, inputs.rope)


def _rows(number: str, text: str) -> int:
    if not number.isdecimal():
        raise ValueError(f"sink and window are numbers of rows, got {number!r} in {text!r}")
    return int(number)


# -- one selector --------------------------------------------------------------------------------------------------


@dataclass
class Filled:
    """A cache that holds the prefill, with the index built, and what that took."""

    cache: KVCache
    store: Clock
    index: Clock


def filled(method: Method, inputs: Inputs, artefact: Path, options: argparse.Namespace) -> Filled:
    """Seconds to append the rows, which are made beforehand, chunk by chunk, and to seal them: the index."""
    shape, device = inputs.shape, inputs.shape.device
    selector = method.selector(inputs, artefact)
    room = shape.rows + (options.cycles + 1) * options.seal + selector.span
    on_gpu = torch.device(device).type != "cpu"
    cache = KVCache(
        selector,
        sink=method.sink,
        window=method.window,
        seal=options.seal,
        capacity=room,
        fixed=options.fixed and method.can_be_fixed,
        sealed_device="cpu" if selector.host and on_gpu else None,
    )
    store = Clock(0.0, 0.0)
    for start, stop in inputs.chunks():
        rows = inputs.rows(start, stop)
        queries = inputs.queries(start, stop) if selector.queries_share else None
        begun = Clock.now(device)
        cache.append(*rows, queries)
        taken = Clock.now(device) - begun
        store = Clock(store.wall + taken.wall, store.processor + taken.processor)
    begun = Clock.now(device)
    cache.seal()
    return Filled(cache, store, Clock.now(device) - begun)


def cost(cache: KVCache, selection: Selection, shape: Shape) -> dict[str, Any]:
    """Bytes of one step of all sequences: `rows_bytes`, keys and values attended, a row once for all query heads of a
    KV head; `scan_bytes`, read to choose them, None where the selector does not say; `rows`, a KV head's in the mean.
    """
    near = (cache.bounds.rows - cache.bounds.sealed + cache.bounds.sink).sum().item()
    stored = cache.sealed_keys.shape[2]
    if selection.start.shape[1] == shape.heads:
        far = selection.attended.sum().item()  # spans are disjoint
    elif selection.start.shape[2]:
        chosen = selection.mask(stored).unflatten(1, (shape.heads, -1))
        far = chosen.any(2).sum().item()
    else:
        far = 0
    rows = near * shape.heads + far
    scan = None if selection.scan_bytes is None else int(selection.scan_bytes.sum())
    return {
        "rows": round(rows / (shape.batch * shape.heads), 1),
        "rows_bytes": int(rows) * shape.row_bytes,
        "scan_bytes": scan,
    }


class Calls:
    """What is timed of one cache, all on one query tensor that is filled anew for every round.

    On a GPU each call is captured in a CUDA graph if it can be; `graphs` says for each whether, or why not.
    """

    def __init__(self, cache: KVCache, query: Tensor, budget: Any, impl: str | None, graph: bool) -> None:
        self.cache, self.query, self.budget, self.impl, self.graph = cache, query, budget, impl, graph
        self.graphs: dict[str, str] = {}
        self.step: torch.cuda.CUDAGraph | None = None

    def still_right(self) -> float | None:
        """After rows were appended and sealed: how far the output of a replay of the step is from the step's own, the
        largest difference; None where there is no graph of it, or not in fixed storage."""
        if self.step is None or not self.cache.fixed:
            return None
        expected = decode(self.query, self.cache, self.budget, impl=self.impl)
        self.step.replay()
        return float((self.step.kept - expected).abs().max())  # type: ignore[attr-defined]

    def named(self, ways: Mapping[str, dense.Way]) -> dict[str, Callable[[], Any]]:
        """The step, its parts (`attend` apart only where all rows lie together), and the dense ways."""
        query, cache = self.query, self.cache
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: decode(query, cache, self.budget, impl=self.impl),
            "select": lambda: cache.select(query, self.budget),
        }
        if cache.sealed_device is None:
            chosen = cache.select(query, self.budget)
            calls["attend"] = lambda: attend(
                query, cache.keys, cache.values, cache.latest or chosen, cache.bounds, impl=self.impl
            )
        for name, way in ways.items():
            calls[f"dense:{name}"] = functools.partial(way, query)
        return {name: self.captured(name, call) for name, call in calls.items()} if self.graph else calls

    def captured(self, name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call as the replay of a CUDA graph, or as it is."""
        try:
            graph = capture(call)
            graph.replay()  # what a graph returns is not there before: the next call to be captured may read it
            torch.cuda.synchronize()
        except RuntimeError as error:
            self.graphs[name] = f"not captured: {str(error).partition(chr(10))[0][:200]}"
            torch.cuda.synchronize()
            return call
        self.graphs[name] = "captured"
        self.step = graph if name == "step" else self.step
        return graph.replay


def capture(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call; RuntimeError where it makes the host wait or allocates by data."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()  # type: ignore[attr-defined] # what it returns lives in the graph's memory
    return graph


class Copy:
    """Copying and reading more than the caches hold: the bandwidths of this machine, while it is as busy as it is."""

    def __init__(self, device: str, mib: int) -> None:
        numbers = (mib << 20) // 4
        self.source = torch.ones(numbers, device=device)
        self.target = torch.empty_like(self.source)
        self.calls: dict[str, Callable[[], Any]] = {
            "copy": lambda: self.target.copy_(self.source),
            "read": lambda: self.source.sum(),
        }
        self.bytes = {"copy": 2 * self.source.nbytes, "read": self.source.nbytes}


def rounds(
    calls: Mapping[str, Callable[[], Any]], queries: Sequence[Tensor], query: Tensor, timer: Timer, count: int
) -> dict[str, list[float]]:
    """Seconds of every call in every round; they take turns, and the one that begins changes from round to round."""
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-WARM, count):
        query.copy_(queries[number % len(queries)])
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            seconds = timer(calls[name])
            if number >= 0:
                taken[name].append(seconds)
    return taken


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Of two ways in each round: how often the first takes the time of the second."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def fastest(taken: Mapping[str, Sequence[float]]) -> str:
    """The dense way of the smallest median, this package's own aside."""
    names = [name for name in taken if name.startswith("dense:") and name != f"dense:{dense.OURS}"]
    return min(names, key=lambda name: statistics.median(taken[name]))


def figures(
    taken: Mapping[str, Sequence[float]], costs: Sequence[Mapping[str, Any]], whole: int, copied: Mapping[str, int]
) -> dict[str, Any]:
    """What is recorded of one selector's rounds.

    Args:
        taken: seconds of every round: `step`, `select`, `attend`, `dense:...`, `copy`, `read`.
        costs: of the rounds (see `cost`).
        whole: bytes that dense attention reads.
        copied: bytes that `copy` and `read` move.
    """
    best = fastest(taken)
    bandwidth = {name: copied[name] / statistics.median(taken[name]) for name in copied}
    rows_bytes = statistics.mean(one["rows_bytes"] for one in costs)
    scans = [one["scan_bytes"] for one in costs]
    scan_bytes = None if None in scans else statistics.mean(scans)
    out: dict[str, Any] = {
        "seconds": {name: spread(seconds) for name, seconds in taken.items()},
        "dense": best.partition(":")[2],
        "speed_up": ratios(taken[best], taken["step"]),
        "rows_read": statistics.mean(one["rows"] for one in costs),
        "rows_bytes": round(rows_bytes),
        "scan_bytes": None if scan_bytes is None else round(scan_bytes),
        "dense_bytes": whole,
        "bandwidth_gb_s": {name: round(value / 1e9, 2) for name, value in bandwidth.items()},
        "dense_share_of_bandwidth": round(whole / bandwidth["copy"] / statistics.median(taken[best]), 4),
    }
    if "attend" in taken:
        out["attend_share_of_bandwidth"] = round(rows_bytes / bandwidth["copy"] / statistics.median(taken["attend"]), 4)
    if scan_bytes is not None and rows_bytes + scan_bytes:
        must = rows_bytes + scan_bytes
        out["bound"] = round(whole / must, 3)
        out["bound_seconds"] = float(f"{must / bandwidth['copy']:.6g}")
        out["share_of_bandwidth"] = round(must / bandwidth["copy"] / statistics.median(taken["step"]), 4)
        out["share_of_bound"] = round(out["speed_up"]["median"] / out["bound"], 4)
    return out


def appending(cache: KVCache, inputs: Inputs, step: float, options: argparse.Namespace) -> dict[str, Any]:
    """What decoding's own rows cost: each is appended, and sealed when it is time, as `decode` does before it selects.

    As many whole cycles from seal to seal as `--cycles`, fewer if `--patience` seconds pass. The clock waits for a GPU
    at every token, so that there this is an upper bound.

    Args:
        step: seconds of a step, in whose share it is told.
    """
    shape, span = inputs.shape, cache.selector.span
    at = int(cache.lengths[0])
    begun, cycles, pauses, tokens = time.perf_counter(), 0, [], []
    while cycles < options.cycles and (not cycles or time.perf_counter() - begun < options.patience):
        sealed = int(cache.sealed[0])
        keys, values = inputs.rows(at, at + options.seal + span)
        queries = inputs.queries(at, at + options.seal + span) if cache.selector.queries_share else None
        for token in range(options.seal + span):
            row = slice(token, token + 1)
            asked = None if queries is None else queries[:, :, :, row]
            started = Clock.now(shape.device)
            cache.append(keys[:, :, row], values[:, :, row], asked)
            cache.seal()
            taken = (Clock.now(shape.device) - started).wall
            tokens.append(taken)
            if int(cache.sealed[0]) > sealed:
                pauses.append(taken)
                break
        at, cycles = int(cache.lengths[0]), cycles + 1
    each = statistics.mean(tokens)
    return {
        "tokens": len(tokens),
        "seals": len(pauses),
        "seconds_per_token": float(f"{each:.6g}"),
        "seconds_per_token_without_seals": float(f"{statistics.median(tokens):.6g}"),
        "share_of_step": round(each / step, 4),
        "longest_pause_seconds": float(f"{max(tokens):.6g}"),
        "seal_seconds": spread(pauses) if pauses else None,
    }


def memory(calls: Calls, shape: Shape) -> dict[str, Any]:
    """Bytes held, by part, and temporaries of one step; of both per 1,000 tokens of all sequences."""
    parts = calls.cache.nbytes
    if torch.device(shape.device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        decode(calls.query, calls.cache, calls.budget, impl=calls.impl)
        torch.cuda.synchronize()
        parts["workspace"] = torch.cuda.max_memory_allocated() - before
    else:
        with Temporaries() as made:
            decode(calls.query, calls.cache, calls.budget, impl=calls.impl)
        parts["workspace"] = made.peak
    rows = int(calls.cache.lengths.sum())
    return {"bytes": parts, "bytes_per_1k_tokens": {name: round(1000 * size / rows) for name, size in parts.items()}}


def launches(events: Iterable[tuple[str, float, float]], repeats: int) -> list[dict[str, Any]]:
    """A step launch by launch, in order: name and microseconds, medians over the repeats.

    Args:
        events: name, begin and end in microseconds of everything the device ran, of `repeats` equal steps.

    Raises:
        ValueError: the steps are not equal.
    """
    ran = sorted(events, key=lambda event: event[1])
    each, rest = divmod(len(ran), repeats)
    steps = [ran[i * each : (i + 1) * each] for i in range(repeats)]
    names = [[name for name, _, _ in step] for step in steps]
    if rest or any(other != names[0] for other in names):
        raise ValueError(f"{len(ran)} launches are not {repeats} equal steps")
    return [
        {"name": name, "us": round(statistics.median(step[i][2] - step[i][1] for step in steps), 3)}
        for i, name in enumerate(names[0])
    ]


def itemised(call: Callable[[], Any], timer: Timer, result: Mapping[str, Any]) -> dict[str, Any]:
    """On a GPU: what a step takes above its bytes and an empty graph's latency, and its launches.

    Args:
        call: the step, a graph's replay where it could be captured.
        result: its `figures`.
    """
    one = torch.zeros(1, device=timer.device)
    empty = capture(lambda: one.add_(1))
    latency = statistics.median(timer(empty.replay) for _ in range(REPLAYS))
    out: dict[str, Any] = {"empty_graph_seconds": float(f"{latency:.4g}")}
    if "bound_seconds" in result:
        above = result["seconds"]["step"]["median"] - result["bound_seconds"] - latency
        out["above_bound_and_empty_graph_seconds"] = float(f"{above:.4g}")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            call()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type.name == "CUDA"
    ]
    try:
        out["launches"] = launches(events, REPLAYS)
    except ValueError as error:
        out["launches"] = str(error)
    return out


def first_look(ways: Mapping[str, dense.Way], query: Tensor, timer: Timer) -> dict[str, dict[str, float]]:
    """Seconds of each dense way, eager, in a few rounds."""
    calls = {name: functools.partial(way, query) for name, way in ways.items()}
    return {name: spread(seconds) for name, seconds in rounds(calls, [query], query, timer, LOOKS).items()}


def in_rounds(looks: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The dense ways worth more rounds, and this package's own."""
    others = {name: one["median"] for name, one in looks.items() if name != dense.OURS}
    if not others:
        raise RuntimeError("no way of dense attention runs here")
    least = min(others.values())
    return [name for name, seconds in others.items() if seconds <= SLOW * least] + [
        name for name in looks if name == dense.OURS
    ]


@dataclass
class Bench:
    """Selectors over the rows of one shape, with what they share."""

    inputs: Inputs
    artefact: Path
    timer: Timer
    copy: Copy
    options: argparse.Namespace
    ways: dict[str, dense.Way] | None = None
    looks: dict[str, dict[str, float]] | None = None
    absent: dict[str, str] | None = None

    def measure(self, method: Method) -> dict[str, Any]:
        """Everything of one selector."""
        options, shape = self.options, self.inputs.shape
        begun = time.perf_counter()
        made = filled(method, self.inputs, self.artefact, options)
        cache = made.cache
        calls, timed, result = self.steps(cache, method.budget)
        out: dict[str, Any] = {
            "selector": method.spec,
            "label": repr(cache.selector),
            "sink": method.sink,
            "window": method.window,
            "budget": method.budget,
            "span": cache.selector.span,
            "fixed": cache.fixed,
            "sealed_device": None if cache.sealed_device is None else str(cache.sealed_device),
            **result,
            "prefill_seconds": {"store": made.store.as_dict(), "index": made.index.as_dict()},
            "graphs": calls.graphs or None,
        }
        if torch.device(shape.device).type == "cuda" and shape.batch == 1 and cache.sealed_device is None:
            out["itemised"] = itemised(timed["step"], self.timer, result)
        out["memory"] = memory(calls, shape)
        if options.cycles:
            del timed  # all but the step's are of no use any more
            out["append"] = appending(cache, self.inputs, result["seconds"]["step"]["median"], options)
            out["replay_off_after_appending"] = calls.still_right()
        out["took_seconds"] = round(time.perf_counter() - begun, 1)
        return out

    def steps(self, cache: KVCache, budget: Any) -> tuple[Calls, Mapping[str, Callable[[], Any]], dict[str, Any]]:
        """The rounds of one selector's cache: what was called, how, and the `figures`."""
        options, shape = self.options, self.inputs.shape
        queries = self.asked()
        query = queries[0].clone()
        graph = torch.device(shape.device).type == "cuda" and cache.sealed_device is None  # else the host waits
        calls = Calls(cache, query, budget, options.impl, graph)
        decode(query, cache, budget, impl=options.impl)  # says at once what does not fit
        ways = self.dense_ways(query, cache)
        timed = calls.named(ways)
        taken = rounds({**timed, **self.copy.calls}, queries, query, self.timer, options.rounds)
        costs = [cost(cache, cache.select(asked, budget), shape) for asked in queries]
        return calls, timed, figures(taken, costs, shape.bytes, self.copy.bytes)

    def dense_ways(self, query: Tensor, cache: KVCache) -> dict[str, dense.Way]:
        """Those worth rounds, over a copy of the first cache's rows; order means nothing to them, so all share it."""
        if self.ways is None:
            rows = self.inputs.shape.rows
            keys, values = (cache.keys, cache.values) if cache.sealed_device is None else cache.everything()[:2]
            held = (keys[:, :, :rows].contiguous(), values[:, :, :rows].contiguous())
            ways, self.absent = dense.ways(query, *held, self.options.impl)
            self.looks = first_look(ways, query, self.timer)
            self.ways = {name: ways[name] for name in in_rounds(self.looks)}
        return self.ways

    def asked(self) -> list[Tensor]:
        """Queries `[B,H,G,D]` of tokens behind the prefill."""
        rows = self.inputs.shape.rows
        many = self.inputs.queries(rows, rows + self.options.queries)
        return [many[:, :, :, i].contiguous() for i in range(self.options.queries)]


# -- the command ---------------------------------------------------------------------------------------------------


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
        learned = any(make_selector(method.spec).queries_share for method in chosen)
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


def add_common(out: argparse.ArgumentParser) -> None:
    """What the benchmarks of a step have in common."""
    on_gpu = torch.cuda.is_available()
    out.add_argument("--heads", type=int, default=8, help="KV heads")
    out.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    out.add_argument("--size", type=int, default=128, help="of a head")
    out.add_argument("--sink", type=int, default=4)
    out.add_argument("--window", type=int, default=64)
    out.add_argument("--seal", type=int, default=1024, help="rows that wait before they are sealed")
    out.add_argument("--impl", help="of attend; default: what it takes by itself")
    out.add_argument("--rounds", type=int, default=15, help="in which all ways take turns")
    out.add_argument("--queries", type=int, default=8, help="different ones, by turns")
    out.add_argument("--buckets", type=int, default=1024, help="of the artefact made for the bucket methods")
    out.add_argument("--hidden", type=int, default=1024, help="width of its classifiers")
    out.add_argument(
        "--fixed",
        action=argparse.BooleanOptionalAction,
        default=on_gpu,
        help="storage of fixed size, as one CUDA graph for a growing context needs it; default on a GPU",
    )
    out.add_argument("--evict", type=int, help="MiB written before each call; default twice the last cache, 0: none")
    out.add_argument("--copy", type=int, default=2048 if on_gpu else 512, help="MiB copied for the bandwidth")
    out.add_argument("--device", default="cuda" if on_gpu else "cpu")
    out.add_argument("--threads", type=int, default=torch.get_num_threads())
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    out.add_argument("--json", action="store_true", help="print the record, on one line")
    out.add_argument("--quick", action="store_true", help="5 rounds; no selector that is slow to build unless named")


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


def settle_common(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Checks what the benchmarks of a step have in common; ValueError for what cannot be."""
    if options.quick:
        options.rounds = min(options.rounds, 5)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch sees no CUDA device here")
    if options.impl not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"--impl is one of {', '.join(IMPLEMENTATIONS)}, got {options.impl!r}")
    if options.evict is None:
        options.evict = 2 * last_cache(torch.device(options.device)) >> 20
    names = ("heads", "group", "size", "seal", "rounds", "queries", "buckets", "hidden", "copy", "threads")
    for name, number in (*least.items(), *((name, getattr(options, name)) for name in names)):
        if number < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more, got {number}")


def settle(options: argparse.Namespace) -> list[Method]:
    """Turns texts into values, and returns the selectors; ValueError for what cannot be."""
    options.rows = sorted(set(integers(options.rows, "--rows") or []))
    options.batch = sorted(set(integers(options.batch, "--batch") or []))
    on_gpu = torch.device(options.device).type == "cuda"
    options.dtype = (options.dtype or ("bfloat16" if on_gpu else "bfloat16,float32")).split(",")
    for name in options.dtype:
        if name not in STORED:
            raise ValueError(f"--dtype is of {', '.join(STORED)}, got {name!r}")
    options.budget = parse_budget(options.budget)
    settle_common(options, {"rows": options.rows[0], "batch": options.batch[0], "index_heads": options.index_heads})
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


def check_fit(methods: Sequence[Method], rows: int, seal: int) -> None:
    """ValueError where a selector cannot work with its sizes in the shortest context."""
    for method in methods:
        selector = make_selector(method.spec)
        KVCache(selector, sink=method.sink, window=method.window, seal=seal)  # its own checks
        budget_rows(method.budget, rows, selector.span, method.spec)
        if rows - method.sink - method.window < selector.span:
            raise ValueError(
                f"a sink of {method.sink} and a window of {method.window} leave less than a span of {selector.span} of "
                f"{rows} rows to select ({method.spec})"
            )


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


def header(options: argparse.Namespace, question: str) -> dict[str, Any]:
    """What every record says first."""
    names = ("device", "threads", "heads", "group", "size", "budget", "sink", "window", "seal", "impl", "rounds")
    return {
        "question": question,
        **{name: getattr(options, name) for name in names},
        "dtype": options.dtype,
        "complete": False,
        "evict_mib": options.evict,
        "versions": versions(),
        "machine": machine(),
        "kernels": kernels(),
        "load": {"before": os.getloadavg()},
    }


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
    progress = Console(stderr=True, highlight=False)
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
