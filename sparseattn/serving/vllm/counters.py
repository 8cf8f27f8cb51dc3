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
from pathlib import Path
from typing import Any

from sparseattn.core.activity import NAMES, Activity, LayerActivity, added

FOLDER = "SPARSEATTN_VLLM_COUNTS"  # environment variable: where the files are
LAYERS = 1024  # of a model, at most
LAYER = struct.Struct(f"={len(NAMES)}q")  # of a process and a layer: each count in 8 bytes


def mapped(kind: str, size: int) -> mmap.mmap:
    """Return this process's file of a kind, which has its bytes on the disk: a disk that fills up later ends nobody.

    Raises:
        OSError: the folder is gone, or the disk is full.
    """
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.{kind}"  # there already where a process of this number has ended
    with path.open("r+b" if path.exists() else "w+b") as file:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            why = f"{error.strerror}: counts of what is served take {size >> 10} KiB"
            raise OSError(error.errno, why, str(path)) from None
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


class Counter:
    """This process's counts."""

    def __init__(self) -> None:
        import numpy as np  # not needed by those who only read counts, such as the help of commands

        counts = np.frombuffer(mapped("counts", LAYERS * LAYER.size), np.int64)
        self._layers: Any = counts.reshape(LAYERS, len(NAMES))

    @classmethod
    def of_process(cls) -> Counter:
        """Return the one of this process."""
        global _own
        if _own is None or _own[0] != os.getpid():
            _own = os.getpid(), cls()
        return _own[1]

    def add(self, layer: int, **counts: int) -> None:
        """Add to counts of a layer by name."""
        for name, count in counts.items():
            self._layers[layer, _PLACES[name]] += count

    def add_step(self, layers: Any, counts: Any) -> None:
        """Add to all counts of several layers, none of them twice: `[n,7]` int64 in the order of `activity.NAMES`."""
        self._layers[layers] += counts


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


def stats() -> Activity:
    """Return the counts of all processes of engines started from here, including those that have ended.

    A layer that processes share (tensor parallelism) counts its steps and rows in each. With a choice for each query
    head, `rows_read` is of the most that one of them reads.
    """
    if FOLDER not in os.environ:
        return Activity()
    files = [path.read_bytes() for path in Path(os.environ[FOLDER]).glob("*.counts")]
    return added(_counted(counts) for counts in files if len(counts) == LAYERS * LAYER.size)  # else it is being made


def _counted(counts: bytes) -> Activity:
    """Return the counts of one process, of the layers that did anything."""
    return Activity(
        {layer: LayerActivity(*numbers) for layer, numbers in enumerate(LAYER.iter_unpack(counts)) if any(numbers)}
    )


def add_mismatch(why: str) -> None:
    """Take note that this process serves as stock vLLM where it was asked to serve sparsely."""
    begin()
    (Path(os.environ[FOLDER]) / f"{os.getpid()}.mismatch").write_text(why)


def mismatches() -> list[str]:
    """Why processes of engines started from here serve as stock vLLM where they were asked to serve sparsely."""
    if FOLDER not in os.environ:
        return []
    return [path.read_text() for path in sorted(Path(os.environ[FOLDER]).glob("*.mismatch"))]


class Collector:
    """The counts for Prometheus, `sparseattn_*_total` by layer."""

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import CounterMetricFamily

        texts = {
            "sparse_steps": "Tokens decoded sparsely",
            "dense_steps": "Attention calls with dense requests",
            "rows_read": "KV rows read by sparse steps",
            "rows_held": "KV rows that full attention would have read in sparse steps",
            "bytes_read": "Bytes of KV rows and index read by sparse steps",
            "bytes_held": "Bytes of KV rows that full attention would have read in sparse steps",
            "entries_made": "Index entries computed",
        }
        counts = stats()
        for name, text in texts.items():
            family = CounterMetricFamily(f"sparseattn_{name}", text, labels=["layer"])
            for layer, numbers in counts.layers.items():
                family.add_metric([str(layer)], getattr(numbers, name))
            yield family
        text = "Processes that serve as stock vLLM because they failed the self-test"
        yield CounterMetricFamily("sparseattn_mismatches", text, value=len(mismatches()))


def publish() -> None:
    """Show the counts at vLLM's `/metrics`, which serves the default registry of this process; once."""
    from prometheus_client import REGISTRY

    global _published
    if not _published:
        REGISTRY.register(Collector())
        _published = True


_published = False
