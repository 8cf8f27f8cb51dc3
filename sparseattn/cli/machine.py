"""`sparseattn machine`: measures this CPU, shows a machine's figures, and predicts what a decode step takes on it."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseattn.cli.common import errors, in_a_sentence, integers, own_selectors, progress_bar, row_count
from sparseattn.core.budget import budget_label, parse_budget
from sparseattn.core.rope import Rope
from sparseattn.core.step_cost import Cost, Shape, dense_cost, step_cost
from sparseattn.cost_model.machine import CPU, DTYPES, GPUS, Machine, measured_path
from sparseattn.cost_model.measure import measure
from sparseattn.reporting import machine_tables
from sparseattn.reporting.terminal import Screen
from sparseattn.selectors.registry import make_selector
from sparseattn.utils.files import naming

TOLD = {"--dtype": "bfloat16", "--context": "128k", "--budget": "2048", "--batch": "1"}  # by default
ZONES = 4, 64  # sink and window
BUSY = 0.5  # load for each core, before, from which on a measurement is in doubt


@in_a_sentence
def machine(
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"Whose figures to show: {CPU}, {', '.join(GPUS)} or a profile's file; none: measure this CPU."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Profile to write; default in the cache folder.")] = None,
    shape: Annotated[
        str, typer.Option(help="KV heads, query heads of each, and head size, to measure or predict with.")
    ] = "8,4,128",
    dtype: Annotated[str, typer.Option(help=f"Of keys and values to predict with: {', '.join(DTYPES)}.")] = TOLD[
        "--dtype"
    ],
    selector: Annotated[
        list[str] | None,
        typer.Option(
            callback=own_selectors, help="Methods whose steps to predict, more than once; see `sparseattn info`."
        ),
    ] = None,
    context: Annotated[str, typer.Option(help="Rows of each sequence to predict with, such as 128k.")] = TOLD[
        "--context"
    ],
    batch: Annotated[int, typer.Option(help="Sequences to predict with.")] = int(TOLD["--batch"]),
    budget: Annotated[str, typer.Option(help="Rows beyond sink and window that a step reads, or a share.")] = TOLD[
        "--budget"
    ],
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """Measure how fast this CPU runs what decode steps are made of, in about a minute, or show a machine's figures and
    with --selector predict steps of one layer.

    Figures of GPUs are their data sheets', and all that follows from them is a prediction.
    """
    sizes = integers(shape, "--shape") or []
    if len(sizes) != 3:
        raise ValueError(f"--shape is three numbers, KV heads, query heads of each and head size, got {shape!r}")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
    heads, group, size = sizes
    of = Shape(batch, heads, group, size, DTYPES[dtype])
    given = {"--context": context, "--budget": budget, "--batch": str(batch)}
    if not selector and (unused := [option for option, value in given.items() if value != TOLD[option]]):
        raise ValueError(f"{unused[0]} is for steps that are predicted: name their methods by --selector")
    if name is None:
        if selector:
            raise ValueError("--selector predicts steps of a machine: name it, such as `sparseattn machine h100`")
        if dtype != TOLD["--dtype"]:
            raise ValueError("--dtype is for what is shown of a machine: all that profiles have are measured")
        return _measured(Shape(1, heads, group, size), measured_path() if out is None else out, json)
    if out is not None:
        raise ValueError(f"--out is for measuring this CPU, and {name} is shown: leave one of them out")
    known = Machine.load(name)
    if selector:
        return _predicted(known, of, selector, row_count(context, "--context"), budget, json)
    _show(known, dtype, json)


def _measured(shape: Shape, path: Path, json: bool) -> None:
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task("measure this CPU", total=None)
        made = measure(shape=shape, progress=lambda done, total: bar.update(task, completed=done, total=total))
    made.save(path)
    load, cores = made.about["load"][:1], made.about["machine"]["cores"]
    if load and load[0] > BUSY * cores:
        errors.print(
            f"sparseattn: other work ran here (load {load[0]:.1f}): measure again when it is quiet", soft_wrap=True
        )
    _show(made, "bfloat16", json)
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
        one = make_selector(spec).for_layer(0, Rope.of(shape.size))
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
