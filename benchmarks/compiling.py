"""How long a method's first step waits for numba, with nothing compiled before: the package's way, and numba's own.

``python -m benchmarks.compiling`` from the repository root writes ``benchmarks/results/compiling-cpu.json``. Each
measurement is a process of its own with an empty folder for compiled code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import records
from sparseattn.cli.progress import progress_bar
from sparseattn.cost_model.environment import machine, versions
from sparseattn.selectors.registry import make_selector

NAME = "compiling-cpu"
SELECTORS = ("quest", "quest:int8=True", "lowbit", "querypq:missed=0", "retroinfer", "retrieval")
WAYS = {
    "ours": "only what Python calls becomes machine code, and Python's collector comes seldom meanwhile",
    "numba": "every function does, as numba has it of itself; without ways in for C",
}
SHAPE = {"heads": 2, "group": 3, "size": 64, "rows": 2048, "budget": 128}
# Times a prefill, its index and a step. The second time, all is compiled: what is left is the work itself.
CHILD = """
import hashlib, json, sys, time
import numba
from numba.core import compiler
spec, way, shape = json.loads(sys.argv[1])
if way == "numba":
    import sparseattn.kernels.numba_linking as linking
    linking.KernelCompiler = compiler.Compiler
    linking.for_kernels = lambda dispatcher: None
    assert "sparseattn.kernels.numba_cache" not in sys.modules
    own = numba.njit
    numba.njit = lambda *given, **options: own(*given, **{**options, "no_cpython_wrapper": False})
import torch
from sparseattn import KVCache, decode
heads, group, size, rows, budget = shape.values()
def step():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 1, heads, rows, size)
    begun = time.perf_counter()
    cache = KVCache(spec, sink=4, window=64)
    cache.append(keys, values, torch.randn(1, heads, group, rows, size) if cache.learns else None)
    cache.seal()
    out = decode(torch.randn(1, heads, group, size), cache, budget)
    return time.perf_counter() - begun, hashlib.sha256(out.numpy()).hexdigest()
(first, before), (again, after) = step(), step()
print(json.dumps({"seconds": first - again, "out": before}))
"""


def measured(spec: str, way: str) -> dict[str, Any]:
    """Seconds for which the first step of a process waits for numba, and a hash of its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-c", CHILD, json.dumps([spec, way, SHAPE])]
        environment = os.environ | {"NUMBA_CACHE_DIR": folder, "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        raise RuntimeError(f"{spec}: {said[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def line(spec: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What is recorded of a method. Both ways must give the same step, to the last bit."""
    if len({one["out"] for runs in found.values() for one in runs}) != 1:
        raise RuntimeError(f"{spec}: the two ways to compile give different steps")
    seconds = {way: [round(one["seconds"], 2) for one in runs] for way, runs in found.items()}
    middle = {way: round(median(runs), 2) for way, runs in seconds.items()}
    return {"selector": spec, "seconds": middle, "runs": seconds, "share": round(middle["ours"] / middle["numba"], 2)}


def tables(record: Mapping[str, Any]) -> Iterable[Table]:
    """A row for each method."""
    table = Table(title="seconds for which the first step waits for numba", title_justify="left")
    for name in ("selector", *WAYS, "share"):
        table.add_column(name, justify="left" if name == "selector" else "right")
    for one in record["results"]:
        table.add_row(one["selector"], *(f"{one['seconds'][way]:.1f}" for way in WAYS), f"{one['share']:.0%}")
    yield table


def main(arguments: Sequence[str] | None = None) -> None:
    command = argparse.ArgumentParser("python -m benchmarks.compiling", description=__doc__.partition("\n")[0])
    command.add_argument("--selector", action="append", help=f"default {', '.join(SELECTORS)}")
    command.add_argument("--rounds", type=int, default=3, help="processes for each method and way, by turns")
    records.add_options(command)
    options = command.parse_args(arguments)
    specs = options.selector or list(SELECTORS)
    if options.rounds < 1:
        command.error(f"--rounds is 1 or more, got {options.rounds}")
    try:
        for spec in specs:
            make_selector(spec)
    except ValueError as error:
        command.error(str(error))
    results = []
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(specs) * options.rounds * len(WAYS))
        for spec in specs:
            found: dict[str, list[Any]] = {way: [] for way in WAYS}
            for _ in range(options.rounds):
                for way, runs in found.items():
                    runs.append(measured(spec, way))
                    bar.advance(task)
            results.append(line(spec, found))
    record: dict[str, Any] = {"question": __doc__.partition("\n")[0], "ways": WAYS, "shape": SHAPE, "dtype": "float32"}
    record |= {"rounds": options.rounds, "results": results, "versions": versions(), "machine": machine()}
    records.end(record, f"{NAME}.json", tables, options)


if __name__ == "__main__":
    main()
