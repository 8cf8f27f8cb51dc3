"""Measures the machine that this runs on: the speed of each kind of launch, on random rows, from cold caches.

Every kind is timed at a few sizes. All calls take turns, round after round, so that what else runs falls on all alike,
and of each call the median counts: where the bandwidth of a shared machine comes and goes, the usual one. From these
times follow a kind's fixed cost and its costs for an operation and for an entry: those that, none below 0, miss them
least in proportion (least squares). What only the first call from cold caches takes is found by calls that follow each
other, and taken off those launches that come behind others in a step. Then small steps are timed whole: what they take
beyond their launches is what a step costs itself.
"""

from __future__ import annotations

import datetime
import itertools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparseattn.core.step_cost import Launch, Shape
from sparseattn.cost_model import environment
from sparseattn.cost_model.data_sheet import CPU
from sparseattn.cost_model.machine import Machine, Speed
from sparseattn.cost_model.probes import Probe, ProbedStep, chained, probes_of, steps_of
from sparseattn.cost_model.timer import Timer, last_cache

SHAPE = Shape(1, 8, 4, 128)  # of a layer of Llama 3 8B
DTYPES = torch.bfloat16, torch.float32
ROUNDS = 30
WARM = 2  # rounds that do not count: code is compiled, storage allocated
SWEPT = 256 << 20  # bytes read for the bandwidth
EVICTED = 256 << 20  # bytes written before a call: with less, what finds addresses is still in a cache
FIRST = ("dense",)  # launches that no other of a step comes before


class Measuring:
    """A measurement, round by round: `Measuring(dtypes)`, `round()` as often as there is time, `machine()`.

    Args:
        dtypes: of keys and values.
        shape: of the layer whose steps are to be predicted best; its dtype means nothing.
    """

    def __init__(self, dtypes: Sequence[torch.dtype] = DTYPES, shape: Shape = SHAPE) -> None:
        self.shape = shape
        self.load = os.getloadavg() if hasattr(os, "getloadavg") else ()
        self.rounds = 0
        self._begun = 0
        self._timer = Timer("cpu", max(EVICTED, 2 * last_cache(torch.device("cpu"))))
        self._swept = torch.ones(SWEPT // 4)
        self._reading: list[float] = []
        self._parts = [_Part(replace(shape, dtype=dtype)) for dtype in dtypes]

    def round(self) -> None:
        """Time every call once; the first rounds do not count."""
        counts = self._begun >= WARM
        self._begun += 1
        self.rounds += counts
        for part in self._parts:
            for call, seconds in zip(part.calls, part.seconds, strict=True):
                taken = self._timer(call)
                if counts:
                    seconds.append(taken)
        taken = self._timer(self._swept.sum)
        if counts:
            self._reading.append(taken)

    def machine(self, source: str = "measured by sparseattn machine") -> Machine:
        """Return the CPU's profile, by the rounds so far; `source` says what measured.

        Raises:
            ValueError: none has counted yet.
        """
        if not self.rounds:
            raise ValueError(f"no round has counted yet: call round() more than {WARM} times")
        bandwidth = SWEPT / statistics.median(self._reading)
        speeds = {str(part.shape.dtype).removeprefix("torch."): part.speeds(bandwidth) for part in self._parts}
        about: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "shape": {"heads": self.shape.heads, "group": self.shape.group, "size": self.shape.size},
            "rounds": self.rounds,
            "threads": torch.get_num_threads(),
            "load": self.load,
            "machine": environment.machine(),
            "versions": environment.versions(),
        }
        gib = about["machine"].get("memory_gib")
        return Machine(CPU, bandwidth, speeds, "cpu", False, source, about, None if gib is None else gib * 2**30)


class _Part:
    """The calls of one dtype, and their seconds so far."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.probes: list[Probe] = probes_of(shape)
        self.steps: list[ProbedStep] = steps_of(shape)
        self.places = chained(self.probes)
        chain = [self.probes[k].call for k in self.places]
        self.calls: list[Callable[[], Any]] = [
            *(probe.call for probe in self.probes),
            *(step.call for step in self.steps),
            lambda: [call() for call in chain],
        ]
        self.seconds: list[list[float]] = [[] for _ in self.calls]

    def speeds(self, bandwidth: float) -> dict[str, Speed]:
        *usual, together = (statistics.median(seconds) for seconds in self.seconds)
        alone, whole = usual[: len(self.probes)], usual[len(self.probes) :]
        launches = [probe.launch for probe in self.probes]
        fits = fitted(launches, after_others(launches, alone, first_call([alone[k] for k in self.places], together)))
        rest = [
            taken
            - sum(
                fits[launch.kind].seconds(launch, bandwidth) for launch in step.cost.launches if launch.kind != "step"
            )
            for step, taken in zip(self.steps, whole, strict=True)
        ]
        return {"step": Speed(max(statistics.median(rest), 0.0)), **fits}


def measure(
    dtypes: Sequence[torch.dtype] = DTYPES,
    shape: Shape = SHAPE,
    rounds: int = ROUNDS,
    progress: Callable[[int, int], None] | None = None,
) -> Machine:
    """Return the CPU's profile.

    Args:
        dtypes, shape: see `Measuring`.
        rounds: that count.
        progress: called with rounds done and all of them.
    """
    measuring = Measuring(dtypes, shape)
    for done in range(1, rounds + WARM + 1):
        measuring.round()
        if progress is not None:
            progress(done, rounds + WARM)
    return measuring.machine()


def first_call(alone: Sequence[float], together: float) -> float:
    """Seconds that only the first of several calls from cold caches takes, such as to fetch the interpreter's own code:
    what calls take `alone` and not `together`, for each call but one; never more than the shortest call."""
    return min(max(sum(alone) - together, 0.0) / (len(alone) - 1), *alone)


def after_others(launches: Sequence[Launch], seconds: Sequence[float], first: float) -> list[float]:
    """Return what launches take behind others of a step: `seconds` less what the `first` call alone takes, but of those
    that come first in theirs; a tenth at least."""
    return [
        taken if launch.kind in FIRST else max(taken - first, taken / 10)
        for launch, taken in zip(launches, seconds, strict=True)
    ]


def fitted(launches: Sequence[Launch], seconds: Sequence[float]) -> dict[str, Speed]:
    """Return the speed of every kind among `probes`, of which each took `seconds`."""
    out = {}
    for kind in dict.fromkeys(launch.kind for launch in launches):
        own = [(launch, taken) for launch, taken in zip(launches, seconds, strict=True) if launch.kind == kind]
        terms = [[launch.count, launch.flops, launch.entries] for launch, _ in own]
        fixed, flop, entry = non_negative(terms, [taken for _, taken in own])
        out[kind] = Speed(fixed, 1 / flop if flop else None, entry)
    return out


def non_negative(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return what each term costs, 0 or more: of every choice of terms whose least squares of relative errors has none
    below 0, the one with the least error."""
    weight = torch.tensor(seconds, dtype=torch.float64)
    whole = torch.tensor(terms, dtype=torch.float64) / weight[:, None]
    used = [k for k in range(whole.shape[1]) if bool(whole[:, k].any())]
    best, least = [0.0] * whole.shape[1], float("inf")
    for count in range(1, min(len(used), len(whole)) + 1):
        for chosen in itertools.combinations(used, count):
            part = whole[:, chosen]
            size = part.norm(dim=0)
            solution = (
                torch.linalg.lstsq(part / size, torch.ones(len(part), 1, dtype=torch.float64)).solution[:, 0] / size
            )
            error = float((part @ solution - 1).square().sum())
            if bool((solution >= 0).all()) and error < least:
                least, best = error, [0.0] * whole.shape[1]
                for k, value in zip(chosen, solution.tolist(), strict=True):
                    best[k] = value
    return best
