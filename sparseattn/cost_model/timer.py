"""Seconds of one call whose data lies in no cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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
