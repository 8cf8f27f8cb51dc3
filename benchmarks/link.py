"""How long processes of this machine take to gather what each has: what `sparseattn machine --link` takes.

``torchrun --nproc-per-node 2 -m benchmarks.link`` from the repository root writes ``benchmarks/results/link.json``.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from benchmarks import records
from sparseattn.cache.ranks import Ranks
from sparseattn.cost_model.environment import machine, versions

NAME = "link.json"
LITTLE, MUCH = 16, 4 << 20  # bytes


def seconds(ranks: Ranks, size: int, rounds: int) -> float:
    """The median of so many gathers of `size` bytes from each rank."""
    part, taken = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(rounds):
        dist.barrier(ranks.group)
        started = time.perf_counter()
        ranks.gather(part, "checks")
        taken.append(time.perf_counter() - started)
    return sorted(taken)[len(taken) // 2]


def measured(ranks: Ranks, rounds: int) -> dict[str, Any]:
    """A latency for each doubling that reaches all ranks, and the bytes a second that a rank receives beyond it."""
    few, many = (seconds(ranks, size, rounds) for size in (LITTLE, MUCH))
    received = (MUCH - LITTLE) * (ranks.size - 1)
    return {
        "ranks": ranks.size,
        "backend": dist.get_backend(ranks.group),
        "latency": few / math.ceil(math.log2(ranks.size)),
        "bandwidth": received / (many - few),
        "seconds": {str(LITTLE): few, str(MUCH): many},
    }


def table(record: Any) -> Iterable[Table]:
    out = Table("ranks", "backend", "latency us", "GB/s")
    link = record["link"]
    latency, bandwidth = f"{1e6 * link['latency']:.0f}", f"{link['bandwidth'] / 1e9:.2f}"
    out.add_row(str(link["ranks"]), link["backend"], latency, bandwidth)
    yield out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="torchrun -m benchmarks.link", description="What gathering takes.")
    out.add_argument("--backend", default="gloo", help="of torch.distributed")
    out.add_argument("--rounds", type=int, default=101)
    records.add_options(out)
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    command = parser()
    options = command.parse_args(arguments)
    if "WORLD_SIZE" not in os.environ or int(os.environ["WORLD_SIZE"]) < 2:
        command.error("this runs in two processes or more: torchrun --nproc-per-node 2 -m benchmarks.link")
    dist.init_process_group(options.backend)
    ranks = Ranks()
    link = measured(ranks, options.rounds)
    if ranks.rank == 0:
        record = {"question": "what gathering takes here", "link": link, "versions": versions(), "machine": machine()}
        records.end(record, NAME, table, options)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
