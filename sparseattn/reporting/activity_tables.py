"""Tables of what attention did: by task of a run of lm-eval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table


def by_task(record: Mapping[str, Any]) -> Table:
    """Return a row for each task of the record that a run of lm-eval writes: its steps, and the rows they read."""
    out = Table(
        _method(record),
        [
            Column.text("task"),
            Column.text("sparse end of a prompt, tokens"),
            Column("sparse steps", "{:,}".format),
            Column("dense steps", "{:,}".format),
            Column("rows a step", Format(0)),
            Column("of", Format(0)),
            Column("rows read %", Format(1, 100)),
            Column("bytes read %", Format(1, 100)),
        ],
        row_head=0,
        note="steps and rows are of one layer, on average; a step is one token of one sequence",
    )
    for task, ran in record["tasks"].items():
        layers = max(sum(1 for counts in ran["by_layer"].values() if counts["sparse_steps"]), 1)
        steps, stored = ran["sparse_steps"], max(ran["rows_held"], 1)
        read = None if ran["bytes_read"] is None else ran["bytes_read"] / max(ran["bytes_held"], 1)
        out.add(
            task,
            ran["tail_tokens"],
            steps // layers,
            ran["dense_steps"] // max(len(ran["by_layer"]), 1),
            ran["rows_read"] / max(steps, 1),
            ran["rows_held"] / max(steps, 1),
            ran["rows_read"] / stored,
            read,
        )
    return out


def _method(record: Mapping[str, Any]) -> str:
    if "server" in record:
        return f"decoded by {record['server']}"
    return (
        f"decoded by {record['selector']}, budget {record['budget']}, sink {record['sink']}, window {record['window']}"
    )
