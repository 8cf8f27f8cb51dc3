"""What the benchmarks read off a process: clocks, and memory of the process and of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparseattn.cost_model.timer import Timer as Timer
from sparseattn.cost_model.timer import last_cache as last_cache


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


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    ordered = sorted(seconds)
    low, middle, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    named = {"median": middle, "q25": low, "q75": high, "min": ordered[0], "max": ordered[-1]}
    return {name: float(f"{value:.6g}") for name, value in named.items()}


class Temporaries(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes while it is open: `peak` is the most that lived at once.

    What is inside an operation (a product's packing, a sort's buffers), numpy's arrays and memory of compiled code are
    not seen. On a GPU, `torch.cuda.max_memory_allocated` sees all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sweep()
        given = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = {storage._cdata for storage in given}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                if storage._cdata not in before and storage._cdata not in self._live:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out

    def _sweep(self) -> None:
        self._live = {at: (reference, size) for at, (reference, size) in self._live.items() if not reference.expired()}
