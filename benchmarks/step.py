"""One decode step of one cache and what surrounds it.

Filling the cache, the calls that are timed, the bytes that they must read, appending, memory, the launches of a GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import dense
from benchmarks.inputs import Inputs, Shape
from benchmarks.measure import Clock, Temporaries, Timer, spread
from benchmarks.methods import Method
from benchmarks.rounds import WARM
from sparseattn.cache.all_rows import bytes_named
from sparseattn.cache.decode import attend_chosen, decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.cache.shown_rows import unit_of
from sparseattn.core.selection import Selection, Tail

REPLAYS = 20  # of a graph under the profiler
FIRST_ROWS = 4096  # filled in before the time is taken


@dataclass
class Filled:
    """A cache that holds the prefill, with the index built, and what that took."""

    cache: KVCache
    store: Clock
    index: Clock


def filled(method: Method, inputs: Inputs, artefact: Path, options: argparse.Namespace) -> Filled:
    """Seconds to append the rows, which are made beforehand, chunk by chunk, and to seal them: the index.

    The first rows are filled in once before, so that what is compiled at its first call does not count.
    """
    _fill(method, inputs, artefact, options, min(inputs.shape.rows, FIRST_ROWS))
    return _fill(method, inputs, artefact, options, inputs.shape.rows)


def _fill(method: Method, inputs: Inputs, artefact: Path, options: argparse.Namespace, count: int) -> Filled:
    device = inputs.shape.device
    selector = method.selector(inputs, artefact)
    room = count + (options.cycles + 1) * options.seal + unit_of(selector, method.codec)
    on_gpu = torch.device(device).type != "cpu"
    cache = KVCache(
        selector,
        sink=method.sink,
        window=method.window,
        seal=options.seal,
        capacity=room,
        fixed=options.fixed and method.can_be_fixed and method.codec is None,
        sealed_device="cpu" if selector.host and on_gpu else None,
        rows=method.codec,
    )
    store = Clock(0.0, 0.0)
    for start, stop in inputs.chunks():
        if start >= count:
            break
        stop = min(stop, count)
        rows = inputs.rows(start, stop)
        queries = inputs.queries(start, stop) if cache.learns else None
        begun = Clock.now(device)
        cache.append(*rows, queries)
        taken = Clock.now(device) - begun
        store = Clock(store.wall + taken.wall, store.processor + taken.processor)
    begun = Clock.now(device)
    cache.seal()
    return Filled(cache, store, Clock.now(device) - begun)


def cost(cache: KVCache, selection: Selection, shape: Shape, tail: Tail | None = None) -> dict[str, Any]:
    """Bytes of one step of all sequences: `rows_bytes`, keys and values attended, a row once for all query heads of a
    KV head, the tail's rows among them, and biases; `scan_bytes`, read to choose them, None where the selector does not
    say; `rows`, a KV head's in the mean.
    """
    near = (cache.bounds.rows - cache.bounds.sealed + cache.bounds.sink).sum().item()
    far, own, biases = int(selection.distinct(shape.heads, int(cache.stored.sealed_bounds.rows[0])).sum()), 0, 0
    for part in (selection, *([tail.selection] if tail else [])):
        biases += int(part.bias_bytes(shape.heads).sum())
    if tail:
        own = int(tail.selection.distinct(shape.heads, tail.keys.shape[2]).sum())
    rows = near * shape.heads + far + own
    read = int(near * shape.heads + own) * shape.row_bytes + int(bytes_named(cache, selection).sum())
    scan = None if selection.scan_bytes is None else int(selection.scan_bytes.sum())
    return {
        "rows": round(rows / (shape.batch * shape.heads), 1),
        "rows_bytes": read + biases,
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
            calls["attend"] = lambda: attend_chosen(query, cache, cache.search.latest or chosen, impl=self.impl)
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


def appending(cache: KVCache, inputs: Inputs, step: float, options: argparse.Namespace) -> dict[str, Any]:
    """What decoding's own rows cost: each is appended, and sealed when it is time, as `decode` does before it selects.

    As many whole cycles from seal to seal as `--cycles`, fewer if `--patience` seconds pass. The clock waits for a GPU
    at every token, so that there this is an upper bound.

    Args:
        step: seconds of a step, in whose share it is told.
    """
    shape, unit = inputs.shape, cache.unit
    at = int(cache.lengths[0])
    begun, cycles, pauses, tokens = time.perf_counter(), 0, [], []
    while cycles < options.cycles and (not cycles or time.perf_counter() - begun < options.patience):
        sealed = int(cache.sealed[0])
        keys, values = inputs.rows(at, at + options.seal + unit)
        queries = inputs.queries(at, at + options.seal + unit) if cache.selector.learns else None
        for token in range(options.seal + unit):
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


def by_purpose(listed: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds of a step's `launches`: of attention, of finding the best of the scores (torch's top-k, sorts and
    their scans), and of all else that choosing takes."""
    spent = {"attending": 0.0, "best": 0.0, "scoring": 0.0}
    for launch in listed:
        name = launch["name"].lower()
        attends = name.startswith(("attend", "merge_splits"))
        best = not attends and any(part in name for part in ("topk", "sort", "scan_by_key"))
        spent["attending" if attends else "best" if best else "scoring"] += launch["us"]
    return {purpose: round(us, 3) for purpose, us in spent.items()}


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
        out["us"] = by_purpose(out["launches"])
    except ValueError as error:
        out["launches"] = str(error)
    return out
