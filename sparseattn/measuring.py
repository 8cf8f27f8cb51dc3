"""Measures the machine that this runs on: the speed of each kind of launch, on random rows, from cold caches.

Every kind is timed at a few sizes. All calls take turns, round after round, so that what else runs falls on all alike.
A pass is some rounds; of each call the median of a pass counts, and of the passes the fastest. From these times follow
a kind's fixed cost and its costs for an operation and for an entry: those that, none below 0, miss them least in
proportion (least squares). What only the first call from cold caches takes is found by calls that follow each other,
and taken off those launches that come behind others in a step.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseattn import environment
from sparseattn.costs import Launch, Shape
from sparseattn.launches import chained, probes_of
from sparseattn.machine import CPU, Machine, Speed
from sparseattn.timing import Timer, last_cache

SHAPE = Shape(1, 8, 4, 128)  # of a layer of Llama 3 8B
PASSES, ROUNDS = 6, 5
WARM = 2  # rounds that do not count: code is compiled, storage allocated
SWEPT = 256 << 20  # bytes read for the bandwidth
FIRST = ("step", "dense")  # launches that no other of a step comes before


def measure(
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
    shape: Shape = SHAPE,
    passes: int = PASSES,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Machine:
    """The CPU's profile.

    Args:
        dtypes: of keys and values.
        shape: of the layer whose steps are to be predicted best; its dtype means nothing.
        passes: of which the fastest counts.
        rounds: of a pass, in which all calls take turns.
        progress: called with rounds done and all of them.
    """
    timer = Timer("cpu", 2 * last_cache(torch.device("cpu")))
    swept = torch.ones(SWEPT // 4)
    before = os.getloadavg() if hasattr(os, "getloadavg") else ()
    done = itertools.count(1)
    speeds, reading = {}, []
    for dtype in dtypes:
        sized = Shape(shape.batch, shape.heads, shape.group, shape.size, dtype)
        probes = probes_of(sized)
        places = chained(probes)
        calls = [probe.call for probe in probes] + [lambda own=probes, at=places: [own[k].call() for k in at]]
        taken: list[list[float]] = [[] for _ in calls]
        for number in range(-WARM, passes * rounds):
            for call, seconds in zip(calls, taken, strict=True):
                one = timer(call)
                if number >= 0:
                    seconds.append(one)
            reading.append(timer(swept.sum))
            if progress is not None:
                progress(next(done), len(dtypes) * (passes * rounds + WARM))
        *fastest, together = (fastest_pass(seconds, rounds) for seconds in taken)
        own = after_others(
            [probe.launch for probe in probes], fastest, first_call([fastest[k] for k in places], together)
        )
        speeds[str(dtype).removeprefix("torch.")] = fitted([probe.launch for probe in probes], own)
    about: dict[str, Any] = {
        "shape": {"heads": shape.heads, "group": shape.group, "size": shape.size},
        "passes": passes,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "load": before,
        "machine": environment.machine(),
        "versions": environment.versions(),
    }
    bandwidth = SWEPT / fastest_pass(reading, rounds)
    return Machine(CPU, bandwidth, speeds, "cpu", False, "measured by sparseattn machine", about)


def fastest_pass(seconds: Sequence[float], rounds: int) -> float:
    """The least median of so many rounds."""
    return min(statistics.median(seconds[first : first + rounds]) for first in range(0, len(seconds), rounds))


def first_call(alone: Sequence[float], together: float) -> float:
    """Seconds that only the first of several calls from cold caches takes, such as to fetch the interpreter's own code:
    what calls take `alone` and not `together`, for each call but one; never more than the shortest call."""
    return min(max(sum(alone) - together, 0.0) / (len(alone) - 1), *alone)


def after_others(launches: Sequence[Launch], seconds: Sequence[float], first: float) -> list[float]:
    """What launches take behind others of a step: `seconds` less what the `first` call alone takes, but of those that
    come first in theirs; a tenth at least."""
    return [
        taken if launch.kind in FIRST else max(taken - first, taken / 10)
        for launch, taken in zip(launches, seconds, strict=True)
    ]


def fitted(launches: Sequence[Launch], seconds: Sequence[float]) -> dict[str, Speed]:
    """The speed of every kind among `launches`, of which each took `seconds`."""
    out = {}
    for kind in dict.fromkeys(launch.kind for launch in launches):
        own = [(launch, taken) for launch, taken in zip(launches, seconds, strict=True) if launch.kind == kind]
        terms = [[launch.count, launch.flops, launch.entries] for launch, _ in own]
        fixed, flop, entry = non_negative(terms, [taken for _, taken in own])
        out[kind] = Speed(fixed, 1 / flop if flop else None, entry)
    return out


def non_negative(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """What each term costs, 0 or more: of every choice of terms whose least squares of relative errors has none below
    0, the one with the least error."""
    weight = torch.tensor(seconds, dtype=torch.float64)
    whole = torch.tensor(terms, dtype=torch.float64) / weight[:, None]
    used = [k for k in range(whole.shape[1]) if bool(whole[:, k].any())]
    best, least = [0.0] * whole.shape[1], float("inf")
    for count in range(1, min(len(used), len(whole)) + 1):
        for chosen in itertools.combinations(used, count):
            part = whole[:, chosen]
            size = part.norm(dim=0)
            found = torch.linalg.lstsq(part / size, torch.ones(len(part), 1, dtype=torch.float64)).solution[:, 0] / size
            error = float((part @ found - 1).square().sum())
            if bool((found >= 0).all()) and error < least:
                least, best = error, [0.0] * whole.shape[1]
                for k, one in zip(chosen, found.tolist(), strict=True):
                    best[k] = one
    return best
