"""`sparseattn machine NAME --model MODEL`: whether a model fits a machine, and what its decode steps take there."""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from sparseattn.core.budget import Rows, budget_label
from sparseattn.cost_model.model_steps import Workload, method_steps, record
from sparseattn.reporting.model_tables import machine_line, memory_lines, steps_table
from sparseattn.reporting.terminal import table_screen
from sparseattn.utils.files import naming, write_atomic


def predict_models(
    workloads: Sequence[Workload], methods: Sequence[str], budget: Rows, json: bool, out: Path | None
) -> None:
    """Print the steps of each workload, or one JSON object; with `out` write that object there too.

    Args:
        workloads: at least one, all on one machine and in one dtype.
        methods: as they are typed.
        budget: as of `decode`.
    """
    steps = [method_steps(workload, methods, budget) for workload in workloads]
    machine = workloads[0].machine
    prediction = {
        "machine": machine.name,
        "predicted": True,
        "source": machine.source,
        "memory_bytes": machine.memory,
        "bandwidth": machine.bandwidth,
        "dtype": str(workloads[0].dtype).removeprefix("torch."),
        "budget": budget_label(budget),
        "workloads": [record(workload, own) for workload, own in zip(workloads, steps, strict=True)],
    }
    if handed_over(prediction, json, out):
        return
    screen = table_screen()
    screen.print(machine_line(workloads[0]), soft_wrap=True)
    for workload, own in zip(workloads, steps, strict=True):
        screen.print()
        for line in memory_lines(workload):
            screen.print(line, soft_wrap=True)
        if any(step.seconds is not None for step in own):
            screen.print(steps_table(workload, own, budget_label(budget)))


def handed_over(record: Mapping[str, Any], json: bool, out: Path | None) -> bool:
    """Write a prediction to `out`, where one is named, and print it with `json`; return whether that was all.

    Args:
        record: the prediction, as JSON holds it.
    """
    if out is not None:
        with naming(out):
            write_atomic(out, (json_module.dumps(record, indent=1) + "\n").encode())
    if json:
        typer.echo(json_module.dumps(record))
    return json
