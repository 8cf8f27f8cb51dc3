"""Ways that take turns: seconds of every way in every round, and what is read off them.

Decoding is bound by bytes, so each time is told as two ratios. To dense: within each round, the seconds of the fastest
dense way over those of the step, then the median over the rounds. To the bytes: what the step must read (the rows
selected, each once for a KV head, sink and window, and what the selector says it read to choose) over the bandwidth of
copying in the same rounds, bytes read plus bytes written. A processor reads faster than it copies, so that share can
pass 1; the bandwidth of reading alone is in the record too.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import dense
from benchmarks.measure import Timer, spread

WARM = 2  # calls that do not count: compilers run, storage is allocated
SLOW = 2.0  # times the fastest dense way, beyond which one is left out of the rounds
LOOKS = 3  # calls of each dense way in the first look


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
