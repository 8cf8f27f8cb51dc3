"""Predicted against measured: the steps of `benchmarks.scaling`, and what the model of the machine says of each.

``python -m benchmarks.predicted`` from the repository root reads the machine's profile and a record of
`benchmarks.scaling`, and writes ``benchmarks/results/predicted-cpu.json``. It measures nothing: the profile knows none
of the points that it is judged by. `benchmarks.scaling --machine` measures the machine between the points, so that the
speed of both is that of the same minutes; `sparseattn machine` measures it at another time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from benchmarks import records
from benchmarks.methods import Method
from benchmarks.records import RESULTS
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost
from sparseattn.cost_model.data_sheet import CPU
from sparseattn.cost_model.environment import versions
from sparseattn.cost_model.machine import Machine
from sparseattn.selectors.base import Selector
from sparseattn.selectors.clusters.bucket_table import Partitioned
from sparseattn.selectors.parameters.saap_artefact import Artefact
from sparseattn.selectors.parameters.saap_partition import Classifier, Partition
from sparseattn.selectors.registry import make_selector

RECORDS = ("scaling-cpu",)
BOUND = 0.25  # of the measured time, by which a prediction may be off


def predicted(record: Mapping[str, Any], machine: Machine, folder: Path) -> Iterator[dict[str, Any]]:
    """Every point of a record of `benchmarks.scaling`, measured and predicted.

    Args:
        folder: for the artefact of a bucket method, of which shapes alone count.
    """
    for sweep, result in record["sweeps"].items():
        for point in result["points"]:
            batch, heads, group, size = (point[name] for name in ("batch", "heads", "group", "size"))
            shape = Shape(batch, heads, group, size, _dtype(point["dtype"]))
            rows, seconds = point["rows"], point["seconds"]
            method = Method.of(point["selector"], argparse.Namespace(**_sizes(record)))
            selector = _selector(method, shape, folder, point)
            cost = step_cost(selector, shape, rows, point["budget"], sink=method.sink, window=method.window)
            full = dense_cost(shape, rows)
            took = {"step": seconds["step"], "dense": seconds["dense:" + point["dense"]]}
            told = {"step": machine.seconds(cost), "dense": machine.seconds(full)}
            yield {
                "sweep": sweep,
                "at": point["at"],
                "selector": point["selector"],
                **{name: point[name] for name in ("batch", "heads", "rows", "budget")},
                "measured": {name: one["median"] for name, one in took.items()},
                "predicted": {name: float(f"{one:.4g}") for name, one in told.items()},
                "error": {name: round(told[name] / took[name]["median"] - 1, 4) for name in told},
                "bytes": {
                    "measured": {"scan": point["scan_bytes"], "rows": point["rows_bytes"]},
                    "predicted": {"scan": round(cost.scan_bytes), "rows": round(cost.rows_bytes)},
                },
                "parts": _parts(cost, machine),
            }


def _parts(cost: Cost, machine: Machine) -> dict[str, float]:
    """Predicted seconds of a step by kind of launch."""
    out: dict[str, float] = {}
    for launch in cost.launches:
        seconds = machine.launch_seconds(launch, cost.dtype)
        out[launch.kind] = float(f"{out.get(launch.kind, 0.0) + seconds:.4g}")
    return out


def _dtype(name: str) -> torch.dtype:
    kind = getattr(torch, name)
    assert isinstance(kind, torch.dtype)
    return kind


def _sizes(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: record[name] for name in ("sink", "window", "budget")}, "codec": None}


def _selector(method: Method, shape: Shape, folder: Path, point: Mapping[str, Any]) -> Selector:
    """The method for layer 0; a bucket method with an artefact of the point's shapes."""
    if not issubclass(method.kind, Partitioned):
        return make_selector(method.spec).for_layer(0)
    if "artefact" not in point:
        raise ValueError(f"the record does not say how many buckets {method.spec} has: make it anew")
    buckets, hidden = (point["artefact"][name] for name in ("buckets", "hidden"))
    path = folder / f"{shape.heads}-{shape.size}-{buckets}-{hidden}.safetensors"
    if not path.exists():
        heads, size = shape.heads, shape.size
        shapes = {"w1": (hidden, size), "b1": (hidden,), "w2": (buckets, hidden), "b2": (buckets,)}
        classifier = Classifier(**{name: torch.ones(heads, *one) for name, one in shapes.items()})
        partition = Partition(torch.ones(heads, buckets, size), classifier)
        Artefact({0: partition}, roped=True, meta={"model": "none: shapes alone"}).save(path)
    spec = method.spec + (":" if ":" not in method.spec else ",") + f"artefact={path}"
    return make_selector(spec).for_layer(0)


def summary(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the steps of each method, and of dense attention once a shape: how many predictions are within the bound, the
    median and the largest error, without their signs."""
    errors: dict[str, list[float]] = {}
    for point in points:
        errors.setdefault(point["selector"], []).append(point["error"]["step"])
    shapes = {(p["batch"], p["heads"], p["rows"]): p["error"]["dense"] for p in points}
    errors["dense"] = list(shapes.values())
    return {
        name: {
            "points": len(own),
            "within": sum(abs(one) <= BOUND for one in own),
            "median": round(statistics.median(map(abs, own)), 4),
            "largest": round(max(map(abs, own)), 4),
        }
        for name, own in errors.items()
    }


def tables(record: Mapping[str, Any]) -> list[Table]:
    """Every point, and the summary."""
    machine = record["machine"]["name"]
    table = Table(title=f"ms, measured and predicted by {machine}", title_justify="left", box=SIMPLE_HEAD)
    names = ("sweep", "selector", "at", "B x H", "step", "predicted", "off", "dense", "predicted", "off")
    for name in names:
        table.add_column(name, justify="left" if name in ("sweep", "selector") else "right", no_wrap=True)
    for point in record["points"]:
        cells = []
        for name in ("step", "dense"):
            took, told = point["measured"][name], point["predicted"][name]
            cells += [f"{took * 1e3:.2f}", f"{told * 1e3:.2f}", f"{point['error'][name]:+.0%}"]
        at = f"{point['batch']} x {point['heads']}"
        table.add_row(point["sweep"], point["selector"], str(point["at"]), at, *cells)
    short = Table(title=f"within {record['bound']:.0%}", title_justify="left", box=SIMPLE_HEAD)
    for name in ("", "points", "within", "median", "largest"):
        short.add_column(name, justify="right" if name else "left")
    for name, one in record["summary"].items():
        short.add_row(name, str(one["points"]), str(one["within"]), f"{one['median']:.0%}", f"{one['largest']:.0%}")
    return [table, short]


def main(arguments: Sequence[str] | None = None) -> None:
    command = argparse.ArgumentParser(prog="python -m benchmarks.predicted", description="Predicted against measured.")
    command.add_argument(
        "--machine", default=CPU, help="cpu, as measured here, a GPU by name, or the file of a profile"
    )
    command.add_argument("--record", action="append", help=f"of benchmarks.scaling; more; default {' '.join(RECORDS)}")
    command.add_argument("--results", type=Path, default=RESULTS, help="folder of the records of benchmarks.scaling")
    command.add_argument("--out", type=Path, help="record to write; default predicted-NAME.json in that folder")
    command.add_argument("--json", action="store_true", help="print the record, on one line")
    options = command.parse_args(arguments)
    names = options.record or RECORDS
    try:
        machine = Machine.load(options.machine)
        read = {name: json.loads((options.results / f"{name}.json").read_text()) for name in names}
        with tempfile.TemporaryDirectory() as folder:
            points = [
                {"record": name, **point}
                for name, one in read.items()
                for point in predicted(one, machine, Path(folder))
            ]
    except (ValueError, OSError, KeyError) as error:
        command.error(str(error))
    record = {
        "question": "how far a step's predicted time is from its measured one",
        "machine": machine.as_dict(),
        "records": {name: {"versions": one["versions"], "load": one["load"]} for name, one in read.items()},
        "versions": versions(),
        "bound": BOUND,
        "summary": summary(points),
        "points": points,
        "complete": True,
    }
    path = options.out or options.results / f"predicted-{machine.name}.json"
    records.save(record, path)
    records.show(record, tables, f"record: {path}", options.json)


if __name__ == "__main__":
    main()
