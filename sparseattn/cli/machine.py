"""`sparseattn machine`: measures this CPU, shows a machine's figures, and predicts what decode steps take on it."""

from __future__ import annotations

import itertools
import json as json_module
import tempfile
import time
from pathlib import Path
from typing import Any

import typer

from sparseattn.cli.command import say
from sparseattn.cli.machine_model import predict_models
from sparseattn.cli.machine_options import METHODS, MachineOptions
from sparseattn.cli.machine_ranks import RANKED, predict_ranks
from sparseattn.cli.progress import progress_of
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost
from sparseattn.cost_model.links import Link
from sparseattn.cost_model.machine import Machine, measured_path
from sparseattn.cost_model.measure import measure
from sparseattn.cost_model.model_shape import ModelShape
from sparseattn.cost_model.model_steps import Workload
from sparseattn.cost_model.rank_steps import Dealt
from sparseattn.reporting import machine_tables
from sparseattn.reporting.terminal import Screen, table_screen
from sparseattn.selectors.registry import make_selector
from sparseattn.utils.files import naming

ZONES = 4, 64  # sink and window
BUSY = 0.5  # load for each core, before, from which on a measurement is in doubt


def run(options: MachineOptions) -> None:
    """Run `sparseattn machine`."""
    heads, group, head_dim = options.sizes
    if options.name is None:
        return _measured(Shape(1, heads, group, head_dim), options.out or measured_path(), options.json)
    known = Machine.load(options.name)
    if options.model:
        workloads = [
            Workload(known, model, context, batch, options.dtype.torch)
            for model in map(ModelShape.load, options.model)
            for context, batch in itertools.product(options.contexts, options.batches)
        ]
        if options.rank_counts:
            link = Link.of(options.link)
            dealt = [Dealt(work, ranks, link) for work in workloads for ranks in options.rank_counts]
            methods, budget = options.selector or RANKED, parse_budget(options.budget)
            return predict_ranks(dealt, methods, budget, options.share == "exact", options.json, options.out)
        return predict_models(
            workloads,
            options.selector or METHODS,
            parse_budget(options.budget),
            options.json,
            options.out,
        )
    if options.selector:
        shape = Shape(options.batches[0], heads, group, head_dim, options.dtype.torch)
        return _predicted(known, shape, options.selector, options.contexts[0], options.budget, options.json)
    _show(known, options.dtype.value, options.json)


def _measured(shape: Shape, path: Path, json: bool) -> None:
    with naming(path):
        if path.is_dir():
            raise ValueError(f"--out must be a file, and {path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()  # one that cannot be written fails here, not after the work
    started = time.monotonic()
    with progress_of("measure this CPU") as progress:
        profile = measure(shape=shape, progress=progress)
    profile.save(path)
    load, cores = profile.about["load"][:1], profile.about["machine"]["cores"]
    if load and load[0] > BUSY * cores:
        say(f"other programs were running (load {load[0]:.1f}): measure again when the machine is idle")
    _show(profile, "bfloat16", json)
    if not json:
        Screen().print(f"{path}: {time.monotonic() - started:.0f} s", soft_wrap=True)


def _show(known: Machine, dtype: str, json: bool) -> None:
    if json:
        typer.echo(json_module.dumps(known.as_dict()))
        return
    Screen().print(machine_tables.speeds(known, dtype))


def _predicted(known: Machine, shape: Shape, specs: list[str], context: int, budget: str, json: bool) -> None:
    costs: dict[str, Cost] = {"dense": dense_cost(shape, context)}
    refused: dict[str, str] = {}
    for spec in specs:
        selector = make_selector(spec)
        try:
            layer = selector.for_layer(LayerContext(0, rope=Rope.of(shape.size)))
            layer.check_shape(shape.heads, shape.group, shape.size)
            cost = step_cost(layer, shape, context, parse_budget(budget), sink=ZONES[0], window=ZONES[1])
            known.seconds(cost)
        except ValueError as error:
            refused[spec] = str(error)
        else:
            costs[spec] = cost
    if len(costs) == 1:
        raise ValueError(f"{specs[0]}: {refused[specs[0]]}")
    if json:
        steps: list[dict[str, Any]] = [
            {
                "selector": spec,
                "seconds": float(f"{known.seconds(cost):.4g}"),
                "bytes": round(cost.bytes),
                "flops": round(cost.flops),
                "launches": cost.count,
                "expected": cost.expected,
            }
            for spec, cost in costs.items()
        ]
        record = {"machine": known.name, "predicted": True, "source": known.source, "steps": steps, "refused": refused}
        typer.echo(json_module.dumps(record))
        return
    table = machine_tables.steps(known, shape, context, budget_label(parse_budget(budget)), costs)
    refusals = (f"There is no prediction for {spec}: {why}" for spec, why in refused.items())
    table.note = "\n".join(filter(None, [table.note, *refusals]))
    table_screen().print(table)
