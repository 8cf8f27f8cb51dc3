"""`sparseattn machine`: measures this CPU, shows a machine's figures, and predicts what decode steps take on it."""

from __future__ import annotations

import itertools
import json as json_module
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cli import options as shared
from sparseattn.cli import values
from sparseattn.cli.command import command, say
from sparseattn.cli.machine_model import METHODS, predict_models
from sparseattn.cli.progress import progress_of
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost
from sparseattn.cost_model.machine import CPU, GPUS, Machine, measured_path
from sparseattn.cost_model.measure import measure
from sparseattn.cost_model.model_shape import ModelShape, named
from sparseattn.cost_model.model_steps import Workload
from sparseattn.reporting import machine_tables
from sparseattn.reporting.terminal import Screen, table_screen
from sparseattn.selectors.registry import make_selector
from sparseattn.utils.files import naming
from sparseattn.utils.tensors import STORED

ZONES = 4, 64  # sink and window
BUSY = 0.5  # load for each core, before, from which on a measurement is in doubt


@dataclass(frozen=True)
class MachineOptions:
    """The options of `machine`."""

    name: Annotated[
        str | None,
        typer.Argument(
            help=f"Whose figures to show: {CPU}, {', '.join(GPUS)} or a profile's file; none: measure this CPU."
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Models whose whole decode steps to predict, and whether they fit the memory, more than once: "
            f"{', '.join(named())}, or a config.json or its folder."
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Profile to write, default in the cache folder; of --model, its JSON.")
    ] = None
    shape: Annotated[
        str, typer.Option(help="KV heads, query heads of each, and head size, to measure or predict with.")
    ] = "8,4,128"
    dtype: Annotated[
        shared.Dtype,
        typer.Option(metavar="DTYPE", help=f"Of keys and values to predict with: {', '.join(STORED)}."),
    ] = shared.Dtype.bfloat16
    selector: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Methods whose steps to predict, more than once; see `sparseattn info`; of --model by default "
            f"{', '.join(METHODS)}.",
        ),
    ] = None
    context: Annotated[
        str, typer.Option(help="Rows of each sequence to predict with, such as 128k or 1M; several with --model.")
    ] = "128k"
    batch: Annotated[str, typer.Option(help="Sequences to predict with; several with --model.")] = "1"
    budget: Annotated[str, typer.Option(help="Rows beyond sink and window that a step reads, or a share.")] = "2048"
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        if len(self.sizes) != 3:
            raise ValueError(
                f"--shape is three numbers, KV heads, query heads of each and head size, got {self.shape!r}"
            )
        unused = [name for name in ("context", "budget", "batch") if self._is_changed(name)]
        if unused and not self.selector and not self.model:
            raise ValueError(f"--{unused[0]} is for steps that are predicted: name their methods by --selector")
        if self.name is None and (self.selector or self.model):
            given = "--model" if self.model else "--selector"
            raise ValueError(f"{given} predicts steps of a machine: name it, such as `sparseattn machine h100`")
        if self.model and self._is_changed("shape"):
            raise ValueError("--shape is that of the model: leave it or --model out")
        if not self.model and len(self.contexts) * len(self.batches) > 1:
            raise ValueError("several --context or --batch are for whole models: name one by --model")
        if self.name is None and self._is_changed("dtype"):
            raise ValueError("--dtype is for what is shown of a machine: all that profiles have are measured")
        if self.name is not None and self.out is not None and not self.model:
            raise ValueError(f"--out is for measuring this CPU, and {self.name} is shown: leave one of them out")

    def _is_changed(self, name: str) -> bool:
        """Return whether an option is not at its default."""
        return bool(getattr(self, name) != getattr(MachineOptions, name))

    @cached_property
    def sizes(self) -> list[int]:
        """KV heads, query heads of each, and head size."""
        return values.integers(self.shape, "--shape") or []

    @cached_property
    def contexts(self) -> list[int]:
        """Rows of each sequence."""
        return [values.row_count(text, "--context") for text in self.context.split(",")]

    @cached_property
    def batches(self) -> list[int]:
        """Sequences."""
        found = values.integers(self.batch, "--batch") or []
        values.check_positive({"--batch": min(found)})
        return found


@command(MachineOptions)
def run(options: MachineOptions) -> None:
    """Measure in about a minute how fast this CPU runs what decode steps are made of, or show a machine's figures.

    With --model predict whole decode steps of a model, and with --selector alone the attention of one layer. Figures of
    GPUs are their data sheets', and all that follows from them is a prediction.
    """
    heads, group, head_dim = options.sizes
    if options.name is None:
        return _measured(Shape(1, heads, group, head_dim), options.out or measured_path(), options.json)
    known = Machine.load(options.name)
    if options.model:
        return predict_models(
            [
                Workload(known, model, context, batch, options.dtype.torch)
                for model in map(ModelShape.load, options.model)
                for context, batch in itertools.product(options.contexts, options.batches)
            ],
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
        path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with progress_of("measure this CPU") as progress:
        profile = measure(shape=shape, progress=progress)
    profile.save(path)
    load, cores = profile.about["load"][:1], profile.about["machine"]["cores"]
    if load and load[0] > BUSY * cores:
        say(f"other work ran here (load {load[0]:.1f}): measure again when it is quiet")
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
            one = selector.for_layer(LayerContext(0, rope=Rope.of(shape.size)))
            one.check_shape(shape.heads, shape.group, shape.size)
            cost = step_cost(one, shape, context, parse_budget(budget), sink=ZONES[0], window=ZONES[1])
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
        told = {"machine": known.name, "predicted": True, "source": known.source, "steps": steps, "refused": refused}
        typer.echo(json_module.dumps(told))
        return
    table = machine_tables.steps(known, shape, context, budget_label(parse_budget(budget)), costs)
    table.note = "\n".join(f"{spec} is not predicted: {why}" for spec, why in refused.items())
    table_screen().print(table)
