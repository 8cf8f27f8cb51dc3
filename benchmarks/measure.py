"""What the benchmarks read off a process: clocks and peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Clock:
    """Seconds on the wall and of all the process's threads."""

    wall: float
    processor: float

    @classmethod
    def now(cls, device: torch.device | str) -> Clock:
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        return cls(time.perf_counter(), time.process_time())

    def __sub__(self, other: Clock) -> Clock:
        return Clock(self.wall - other.wall, self.processor - other.processor)

    def times(self, factor: float) -> Clock:
        return Clock(self.wall * factor, self.processor * factor)

    def as_dict(self) -> dict[str, float]:
        return {"wall": round(self.wall, 6), "processor": round(self.processor, 6)}


def median(clocks: Sequence[Clock]) -> Clock:
    return Clock(statistics.median(c.wall for c in clocks), statistics.median(c.processor for c in clocks))


def peak_memory() -> int:
    """Bytes; `getrusage` would count what the parent had when it started this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")
