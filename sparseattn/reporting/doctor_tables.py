"""The table of `doctor`: what settings make of every layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from sparseattn.core.diagnosis import LayerDiagnosis
from sparseattn.evaluation.measure_table import Format
from sparseattn.reporting.table import Column, Table
from sparseattn.roles.roles import ranges


def layers_table(title: str, lines: Sequence[LayerDiagnosis]) -> Table:
    """Return a row for each run of layers of which the settings make the same."""
    out = Table(
        title,
        [
            Column.text("layers"),
            Column.text("method", missing="dense"),
            Column("budget"),
            Column("sparse from token", "{:,}".format),
            Column("tokens read", "{:,.0f}".format),
            Column("of", "{:,}".format),
            Column("read %", Format(1, 100)),
            Column.text("why dense", missing=""),
        ],
        row_head=0,
    )
    for _, run in itertools.groupby(lines, lambda line: replace(line, layer=0)):
        alike = list(run)
        first = alike[0]
        share = first.rows_read / first.rows_held
        numbers = ranges([line.layer for line in alike])
        out.add(
            numbers,
            first.method,
            first.budget,
            first.sparse_from,
            first.rows_read,
            first.rows_held,
            share,
            first.why_dense,
        )
    return out
