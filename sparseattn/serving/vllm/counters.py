"""What ran, counted where it runs: in a small file for each process of the engine, which any process can add up.

An engine's workers are processes of their own. The process that starts them names a folder in the environment, which
they inherit; each keeps its counts in a file there, and `/metrics` and `stats` read them all.
"""

from __future__ import annotations

import atexit
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = "SPARSEATTN_VLLM_COUNTS"  # environment variable: where the files are
NAMES = ("sparse_calls", "dense_calls", "rows_read", "rows_held", "entries_made")
FILE = struct.Struct(f"={len(NAMES)}q")  # of a process: each count in 8 bytes


@dataclass(frozen=True)
class VLLMStats:
    """Counts since the engine started, over its processes.

    Args:
        sparse_calls: tokens decoded sparsely, times layers, times processes that share a layer (tensor parallelism).
        dense_calls: attention calls of full-attention layers in which any request was attended to densely: prefill,
            short sequences, layers that stay dense.
        rows_read: rows that sparse calls read, summed over KV heads; with a choice for each query head, the most that
            one of them reads.
        rows_held: rows that full attention would have read in the same calls.
        entries_made: entries of the index that were computed, summed over layers.
    """

    sparse_calls: int = 0
    dense_calls: int = 0
    rows_read: int = 0
    rows_held: int = 0
    entries_made: int = 0

    @property
    def share(self) -> float:
        """Return rows read over rows held in sparse calls; 0 if there were none."""
        return self.rows_read / self.rows_held if self.rows_held else 0.0

    def __sub__(self, other: VLLMStats) -> VLLMStats:
        """What came since `other`."""
        return VLLMStats(*(getattr(self, name) - getattr(other, name) for name in NAMES))


class Counter:
    """This process's counts."""

    def __init__(self) -> None:
        folder = Path(os.environ[FOLDER])
        path = folder / f"{os.getpid()}.counts"  # there already where a process of this number has ended
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(FILE.size)
            self._counts = memoryview(mmap.mmap(file.fileno(), FILE.size)).cast("q")

    @classmethod
    def of_process(cls) -> Counter:
        """The one of this process."""
        global _own
        if _own is None or _own[0] != os.getpid():
            _own = os.getpid(), cls()
        return _own[1]

    def add(self, **counts: int) -> None:
        """Adds to counts by name."""
        for name, count in counts.items():
            self._counts[_PLACES[name]] += count


_PLACES = {name: place for place, name in enumerate(NAMES)}
_own: tuple[int, Counter] | None = None


def begin() -> None:
    """Names the folder, in the first process that asks; it removes the folder when it ends."""
    if Path(os.environ.get(FOLDER, "")).is_dir() and FOLDER in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="sparseattn-")
    os.environ[FOLDER] = folder
    own = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == own else None)


def stats() -> VLLMStats:
    """Return the counts of all processes of engines started from here, including those that have ended."""
    if FOLDER not in os.environ:
        return VLLMStats()
    held = [path.read_bytes() for path in Path(os.environ[FOLDER]).glob("*.counts")]
    whole = [
        FILE.unpack(counts) for counts in held if len(counts) == FILE.size
    ]  # else its process is about to write it
    return VLLMStats(*map(sum, zip(*whole, strict=True))) if whole else VLLMStats()


class Collector:
    """The counts for Prometheus, `sparseattn_*_total`."""

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import CounterMetricFamily

        texts = {
            "sparse_calls": "Tokens decoded sparsely, times layers",
            "dense_calls": "Attention calls with dense requests",
            "rows_read": "KV rows read by sparse calls",
            "rows_held": "KV rows that full attention would have read in sparse calls",
            "entries_made": "Index entries computed",
        }
        counts = stats()
        for name, text in texts.items():
            yield CounterMetricFamily(f"sparseattn_{name}", text, value=getattr(counts, name))


def publish() -> None:
    """Shows the counts at vLLM's `/metrics`, which serves the default registry of this process; once."""
    from prometheus_client import REGISTRY

    global _published
    if not _published:
        REGISTRY.register(Collector())
        _published = True


_published = False
