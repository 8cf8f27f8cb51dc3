"""`sparseattn machine`: measures this CPU, shows a machine's figures, and predicts what a decode step takes on it."""

from __future__ import annotations

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
from sparseattn.cli.progress import progress_of
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.core.context import LayerContext
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost
from sparseattn.cost_model.machine import CPU, GPUS, Machine, measured_path
from sparseattn.cost_model.measure import measure
from sparseattn.reporting import machine_tables
from sparseattn.reporting.terminal import Screen
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
    out: Annotated[Path | None, typer.Option(help="Profile to write; default in the cache folder.")] = None
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
            help="Methods whose steps to predict, more than once; see `sparseattn info`.",
        ),
    ] = None
    context: Annotated[str, typer.Option(help="Rows of each sequence to predict with, such as 128k.")] = "128k"
    batch: Annotated[int, typer.Option(help="Sequences to predict with.")] = 1
    budget: Annotated[str, typer.Option(help="Rows beyond sink and window that a step reads, or a share.")] = "2048"
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False

    def __post_init__(self) -> None:
        if len(self.sizes) != 3:
            raise ValueError(
                f"--shape is three numbers, KV heads, query heads of each and head size, got {self.shape!r}"
            )
        unused = [name for name in ("context", "budget", "batch") if self._is_changed(name)]
        if unused and not self.selector:
            raise ValueError(f"--{unused[0]} is for steps that are predicted: name their methods by --selector")
        if self.name is None and self.selector:
            raise ValueError("--selector predicts steps of a machine: name it, such as `sparseattn machine h100`")
        if self.name is None and self._is_changed("dtype"):
            raise ValueError("--dtype is for what is shown of a machine: all that profiles have are measured")
        if self.name is not None and self.out is not None:
            raise ValueError(f"--out is for measuring this CPU, and {self.name} is shown: leave one of them out")

    def _is_changed(self, name: str) -> bool:
        """Return whether an option is not at its default."""
        return bool(getattr(self, name) != getattr(MachineOptions, name))

    @cached_property
    def sizes(self) -> list[int]:
        """KV heads, query heads of each, and head size."""
        return values.integers(self.shape, "--shape") or []


@command(MachineOptions)
def run(options: MachineOptions) -> None:
    """Measure how fast this CPU runs what decode steps are made of, in about a minute, or show a machine's figures and
    with --selector predict steps of one layer.

    Figures of GPUs are their data sheets', and all that follows from them is a prediction.
    """
    heads, group, head_dim = options.sizes
    shape = Shape(options.batch, heads, group, head_dim, options.dtype.torch)
    if options.name is None:
        return _measured(Shape(1, heads, group, head_dim), options.out or measured_path(), options.json)
    known = Machine.load(options.name)
    if options.selector:
        context = values.row_count(options.context, "--context")
        return _predicted(known, shape, options.selector, context, options.budget, options.json)
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
    for spec in specs:
        one = make_selector(spec).for_layer(LayerContext(0, rope=Rope.of(shape.size)))
        one.check_shape(shape.heads, shape.group, shape.size)
        costs[spec] = step_cost(one, shape, context, parse_budget(budget), sink=ZONES[0], window=ZONES[1])
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
        typer.echo(
            json_module.dumps({"machine": known.name, "predicted": True, "source": known.source, "steps": steps})
        )
        return
    Screen().print(machine_tables.steps(known, shape, context, budget_label(parse_budget(budget)), costs))
