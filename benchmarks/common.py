"""What the benchmarks of a decode step have in common: their options, the checks of these, how a record begins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import last_cache
from benchmarks.records import RESULTS
from sparseattn.core.budget import budget_record
from sparseattn.cost_model.environment import idle_threads, kernels, machine, versions
from sparseattn.kernels.attend.dispatch import ATTEND
from sparseattn.utils.devices import features, usable_device


def add_common(out: argparse.ArgumentParser) -> None:
    """What the benchmarks of a step have in common."""
    out.add_argument("--heads", type=int, default=8, help="KV heads")
    out.add_argument("--group", type=int, default=4, help="query heads of a KV head")
    out.add_argument("--size", type=int, default=128, help="of a head")
    out.add_argument("--sink", type=int, default=4)
    out.add_argument("--window", type=int, default=64)
    out.add_argument("--seal", type=int, default=1024, help="rows that wait before they are sealed")
    out.add_argument("--impl", help="of attend; default: what it takes by itself")
    out.add_argument("--rounds", type=int, default=15, help="in which all ways take turns")
    out.add_argument("--queries", type=int, default=8, help="different ones, by turns")
    out.add_argument("--buckets", type=int, default=1024, help="of the artefact made for the bucket methods")
    out.add_argument("--hidden", type=int, default=1024, help="width of its classifiers")
    out.add_argument(
        "--fixed",
        action=argparse.BooleanOptionalAction,
        help="storage of fixed size, as one CUDA graph for a growing context needs it; default on a GPU",
    )
    out.add_argument("--evict", type=int, help="MiB written before each call; default twice the last cache, 0: none")
    out.add_argument("--copy", type=int, help="MiB copied for the bandwidth; default 512, on a GPU 2048")
    out.add_argument("--device", help="default a CUDA device where there is one, else cpu")
    out.add_argument("--threads", type=int, default=torch.get_num_threads())
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    out.add_argument("--json", action="store_true", help="print the record, on one line")
    out.add_argument("--quick", action="store_true", help="5 rounds; no selector that is slow to build unless named")


def settle_common(options: argparse.Namespace, least: Mapping[str, int]) -> None:
    """Settles and checks what the benchmarks of a step have in common; ValueError for what cannot be."""
    options.device = str(usable_device(options.device))
    on_gpu = torch.device(options.device).type == "cuda"
    options.fixed = on_gpu if options.fixed is None else options.fixed
    options.copy = (2048 if on_gpu else 512) if options.copy is None else options.copy
    if options.quick:
        options.rounds = min(options.rounds, 5)
    if options.impl not in (None, *ATTEND.names):
        raise ValueError(f"--impl is one of {', '.join(ATTEND.names)}, got {options.impl!r}")
    if options.evict is None:
        options.evict = 2 * last_cache(torch.device(options.device)) >> 20
    names = ("heads", "group", "size", "seal", "rounds", "queries", "buckets", "hidden", "copy", "threads")
    for name, number in (*least.items(), *((name, getattr(options, name)) for name in names)):
        if number < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more, got {number}")


def header(options: argparse.Namespace, question: str) -> dict[str, Any]:
    """What every record says first."""
    names = ("device", "threads", "heads", "group", "size", "budget", "sink", "window", "seal", "impl", "rounds")
    return {
        "question": question,
        **{name: getattr(options, name) for name in names},
        "budget": budget_record(options.budget),
        "dtype": options.dtype,
        "complete": False,
        "evict_mib": options.evict,
        "versions": versions(),
        "machine": machine(),
        "features": features(),
        "idle_threads": idle_threads(),
        "kernels": kernels(),
        "load": {"before": os.getloadavg()},
    }
