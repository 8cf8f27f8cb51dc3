"""Exact nearest keys, which building RetrievalAttention's index is made of: faiss on the GPU against torch and the CPU.

``python -m benchmarks.nearest`` from the repository root writes ``benchmarks/results/nearest-DEVICE.json``. What is not
installed is in the record with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import records
from benchmarks.inputs import Inputs, Shape
from benchmarks.measure import Clock, spread
from benchmarks.records import RESULTS
from sparseattn.cost_model.environment import machine, versions
from sparseattn.kernels.nearest import nearest
from sparseattn.utils.devices import features, usable_device


def faiss_gpu() -> str | None:
    """Why faiss does not search on a GPU here, or None if it does."""
    try:
        import faiss
    except ImportError as error:
        return f"faiss is not installed ({error})"
    if not hasattr(faiss, "StandardGpuResources"):
        return "this faiss was built for the CPU alone"
    return None if faiss.get_num_gpus() else "faiss finds no GPU"


def measure(queries: Tensor, keys: Tensor, count: int, repeats: int, device: str) -> dict[str, Any]:
    """Seconds of each way, and the share of its ids that the first way found too (ties aside, 1).

    In host memory `nearest` takes faiss's GPU where there is one, and its CPU code elsewhere.
    """
    host = "faiss on the CPU" if faiss_gpu() else "faiss on the GPU, from host memory"
    ways: dict[str, tuple[Tensor, Tensor]] = {host: (queries, keys)}
    if torch.device(device).type == "cuda":
        ways["torch on the GPU"] = (queries.to(device), keys.to(device))
    out: dict[str, Any] = {"faiss_gpu": faiss_gpu() or "runs", "ways": {}}
    first: Tensor | None = None
    for name, (asked, held) in ways.items():
        taken = []
        try:
            for _ in range(repeats + 1):
                begun = Clock.now(device)
                ids = nearest(asked, held, count)[1].cpu()
                taken.append((Clock.now(device) - begun).wall)
        except ImportError as error:
            out["ways"][name] = str(error)
            continue
        first = ids if first is None else first
        shared = (ids[:, :, None] == first[:, None]).any(-1).double().mean()
        out["ways"][name] = {"seconds": spread(taken[1:]), "same": round(float(shared), 5)}
    return out


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m benchmarks.nearest", description="Exact nearest keys.")
    out.add_argument("--rows", type=int, default=131_072, help="keys")
    out.add_argument("--queries", type=int, default=4096)
    out.add_argument("--size", type=int, default=128, help="D")
    out.add_argument("--count", type=int, default=100, help="nearest keys of a query")
    out.add_argument("--repeats", type=int, default=3)
    out.add_argument("--device", help="default a CUDA device where there is one, else cpu")
    out.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    return out


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> None:
    command = parser()
    options = command.parse_args(arguments)
    for name in ("rows", "queries", "size", "count", "repeats"):
        if getattr(options, name) < 1:
            command.error(f"--{name} is 1 or more, got {getattr(options, name)}")
    try:
        options.device = str(usable_device(options.device))
    except ValueError as error:
        command.error(str(error))
    inputs = Inputs(Shape(1, 1, 1, options.rows, options.size, "float32", "cpu"), learned=True)
    keys, _ = inputs.rows(0, options.rows)
    queries = inputs.queries(0, options.queries)
    result = measure(queries[0, 0, 0], keys[0, 0], options.count, options.repeats, options.device)
    names = ("rows", "queries", "size", "count", "repeats", "device")
    record = {"question": "exact nearest keys", "dtype": "float32", **{name: getattr(options, name) for name in names}}
    record |= result | {"versions": versions(), "machine": machine(), "features": features()}
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"nearest-{torch.device(options.device).type}.json"
    records.save(record, path)
    say(f"faiss on the GPU: {record['faiss_gpu']}")
    for name, way in result["ways"].items():
        say(f"{name}: {way if isinstance(way, str) else way['seconds']['median']} s; record: {path}")


if __name__ == "__main__":
    main()
