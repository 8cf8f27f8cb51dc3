"""Times selectors over the rows of one shape, against the dense ways that they share."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import dense
from benchmarks.inputs import Inputs
from benchmarks.measure import Timer
from benchmarks.methods import Method
from benchmarks.rounds import Copy, figures, first_look, in_rounds, rounds
from benchmarks.step import Calls, appending, cost, filled, itemised, memory
from sparseattn.cache.all_rows import everything
from sparseattn.cache.decode import decode
from sparseattn.cache.kv_cache import KVCache
from sparseattn.core.budget import budget_record
from sparseattn.roles.role import kept_label


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
            "selector": kept_label(method.spec, method.codec),
            "label": repr(cache.selector),
            "sink": method.sink,
            "window": method.window,
            "budget": budget_record(method.budget),
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
        costs = []
        for asked in queries:
            decode(asked, cache, budget, impl=options.impl)
            assert cache.search.latest is not None
            costs.append(cost(cache, cache.search.latest, shape, cache.search.latest_tail))
        return calls, timed, figures(taken, costs, shape.bytes, self.copy.bytes)

    def dense_ways(self, query: Tensor, cache: KVCache) -> dict[str, dense.Way]:
        """Those worth rounds, over a copy of the first cache's rows; order means nothing to them, so all share it."""
        if self.ways is None:
            rows = self.inputs.shape.rows
            keys, values = (cache.keys, cache.values) if cache.sealed_device is None else everything(cache)[:2]
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
