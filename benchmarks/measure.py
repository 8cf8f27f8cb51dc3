"""What the benchmarks read off a process: clocks, and memory of the process and of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


class Timer:
    """Seconds of one call whose data is not in a cache, as in a model, where other layers' rows come in between.

    Before every call something larger than the last cache is written: with one layer's rows and metadata left in it,
    steps would look faster than they are (Quest's bounds of 131,072 rows are 34 MB). On a GPU by CUDA events, so that
    a call is timed from its first kernel to its last.

    Args:
        evict: bytes to write; 0 leaves the caches as they are.
    """

    def __init__(self, device: torch.device | str, evict: int) -> None:
        self.device = torch.device(device)
        self._other = torch.empty(evict, dtype=torch.uint8, device=self.device)

    def __call__(self, call: Callable[[], Any]) -> float:
        self._other.fill_(1)
        if self.device.type != "cuda":
            started = time.perf_counter()
            call()
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def last_cache(device: torch.device) -> int:
    """Bytes of the last cache before the memory: a GPU's L2, a processor's L3; 64 MiB where it does not say."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    try:
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError):
        return 64 << 20


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
