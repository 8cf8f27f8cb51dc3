"""What a step of decoding costs whose sealed rows lie on disk: bytes read from it, and the share of the step's time.

Each method decodes over the same rows three ways: in host memory; on disk, where the system has kept what it likes of
them (warm); and on disk with all pages of the rows dropped from the system's cache before each step (cold), which is
what a cache far larger than memory comes to where no step finds rows of the step before. Bytes are what the system read
for this process (`/proc/self/io`), beside those of the chosen rows. Linux, as root: pages are dropped by way of
`/proc/self/map_files`.

    python -m benchmarks.disk --rows 131072 --folder /tmp
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.records import add_options, end
from sparseattn import KVCache, decode
from sparseattn.cost_model.environment import machine, versions
from sparseattn.utils.memory_advice import advise

UNNEEDED = 4  # MADV_DONTNEED: a shared mapping's pages stay in the file
METHODS = ("quest:page=16", "quest:page=32", "lowbit:bits=2,page=16")


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--rows", type=int, default=131072, help="of each KV head")
    out.add_argument("--heads", type=int, default=8, help="KV heads")
    out.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    out.add_argument("--size", type=int, default=128, help="of a head")
    out.add_argument("--budget", type=int, default=1024)
    out.add_argument("--steps", type=int, default=12, help="of each way, the first two of which do not count")
    out.add_argument("--folder", type=Path, default=Path("/tmp"), help="of the file")
    out.add_argument("--selector", action="append", help=f"default {', '.join(METHODS)}")
    add_options(out)
    return out


def filled(selector: str, place: str, options: argparse.Namespace) -> KVCache:
    """A cache of random rows in bfloat16, in order of a slow walk, so that rows of a page are alike."""
    draw = torch.Generator().manual_seed(7)
    cache = KVCache(selector, sealed_device=place, capacity=options.rows)
    chunk, at = 8192, torch.zeros(1, options.heads, 1, options.size)
    for first in range(0, options.rows, chunk):
        count = min(chunk, options.rows - first)
        steps = torch.randn(1, options.heads, count, options.size, generator=draw) * 0.2
        keys = at + steps.cumsum(2)
        at = keys[:, :, -1:] * 0.7
        values = torch.randn(1, options.heads, count, options.size, generator=draw)
        cache.append(keys.bfloat16(), values.bfloat16())
        cache.seal()
    return cache


def dropped(cache: KVCache) -> None:
    """Drop the pages of the sealed rows from memory and from the system's cache of pages."""
    for rows in (cache.stored.sealed.keys, cache.stored.sealed.values):
        storage = rows.full
        advise(storage, [(0, storage.nbytes)], UNNEEDED)
        for mapped in mappings(storage):
            with open(mapped, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mappings(storage: Tensor) -> Iterator[str]:
    """The mapping that a tensor lies in, as a file of /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span = line.split()[0]
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= storage.data_ptr() < high:
            yield f"/proc/self/map_files/{low:x}-{high:x}"


def written_back(cache: KVCache) -> None:
    """Write what lies in the system's cache of pages: dirty pages are not dropped."""
    for rows in (cache.stored.sealed.keys, cache.stored.sealed.values):
        for mapped in mappings(rows.full):
            with open(mapped, "rb") as file:
                os.fsync(file.fileno())


def bytes_read() -> int:
    """Bytes that the system has read from a disk for this process."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line)


def steps(cache: KVCache, options: argparse.Namespace, before: Callable[[], None]) -> dict[str, float]:
    """Median seconds of a step, and mean bytes that it read; the query walks as those of a text do."""
    draw = torch.Generator().manual_seed(11)
    shape = (1, options.heads, options.group, options.size)
    query = torch.randn(shape, generator=draw)
    seconds, read, rows = [], [], []
    for number in range(options.steps):
        query = 0.9 * query + 0.45 * torch.randn(shape, generator=draw)
        before()
        first, begun = bytes_read(), time.perf_counter()
        decode(query.bfloat16(), cache, options.budget)
        taken, more = time.perf_counter() - begun, bytes_read() - first
        if number > 1:
            seconds.append(taken)
            read.append(more)
            assert cache.search.latest is not None
            rows.append(int(cache.search.latest.length.sum()))
    row = 2 * options.size * 2
    return {
        "milliseconds": round(1000 * statistics.median(seconds), 3),
        "bytes_read": round(statistics.mean(read)),
        "bytes_chosen": round(statistics.mean(rows) * row),
    }


def measured(selector: str, options: argparse.Namespace) -> dict[str, Any]:
    """One method, three ways."""
    memory = steps(filled(selector, "cpu", options), options, lambda: None)
    cache = filled(selector, f"disk:{options.folder}", options)
    written_back(cache)
    found = {"memory": memory, "warm": steps(cache, options, lambda: None)}
    found["cold"] = steps(cache, options, lambda: dropped(cache))
    share = 1 - memory["milliseconds"] / found["cold"]["milliseconds"]
    whole = 2 * options.heads * options.rows * options.size * 2
    index = sum(size for name, size in cache.nbytes.items() if name not in ("kv", "books"))
    return {"selector": selector, "cache_bytes": whole, "index_bytes": index, "share_of_disk": round(share, 4), **found}


def tables(record: dict[str, Any]) -> Iterable[Table]:
    """One table, a line a method."""
    table = Table(title=f"{record['rows']:,} rows, {record['heads']} KV heads, bfloat16, budget {record['budget']}")
    columns = (
        "method",
        "memory ms",
        "warm ms",
        "cold ms",
        "MiB chosen",
        "MiB read cold",
        "MiB of cache",
        "disk's share",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right")
    for one in record["methods"]:
        mib = [one["cold"][name] / 2**20 for name in ("bytes_chosen", "bytes_read")]
        times = [f"{one[way]['milliseconds']:.1f}" for way in ("memory", "warm", "cold")]
        whole = f"{one['cache_bytes'] / 2**20:.0f}"
        table.add_row(one["selector"], *times, *(f"{size:.1f}" for size in mib), whole, f"{one['share_of_disk']:.0%}")
    yield table


def main() -> None:
    """Measure and record."""
    options = parser().parse_args()
    named = ("rows", "heads", "group", "size", "budget", "steps")
    record: dict[str, Any] = {
        "question": "what a step costs whose sealed rows lie on disk",
        **{name: getattr(options, name) for name in named},
        "threads": torch.get_num_threads(),
        "memory_limit": "none: all pages of the rows are dropped before each cold step (posix_fadvise)",
        "machine": machine(),
        "versions": versions(),
        "methods": [measured(one, options) for one in options.selector or METHODS],
    }
    end(record, "disk.json", tables, options)


if __name__ == "__main__":
    main()
