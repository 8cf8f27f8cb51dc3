"""The tables of `machine`: how fast kinds of launches run, and what steps are predicted to take."""

from __future__ import annotations

from collections.abc import Mapping

from sparseattn.core.step_cost import KINDS, Cost, Shape
from sparseattn.cost_model.machine import Machine
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table


def speeds(machine: Machine, dtype: str) -> Table:
    """Return a row for each kind of launch: its fixed time, its arithmetic, and what it does."""
    out = Table(
        _title(machine),
        [
            Column.text("launch"),
            Column("us", Format(1, 1e6)),
            Column("Gflop/s", Format(1, 1e-9), missing=""),
            Column("ns per entry", Format(2, 1e9), missing=""),
            Column.text("what"),
        ],
    )
    for kind, speed in machine.of_dtype(dtype).items():
        out.add(kind, speed.launch, speed.flops, speed.entry or None, KINDS.get(kind, ""))
    return out


def steps(machine: Machine, shape: Shape, rows: int, budget: str, costs: Mapping[str, Cost]) -> Table:
    """Return a row for each method: the seconds its step is predicted to take, and what it moves and launches.

    Args:
        costs: method -> cost of its step; "dense" is what others are compared with.
    """
    seconds = {method: machine.seconds(cost) for method, cost in costs.items()}
    out = Table(
        f"{_title(machine)}\nPredicted attention of one layer, without the model's weights: {rows:,} tokens, batch "
        f"{shape.batch}, {shape.heads} KV heads, budget {budget}",
        [
            Column.text("method"),
            Column("predicted us", Format(1, 1e6)),
            Column("speed-up", Format(1)),
            Column("MB", Format(2, 1e-6)),
            Column("launches"),
        ],
    )
    for method, cost in costs.items():
        times = seconds["dense"] / seconds[method]
        out.add(method, seconds[method], times, cost.bytes, cost.count)
    out.note = "\n".join(
        f"The prediction for {method} assumes that {cost.expected}." for method, cost in costs.items() if cost.expected
    )
    return out


def _title(machine: Machine) -> str:
    what = "from its data sheet, not measured" if machine.predicted else "measured"
    memory = "" if machine.memory is None else f", {machine.memory / 1e9:.0f} GB"
    return f"{machine.name}, {what}: {machine.bandwidth / 1e9:,.0f} GB/s{memory} ({machine.source})"
