"""`sparseattn machine NAME --model MODEL --ranks N`: what a rank keeps, reads, sends and takes where rows are dealt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseattn.cli.machine_model import handed_over
from sparseattn.core.budget import Rows, budget_label
from sparseattn.cost_model.rank_steps import Dealt, rank_steps, record
from sparseattn.reporting.model_tables import machine_line
from sparseattn.reporting.rank_tables import link_line, rank_table
from sparseattn.reporting.terminal import table_screen

RANKED = ("quest", "lowbit")  # methods that share their scores


def predict_ranks(
    dealt: Sequence[Dealt], methods: Sequence[str], budget: Rows, exact: bool, json: bool, out: Path | None
) -> None:
    """Print a rank's steps, or one JSON object; with `out` write that object there too.

    Args:
        dealt: at least one, all on one machine, with one link and in one dtype.
        methods: as they are typed.
        budget: of all ranks together.
        exact: whether ranks agree on the best of all.
    """
    steps = [rank_steps(workload, methods, budget, exact) for workload in dealt]
    machine = dealt[0].work.machine
    printed = {
        "machine": machine.name,
        "predicted": True,
        "source": machine.source,
        "memory_bytes": machine.memory,
        "dtype": str(dealt[0].work.dtype).removeprefix("torch."),
        "budget": budget_label(budget),
        "share": "exact" if exact else "union",
        "workloads": [record(workload, own) for workload, own in zip(dealt, steps, strict=True)],
    }
    if handed_over(printed, json, out):
        return
    screen = table_screen()
    screen.print(machine_line(dealt[0].work), soft_wrap=True)
    screen.print(link_line(dealt[0]), soft_wrap=True)
    for workload, own in zip(dealt, steps, strict=True):
        screen.print()
        screen.print(rank_table(workload, own, budget_label(budget), exact))
