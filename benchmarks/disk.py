"""What a step of decoding costs whose sealed rows lie on disk and are several times as large as memory.

Some layers of random rows are decoded in turn, as a model's are, with other work before each. Ways of each method: with
all rows in host memory, and in a process whose memory is limited (a control group), with the rows in a mapped file:
there as they come, and with all pages of the rows dropped from the system's cache of pages before each step, as where
no step finds rows of the step before. Both with and without asking, ahead of the work before a layer, for the pages
that its last step asked for, by turns. Last, attention over all rows within the same limit. Bytes are those that the
system read from a disk for the process (`/proc/self/io`), beside those of the chosen rows. Linux, as root: for the
group, and since pages are dropped by way of `/proc/self/map_files`.

    python -m benchmarks.disk --rows 262144 --layers 8 --folder /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.memory_limit import group, most_used, run_within
from benchmarks.records import add_options, end
from sparseattn import KVCache, Selection, decode
from sparseattn.cache.disk_rows import DiskRows
from sparseattn.cost_model.environment import machine, versions
from sparseattn.utils.memory_advice import WANTED, advise

UNNEEDED = 4  # MADV_DONTNEED: a shared mapping's pages stay in the file
METHODS = ("quest:page=16", "lowbit:bits=2,page=16")
FIRST = 3  # steps that do not count
WAYS = {
    "memory": "in memory",
    "limited": "on disk",
    "limited_prefetched": "on disk, prefetched",
    "dropped": "on disk, none in memory",
    "dropped_prefetched": "on disk, none in memory, prefetched",
    "everything": "on disk, all read",
}


def parser() -> argparse.ArgumentParser:
    """The options."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--rows", type=int, default=262144, help="of each KV head")
    out.add_argument("--layers", type=int, default=8)
    out.add_argument("--heads", type=int, default=8, help="KV heads")
    out.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    out.add_argument("--size", type=int, default=128, help="of a head")
    out.add_argument("--budget", type=int, default=1024)
    out.add_argument("--work", type=float, default=2.0, help="milliseconds of matrix products before each layer")
    out.add_argument("--steps", type=int, default=12, help="of each way")
    out.add_argument("--part", type=float, default=0.25, help="of the rows' bytes that the process may have as memory")
    out.add_argument("--folder", type=Path, default=Path("/tmp"), help="of the files")
    out.add_argument("--selector", action="append", help=f"default {', '.join(METHODS)}")
    out.add_argument("--within", action="store_true", help="measure the ways on disk here, and print them as JSON")
    add_options(out)
    return out


def filled(selector: str, place: str, options: argparse.Namespace) -> list[KVCache]:
    """A cache a layer of random rows in bfloat16, in order of a slow walk, so that rows of a page are alike."""
    caches = []
    for layer in range(options.layers):
        draw = torch.Generator().manual_seed(7 + layer)
        cache = KVCache(selector, sealed_device=place, capacity=options.rows)
        chunk, at = 4096, torch.zeros(1, options.heads, 1, options.size)
        for first in range(0, options.rows, chunk):
            count = min(chunk, options.rows - first)
            steps = torch.randn(1, options.heads, count, options.size, generator=draw) * 0.2
            keys = at + steps.cumsum(2)
            at = keys[:, :, -1:] * 0.7
            values = torch.randn(1, options.heads, count, options.size, generator=draw)
            cache.append(keys.bfloat16(), values.bfloat16())
            cache.seal()
        caches.append(cache)
    return caches


def storages(caches: Iterable[KVCache]) -> Iterator[Tensor]:
    """Where the sealed rows of each lie, keys and values."""
    for cache in caches:
        yield from (cache.stored.sealed.keys.full, cache.stored.sealed.values.full)


def mapped(storage: Tensor) -> str:
    """The mapping that a tensor lies in, as a file of /proc."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= storage.data_ptr() < high:
            return f"/proc/self/map_files/{low:x}-{high:x}"
    raise RuntimeError("the rows lie in no mapping")


def write_back(caches: Iterable[KVCache]) -> None:
    """Write what lies in the system's cache of pages: dirty pages are not dropped."""
    for storage in storages(caches):
        with open(mapped(storage), "rb") as file:
            os.fsync(file.fileno())


def drop(caches: Iterable[KVCache]) -> None:
    """Drop the pages of the sealed rows from memory and from the system's cache of pages."""
    for storage in storages(caches):
        advise(storage, [(0, storage.nbytes)], UNNEEDED)
        with open(mapped(storage), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read() -> int:
    """Bytes that the system has read from a disk for this process."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "read_bytes" in line)


class Walk:
    """Steps over all layers: queries that walk as those of a text do, and what the steps took."""

    def __init__(self, caches: list[KVCache], options: argparse.Namespace) -> None:
        self.caches, self.options = caches, options
        self.draw = torch.Generator().manual_seed(11)
        self.shape = (1, options.heads, options.group, options.size)
        self.queries = [torch.randn(self.shape, generator=self.draw) for _ in caches]
        self.chosen: list[Tensor] = []  # of each layer in the last step
        self.asked: list[list[tuple[Tensor, list[tuple[int, int]]]]] = [[] for _ in caches]  # storages, bytes of each
        self.matrix = torch.randn(256, 256)

    def step(self, prefetch: bool = False, dropped: bool = False, everything: bool = False) -> dict[str, float]:
        """Milliseconds of a step without the work before layers, bytes read from disk, bytes chosen, and the share of
        chosen rows that the last step had chosen too."""
        if dropped:
            drop(self.caches)
        taken, begun_reading, rows, again = 0.0, bytes_read(), 0, []
        for layer, cache in enumerate(self.caches):
            noise = torch.randn(self.shape, generator=self.draw)
            self.queries[layer] = query = 0.9 * self.queries[layer] + 0.45 * noise
            begun = time.perf_counter()
            if prefetch:
                for storage, ranges in self.asked[layer]:
                    advise(storage, ranges, WANTED)
            taken += time.perf_counter() - begun
            end_of_work = time.perf_counter() + self.options.work / 1000
            while time.perf_counter() < end_of_work:
                self.matrix @ self.matrix
            begun = time.perf_counter()
            decode(query.bfloat16(), cache, "100%" if everything else self.options.budget)
            taken += time.perf_counter() - begun
            assert cache.search.latest is not None
            rows += int(cache.search.latest.length.sum())
            sealed = cache.stored.sealed
            self.asked[layer] = [
                (kept.full, kept._ranges(cache.search.latest))
                for kept in (sealed.keys, sealed.values)
                if isinstance(kept, DiskRows)
            ]
            if not everything:
                again.append(self._again(layer, cache.search.latest))
        return {
            "milliseconds": 1000 * taken,
            "bytes_read": bytes_read() - begun_reading,
            "bytes_chosen": rows * 2 * self.options.size * 2,
            "chosen_again": statistics.mean(again) if again else 1.0,
        }

    def _again(self, layer: int, chosen: Selection) -> float:
        """The share of a choice that the last step's had too."""
        now = torch.zeros(chosen.start.shape[1], self.options.rows + chosen.span, dtype=torch.bool)
        now.scatter_(1, chosen.start[0].long(), chosen.length[0] > 0)
        if len(self.chosen) <= layer:
            self.chosen.append(now)
        before, self.chosen[layer] = self.chosen[layer], now
        return float((before & now).sum() / now.sum())


def summed(steps: list[dict[str, float]]) -> dict[str, float]:
    """The median of times and the means of the rest."""
    return {
        name: (statistics.median if name == "milliseconds" else statistics.mean)(step[name] for step in steps)
        for name in steps[0]
    }


def on_disk(selector: str, options: argparse.Namespace) -> dict[str, Any]:
    """The ways on disk, in this process."""
    caches = filled(selector, f"disk:{options.folder}", options)
    write_back(caches)
    walk, found = Walk(caches, options), {}
    for way, dropped in (("limited", False), ("dropped", True)):
        for _ in range(FIRST):
            walk.step(dropped=dropped)
        steps: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for number in range(2 * options.steps):
            prefetch = bool(number % 2)
            steps[prefetch].append(walk.step(prefetch, dropped))
        found[way], found[f"{way}_prefetched"] = summed(steps[False]), summed(steps[True])
    found["everything"] = summed([walk.step(everything=True)])
    index = sum(size for cache in caches for name, size in cache.nbytes.items() if name not in ("kv", "books"))
    return {**found, "index_bytes": index}


def measured(selector: str, options: argparse.Namespace) -> dict[str, Any]:
    """One method, all ways."""
    walk = Walk(filled(selector, "cpu", options), options)
    steps = [walk.step() for _ in range(FIRST + options.steps)]
    memory = summed(steps[FIRST:])
    del walk
    whole = 2 * options.layers * options.heads * options.rows * options.size * 2
    limit = int(options.part * whole)
    names = ("rows", "layers", "heads", "group", "size", "budget", "work", "steps", "folder")
    given = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    with group(limit) as folder:
        found = json.loads(run_within(folder, ["-m", "benchmarks.disk", "--within", "--selector", selector, *given]))
        most = most_used(folder)
    return {
        "selector": selector,
        "cache_bytes": whole,
        "memory_limit_bytes": limit,
        "most_bytes_used": most,
        "memory": memory,
        **found,
    }


def flat(method: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways of one method, a record each."""
    return [{"selector": method["selector"], "rows_lie": words, **method[way]} for way, words in WAYS.items()]


def tables(record: dict[str, Any]) -> Iterable[Table]:
    """One table, a line a method and way."""
    shape = f"{record['layers']} layers of {record['rows']:,} rows, {record['heads']} KV heads"
    table = Table(title=f"{shape}, bfloat16, budget {record['budget']}")
    for name in ("method", "rows lie", "ms a step", "MiB chosen", "chosen again", "MiB read"):
        table.add_column(name, justify="left" if name in ("method", "rows lie") else "right")
    for way in record["ways"]:
        mib = [f"{way[name] / 2**20:.1f}" for name in ("bytes_chosen", "bytes_read")]
        again = f"{way['chosen_again']:.0%}"
        table.add_row(way["selector"], way["rows_lie"], f"{way['milliseconds']:.1f}", mib[0], again, mib[1])
    yield table


def main() -> None:
    """Measure and record."""
    options = parser().parse_args()
    if options.within:
        json.dump(on_disk(options.selector[0], options), sys.stdout)
        return
    named = ("rows", "layers", "heads", "group", "size", "budget", "work", "steps", "part")
    record: dict[str, Any] = {
        "question": "what a step costs whose sealed rows lie on disk and are several times as large as memory",
        **{name: getattr(options, name) for name in named},
        "threads": torch.get_num_threads(),
        "machine": machine(),
        "versions": versions(),
    }
    methods = [measured(one, options) for one in options.selector or METHODS]
    record["ways"] = [way for method in methods for way in flat(method)]
    apart = ("selector", "cache_bytes", "memory_limit_bytes", "most_bytes_used", "index_bytes")
    record["methods"] = [{name: method[name] for name in apart} for method in methods]
    end(record, "disk.json", tables, options)


if __name__ == "__main__":
    main()
